"""Where does the time of a loaded engine go, kernel by kernel, call by call and phase by phase?

Runs the engine in this process under so many requests at once, and after a warm-up watches the rest with the torch
profiler. Prints the dearest kernels by their time on the device, the dearest calls by their time on the host, what
each phase of the engine's steps takes of both, and how long the device was idle; without a device, how long the
engine's thread was. Leaves the trace (`profile.trace.json.gz`, for chrome://tracing or Perfetto) and the tables as
JSON. With `--nvtx` the phases are NVTX ranges, by which ncu and nsys filter; they bring their own profiler, so
that ours stays off:

    python -m bench.profile --model /tmp/md2 --workload cot --at-once 64
    ncu --nvtx --nvtx-include "decode/" python -m bench.profile --model /tmp/md2 --nvtx --requests 4

The profiler costs the host time, so that the device is idle longer than it would be; its own times are true.
"""

import argparse
import asyncio
import contextlib
import functools
import gzip
import json
import os
import sys
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from bench.harness.engines import Method, add_engine_options, closed_loop, endless, engine_config, wrapped
from bench.harness.output import parser_of, write_json
from bench.harness.serving import machine_facts
from bench.harness.workload import WORKLOADS, Album, Workload
from kestrel_runtime.api.errors import KestrelError
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.execution.step_inputs import PrefillInputs
from kestrel_runtime.execution.step_runner import StepHandle, StepRunner

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


PHASES = ("encode", "prefill", "decode", "wait")
_Namer = Callable[..., str]
"""The phase of a call, from its arguments."""
_METHODS: tuple[tuple[type, str, _Namer], ...] = (
    (StepRunner, "_copy_and_encode", lambda runner, batch: "encode"),
    (StepRunner, "_run_whole", lambda runner, inputs: "prefill" if isinstance(inputs, PrefillInputs) else "decode"),
    (StepHandle, "wait", lambda handle: "wait"),
)


@contextlib.contextmanager
def marked_phases(*, with_nvtx: bool) -> Iterator[None]:
    """Until the block ends, each phase is a range of the torch profiler, and with `with_nvtx` an NVTX range too."""
    with contextlib.ExitStack() as stack:
        for owner, name, namer in _METHODS:
            stack.enter_context(wrapped(owner, name, functools.partial(_marked, namer, with_nvtx)))
        yield


def _marked(namer: _Namer, with_nvtx: bool, method: Method) -> Method:
    @functools.wraps(method)
    def marked(*arguments: Any, **keywords: Any) -> Any:
        phase = namer(*arguments, **keywords)
        range_of_tools = torch.cuda.nvtx.range(phase) if with_nvtx else contextlib.nullcontext()
        with range_of_tools, record_function(phase):
            return method(*arguments, **keywords)

    return marked


WINDOW = "load"
NAMES = ("direct", "cot", "long", "text", "changed")
_NAME_WIDTH = 76


class Load:
    """The requests of a workload and what became of them."""

    def __init__(self, engine: LocalEngine, workload: Workload, num_at_once: int) -> None:
        self._engine = engine
        self._workload = workload
        self._num_at_once = num_at_once
        self._album = Album(1 if workload.picture.value == "none" else 16)
        self._num_asked = 0
        self.errors: list[str] = []
        self.num_tokens = 0

    def run(self, num_requests: int) -> float:
        """Ask so many; returns the seconds that took."""
        started = time.perf_counter()
        asyncio.run(closed_loop(self._engine, self._requests(num_requests), self._num_at_once, self._note))
        return time.perf_counter() - started

    def _requests(self, count: int) -> Iterator[Query]:
        sampling = SamplingParams(temperature=0.0, max_tokens=self._workload.num_tokens)
        for _ in range(count):
            number, self._num_asked = self._num_asked, self._num_asked + 1
            picture = self._album.picture(self._workload, number)
            yield Query(self._workload.question(number), picture, sampling=sampling)

    def _note(self, number: int, answer: Finished | KestrelError) -> None:
        if isinstance(answer, Finished):
            self.num_tokens += answer.usage.num_output_tokens
        else:
            self.errors.append(f"{type(answer).__name__}: {answer}")


def profiled(load: Load, num_requests: int, file: Path) -> float:
    """Run the load under the profiler and write the trace; returns the seconds that the load took."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    # Steps run on the engine's thread, which a profiler begun on this one does not see by itself.
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=everywhere) as profiler:
        with record_function(WINDOW):
            seconds = load.run(num_requests)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    file.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(file))
    return seconds


def print_costs(title: str, costs: list[Cost], length_us: float, num_rows: int) -> None:
    """The dearest, and the rest in one row."""
    print(f"\n{title:<{_NAME_WIDTH}} {'ms':>10} {'calls':>8} {'µs each':>9} {'of time':>8}")
    rest = costs[num_rows:]
    rows = costs[:num_rows]
    if rest:
        rows.append(Cost(f"{len(rest)} more", sum(cost.us for cost in rest), sum(cost.calls for cost in rest)))
    for cost in rows:
        name = cost.name if len(cost.name) <= _NAME_WIDTH else cost.name[: _NAME_WIDTH - 1] + "…"
        each_us, share = cost.us / cost.calls, cost.us / length_us
        print(f"{name:<{_NAME_WIDTH}} {cost.us / 1e3:>10.2f} {cost.calls:>8} {each_us:>9.1f} {share:>8.1%}")


def print_phases(phases: list[PhaseCost], length_us: float) -> None:
    """What each phase takes on the host, and on the device what it launched."""
    print(f"\n{'phase':<12} {'calls':>8} {'host ms':>10} {'of time':>8} {'device ms':>10} {'of time':>8}")
    for phase in phases:
        print(
            f"{phase.name:<12} {phase.calls:>8} {phase.host_us / 1e3:>10.2f} {phase.host_us / length_us:>8.1%} "
            f"{phase.device_us / 1e3:>10.2f} {phase.device_us / length_us:>8.1%}"
        )


def report(trace: Trace, num_rows: int) -> dict[str, Any]:
    """Print the tables; returns them for the JSON."""
    device, host, phases = trace.device_costs(), trace.host_costs(), trace.phase_costs()
    idle_share = trace.idle_share()
    if trace.has_device:
        print_costs("on the device", device, trace.length_us, num_rows)
    print_costs("on the host, without what is called from there", host, trace.length_us, num_rows)
    print_phases(phases, trace.length_us)
    what = "the device" if trace.has_device else "the engine's thread"
    print(f"\n{what} was idle for {idle_share:.1%} of {trace.length_us / 1e6:.2f} s")
    return {
        "length_us": trace.length_us,
        "has_device": trace.has_device,
        "idle_share": idle_share,
        "device": [asdict(cost) for cost in device],
        "host": [asdict(cost) for cost in host],
        "phases": [asdict(phase) for phase in phases],
    }


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = parser_of(__doc__)
    add_engine_options(result)
    result.add_argument("--workload", choices=NAMES, default="direct", help="what is asked (%(default)s)")
    result.add_argument("--requests", type=int, default=64, help="requests that are watched (%(default)s)")
    result.add_argument("--at-once", type=int, default=16, help="requests that run at all times (%(default)s)")
    result.add_argument("--top", type=int, default=25, help="rows of each table (%(default)s)")
    result.add_argument("--nvtx", action="store_true", help="mark the phases for nsys and ncu, and profile nothing")
    result.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", "bench/out")),
        help="folder of the files (%(default)s)",
    )
    return result


def main() -> int:
    """Run, print the tables, write the files; 1 if a request failed."""
    options = parser()
    arguments = options.parse_args()
    if arguments.nvtx and not torch.cuda.is_available():
        options.error("--nvtx needs a CUDA device")
    with endless(engine_config(options, arguments)) as config, marked_phases(with_nvtx=arguments.nvtx):
        engine = LocalEngine.start(config)
        try:
            load = Load(engine, WORKLOADS[arguments.workload], arguments.at_once)
            load.run(2 * arguments.at_once)  # kernels are compiled and steps recorded at their first use
            load.num_tokens = 0
            trace_file = arguments.out / "profile.trace.json.gz"
            if arguments.nvtx:
                seconds = load.run(arguments.requests)
            else:
                seconds = profiled(load, arguments.requests, trace_file)
        finally:
            engine.close()
    rate_per_s = arguments.requests / seconds
    print(
        f"{engine.info.model} on {engine.info.device}, {engine.info.dtype}: {arguments.requests} requests of "
        f"{arguments.workload}, {arguments.at_once} at once, {rate_per_s:.1f} per second, {load.num_tokens} tokens"
    )
    for error in sorted(set(load.errors)):
        print(f"{load.errors.count(error)} failed: {error}")
    if not arguments.nvtx:
        tables = report(Trace.read(trace_file, PHASES, WINDOW), arguments.top)
        facts = {"model": engine.info.model, "device": engine.info.device, "dtype": engine.info.dtype}
        asked = {name: getattr(arguments, name) for name in ("workload", "requests", "at_once", "set")}
        result = {"machine": machine_facts(), **facts, **asked, "requests_per_s": rate_per_s, **tables}
        write_json(arguments.out / "profile.json", result)
        print(f"{trace_file} and {arguments.out / 'profile.json'}")
    return 1 if load.errors else 0


if __name__ == "__main__":
    sys.exit(main())
