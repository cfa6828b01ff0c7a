"""What a chrome trace of the torch profiler amounts to: costs by kernel, by host call and by phase, and idle time.

Knows the file's events, neither engine nor torch. All times are in microseconds.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

_ON_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_ON_HOST = frozenset(("cpu_op", "cuda_runtime", "cuda_driver"))
_RANGE = "user_annotation"
OTHER = "other"
"""The phase of what happens in none."""


class Span(NamedTuple):
    """An event with a beginning and an end."""

    name: str
    kind: str
    thread: tuple[Any, Any]
    start_us: float
    end_us: float
    correlation: int | None
    """What a launch on the host and its work on the device have in common."""


@dataclass(frozen=True, slots=True)
class Cost:
    """All calls of one name."""

    name: str
    us: float
    calls: int


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """One phase over the whole trace."""

    name: str
    calls: int
    host_us: float
    device_us: float
    """Of the work that it launched, whenever that ran."""


class Trace:
    """The part of a trace within the range `window`: everything where it has no such range."""

    def __init__(self, spans: Iterable[Span], phases: Collection[str], window: str) -> None:
        spans = list(spans)
        ranges = [span for span in spans if span.kind == _RANGE and span.name == window]
        self.start_us = min((span.start_us for span in ranges or spans), default=0.0)
        self.end_us = max((span.end_us for span in ranges or spans), default=0.0)
        inside = [span for span in spans if span.end_us > self.start_us and span.start_us < self.end_us]
        self._device = [span for span in inside if span.kind in _ON_DEVICE]
        self._host = [span for span in inside if span.kind in _ON_HOST]
        self._ranges = [span for span in inside if span.kind == _RANGE and span.name in phases]
        self._phases = phases

    @classmethod
    def read(cls, file: Path, phases: Collection[str], window: str) -> Self:
        """Read a `.json.gz` file."""
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            events = json.load(stream)["traceEvents"]
        return cls((_span(event) for event in events if event.get("ph") == "X"), phases, window)

    @property
    def has_device(self) -> bool:
        """Whether there was a device beside the host."""
        return bool(self._device)

    @property
    def length_us(self) -> float:
        return self.end_us - self.start_us

    def idle_share(self) -> float:
        """The part of the window in which nothing ran on the device; without one, in which no phase ran."""
        busy_us = sum(end - start for start, end in _united(self._device or self._ranges))
        return 1.0 - min(busy_us / self.length_us, 1.0) if self.length_us else 0.0

    def device_costs(self) -> list[Cost]:
        """By kernel or kind of copy, the dearest first."""
        return _costs((span.name, span.end_us - span.start_us) for span in self._device)

    def host_costs(self) -> list[Cost]:
        """By operation or call of the driver, without those within it, and what phases do outside of any."""
        phases = [span._replace(name=f"{span.name}, Python") for span in self._ranges]
        return _costs(_own_times(self._host + phases))

    def phase_costs(self) -> list[PhaseCost]:
        """In the order of the phases, and what belongs to none last."""
        calls: Counter[str] = Counter()
        host_us: defaultdict[str, float] = defaultdict(float)
        device_us: defaultdict[str, float] = defaultdict(float)
        for span in self._ranges:
            host_us[span.name] += span.end_us - span.start_us
            calls[span.name] += 1
        phase_of = self._phase_of_launches()
        for span in self._device:
            device_us[phase_of.get(span.correlation, OTHER)] += span.end_us - span.start_us
        return [PhaseCost(name, calls[name], host_us[name], device_us[name]) for name in (*self._phases, OTHER)]

    def _phase_of_launches(self) -> dict[int | None, str]:
        by_thread: defaultdict[Any, list[Span]] = defaultdict(list)
        for span in sorted(self._ranges, key=lambda span: span.start_us):
            by_thread[span.thread].append(span)
        starts = {thread: [span.start_us for span in spans] for thread, spans in by_thread.items()}
        phase_of: dict[int | None, str] = {}
        for span in self._host:
            if span.correlation is None or span.thread not in by_thread:
                continue
            place = bisect_right(starts[span.thread], span.start_us) - 1  # phases do not lie within each other
            if place >= 0 and span.start_us < by_thread[span.thread][place].end_us:
                phase_of[span.correlation] = by_thread[span.thread][place].name
        return phase_of


def _span(event: dict[str, Any]) -> Span:
    start_us = float(event["ts"])
    return Span(
        event["name"],
        event.get("cat", ""),
        (event.get("pid"), event.get("tid")),
        start_us,
        start_us + float(event.get("dur", 0.0)),
        event.get("args", {}).get("correlation"),
    )


def _united(spans: Iterable[Span]) -> Iterator[tuple[float, float]]:
    """Stretches of time in which at least one of `spans` runs."""
    start = end = 0.0
    for span in sorted(spans, key=lambda span: span.start_us):
        if span.start_us > end:
            yield start, end
            start = span.start_us
        end = max(end, span.end_us)
    yield start, end


def _own_times(spans: list[Span]) -> Iterator[tuple[str, float]]:
    """Each span's time without that of the spans within it, thread by thread."""
    by_thread: defaultdict[Any, list[Span]] = defaultdict(list)
    for span in spans:
        by_thread[span.thread].append(span)
    for own in by_thread.values():
        own.sort(key=lambda span: (span.start_us, -span.end_us))
        outer: list[int] = []
        times = [span.end_us - span.start_us for span in own]
        for place, span in enumerate(own):
            while outer and own[outer[-1]].end_us <= span.start_us:
                outer.pop()
            if outer:
                times[outer[-1]] -= span.end_us - span.start_us
            outer.append(place)
        yield from ((span.name, max(time, 0.0)) for span, time in zip(own, times, strict=True))


def _costs(times: Iterable[tuple[str, float]]) -> list[Cost]:
    total: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for name, us in times:
        total[name] += us
        calls[name] += 1
    return sorted((Cost(name, us, calls[name]) for name, us in total.items()), key=lambda cost: -cost.us)
