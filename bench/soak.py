"""Does the server stay as it is? Half an hour of mixed traffic, and whether anything grows or is left behind.

Starts `kestrel-grpc serve`, asks it from this process for all that it can do, and for some that it refuses;
callers cancel, miss deadlines and come and go, and each minute ends with a pause. Every few seconds it looks at
the memory, descriptors and threads of each process of the server, and at pages and requests. In the end nothing
may be left of all that: no page, and no more descriptors, threads or tasks than after the warm-up, in any process
(in a run of under 20 minutes, a few more threads and descriptors of pools); the memory of none may have risen in
the second half; all must be those of the beginning; no call may have failed that was not meant to. Leaves a table,
the numbers as JSON, plots and the server's log. Tasks and objects are those of the process that was started, which
is the supervisor where there are several. Options after `--` go to the server. Wants Linux.

    python -m bench.soak
    python -m bench.soak --minutes 5 --callers 12 -- --max-batch-size 4
    python -m bench.soak --minutes 60 --pause 7 -- --frontends 3 --devices cpu,cpu --kv-pages 1200
"""

import asyncio
import contextlib
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness.mixed_traffic import PAUSE_S, MixedTraffic, Tally
from bench.harness.output import parser_of, write_json
from bench.harness.serving import Holdings, ProcessVitals, Vitals, WatchedServer, machine_facts, watched_server
from bench.harness.trend import Trend, means
from kestrel_grpc.cli.bench.plot import Axis, Series, line_plot

CYCLE_S, IDLE_SHARE = 60.0, 0.2
"""Callers come for a cycle, and are gone for this last share of it."""
LARGEST_SLOPE_MIB_PER_HOUR = 10.0
SHORTEST_HALF_CYCLES = 10
"""Over less than so many cycles memory may well rise: it still fills what it will reuse."""
MOST_NEW_IN_POOLS = 8
"""Pools make threads, and descriptors with them, when that many are first needed at once: a shorter run may add
these. A leak in each call adds far more."""
NUM_BURST_CALLS, MAX_BURSTS_PER_FRONTEND = 32, 12
SETTLE_TIMEOUT_S = 120.0
_MIB = 2**20
_OF_A_PROCESS = (
    ("descriptors", "num_descriptors", 1),
    ("threads", "num_threads", 1),
    ("memory, MiB", "rss_bytes", _MIB),
)
"""What is shown of each process: a name, the field of `ProcessVitals`, and its unit. The first two are held."""


@dataclass(frozen=True, slots=True)
class Look:
    """The server at a moment, in seconds since the warm-up."""

    time_s: float
    vitals: Vitals


@dataclass(frozen=True, slots=True)
class Rest:
    """The server without requests."""

    vitals: Vitals
    holdings: Holdings


@dataclass(frozen=True, slots=True)
class Soak:
    """All that was seen."""

    machine: dict[str, Any]
    duration_s: float
    cycle_s: float
    before: Rest
    after: Rest
    looks: tuple[Look, ...]
    tally: Tally
    troubles: tuple[str, ...]
    """What the server's log complains of."""
    exit_status: int

    @property
    def names(self) -> tuple[str, ...]:
        """Of the processes after the warm-up."""
        return tuple(self.before.vitals.processes)

    def trend(self, name: str) -> Trend | None:
        """Of a process's memory over the second half, from each cycle's mean: MiB per hour."""
        points = [(time_s, process.rss_bytes / _MIB) for time_s, process in self._looks_at(name)]
        late = [(x / 3600, y) for x, y in means(points, self.cycle_s) if x >= self.duration_s / 2]
        return Trend.of(late)

    def complaints(self) -> list[str]:
        """What is not as it should be."""
        found: list[str] = []
        pids = [_pids(vitals) for vitals in (self.before.vitals, self.after.vitals)]
        if pids[0] != pids[1]:
            found.append(f"other processes in the end: {pids[1]} after {pids[0]}")
        if self.tally.num_errors:
            found.append(f"{self.tally.num_errors} errors that were not injected")
        if self.after.vitals.num_used_pages:
            found.append(f"{self.after.vitals.num_used_pages} pages in use")
        allowed = {"tasks": 0}
        for name, before, after in self._levels():
            if after > before + allowed.get(name, num_new_in_pools(self.duration_s)):
                found.append(f"{name}: {before} after the warm-up, {after} in the end")
        if self.troubles:
            found.append(f"{len(self.troubles)} warnings or errors in the server's log")
        if self.exit_status:
            found.append(f"the server ended with status {self.exit_status}")
        if is_long(self.duration_s):
            for name in self.names:
                trend = self.trend(name)
                if trend is not None and trend.slope > LARGEST_SLOPE_MIB_PER_HOUR:
                    found.append(f"memory of the {name} rises by {trend.slope:.1f} MiB per hour")
        return found

    def as_text(self) -> str:
        """The table."""
        before, after, tally = self.before, self.after, self.tally
        rows: list[tuple[str, Any, Any, Any]] = []
        for name in self.names:
            looks = [process for _, process in self._looks_at(name)]
            ends = [rest.vitals.processes.get(name) for rest in (before, after)]
            for what, field, unit in _OF_A_PROCESS:
                first, last = ("" if end is None else round(getattr(end, field) / unit) for end in ends)
                most = max((round(getattr(process, field) / unit) for process in looks), default="")
                rows.append((f"{name}: {what}", first, most, last))
        rows.append(("tasks", before.holdings.num_tasks, "", after.holdings.num_tasks))
        rows.append(("objects", before.holdings.objects.total(), "", after.holdings.objects.total()))
        for name, field in (("pages", "num_used_pages"), ("running", "num_running"), ("waiting", "num_waiting")):
            peak = max(getattr(look.vitals, field) for look in self.looks)
            rows.append((name, getattr(before.vitals, field), peak, getattr(after.vitals, field)))
        lines = ["| | after the warm-up | most | in the end |", "|---|---|---|---|"]
        lines += [f"| {name} | {first} | {most} | {last} |" for name, first, most, last in rows]
        cores = (after.vitals.cpu_s - before.vitals.cpu_s) / (self.looks[-1].time_s or 1.0)
        lines += ["", f"{self.duration_s / 60:.3g} minutes, {cores:.2f} cores busy in the server"]
        for name in self.names:
            trend = self.trend(name)
            rise = "too few means"
            if trend is not None:
                rise = f"{trend.slope:+.2f} ± {trend.standard_error:.2f} MiB per hour"
            lines.append(f"memory of the {name} over the second half: {rise}")
        lines.append(f"{tally.answered.total():,} answered: {_listed(tally.answered)}")
        lines.append(f"{tally.injected.total():,} injected: {_listed(tally.injected)}")
        lines += [f"not injected: {error}" for error in tally.errors]
        lines += [f"log: {line}" for line in self.troubles[:20]]
        lines += [f"NOT AS IT SHOULD BE: {complaint}" for complaint in self.complaints()]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Everything, and what objects there are more of than after the warm-up."""
        grown = self.after.holdings.objects - self.before.holdings.objects
        return {
            "machine": self.machine,
            "duration_s": self.duration_s,
            "complaints": self.complaints(),
            "trend_mib_per_hour": {
                name: None if (trend := self.trend(name)) is None else asdict(trend) for name in self.names
            },
            "before": {**asdict(self.before.vitals), "num_tasks": self.before.holdings.num_tasks},
            "after": {**asdict(self.after.vitals), "num_tasks": self.after.holdings.num_tasks},
            "objects_grown": dict(grown.most_common(40)),
            "answered": dict(self.tally.answered),
            "injected": dict(self.tally.injected),
            "num_errors": self.tally.num_errors,
            "errors": self.tally.errors,
            "troubles": list(self.troubles),
            "looks": [{"time_s": look.time_s, **asdict(look.vitals)} for look in self.looks],
        }

    def plots(self) -> dict[str, str]:
        """SVG files by name."""

        def series(name: str, what: str, field: str, unit: float) -> Series:
            points = ((time_s / 60, getattr(process, field) / unit) for time_s, process in self._looks_at(name))
            return Series(f"{name}: {what}", tuple(points))

        minutes = Axis("minutes since the warm-up")
        held, memory = (
            tuple(series(name, *kind) for name in self.names for kind in kinds)
            for kinds in (_OF_A_PROCESS[:2], _OF_A_PROCESS[2:])
        )
        return {
            "memory": line_plot("Memory of the server", minutes, Axis("MiB"), memory),
            "held": line_plot("Descriptors and threads of the server", minutes, Axis("number"), held),
        }

    def _looks_at(self, name: str) -> list[tuple[float, ProcessVitals]]:
        """Seconds since the warm-up, and what was seen of a process."""
        looks = ((look.time_s, look.vitals.processes.get(name)) for look in self.looks)
        return [(time_s, process) for time_s, process in looks if process is not None]

    def _levels(self) -> Iterator[tuple[str, int, int]]:
        """What there may not be more of in the end: what it is, how many after the warm-up, and in the end."""
        before, after = self.before, self.after
        for name, process in after.vitals.processes.items():
            first = before.vitals.processes.get(name, process)
            for what, field, _ in _OF_A_PROCESS[:2]:
                yield f"{what} of the {name}", getattr(first, field), getattr(process, field)
        yield "tasks", before.holdings.num_tasks, after.holdings.num_tasks


def is_long(duration_s: float) -> bool:
    """True if what the server makes once and reuses is complete by the second half."""
    return duration_s / 2 >= SHORTEST_HALF_CYCLES * CYCLE_S


def num_new_in_pools(duration_s: float) -> int:
    """Returns how many more threads, and how many more descriptors, a process may have after so long a run."""
    return 0 if is_long(duration_s) else MOST_NEW_IN_POOLS


async def soak(server: WatchedServer, duration_s: float, num_callers: int, pause_s: float, every_s: float) -> Soak:
    """Warm up, look on for so long, and stop the server."""
    cycle_s = min(CYCLE_S, duration_s / 6)
    machine = machine_facts()  # now: half an hour later the checkout may be another
    traffic = MixedTraffic(server.address)
    await warm_up(server, traffic)
    await traffic.run(num_callers, cycle_s)
    before = await _rest(server, None)
    start, looks = time.monotonic(), list[Look]()
    watching = asyncio.create_task(_watch(server, start, every_s, looks))
    while (left_s := duration_s - (time.monotonic() - start)) > 0:
        await traffic.run(num_callers, min(left_s, (1 - IDLE_SHARE) * cycle_s), pause_s)
        _say(
            f"{(time.monotonic() - start) / 60:.1f} min, {traffic.tally.answered.total():,} answered, {_now(looks)}"
        )
        await asyncio.sleep(IDLE_SHARE * cycle_s)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    after = await _rest(server, before, num_new_in_pools(duration_s))
    troubles = tuple(server.troubles())
    status = await asyncio.to_thread(server.stop)
    return Soak(machine, duration_s, cycle_s, before, after, tuple(looks), traffic.tally, troubles, status)


async def warm_up(server: WatchedServer, traffic: MixedTraffic) -> None:
    """Bursts until each front end has had one. The system chooses which one takes the connection of a burst."""
    names = [name for name in server.processes() if name.startswith("frontend")] or ["server"]
    calls = Counter[str]()
    for _ in range(MAX_BURSTS_PER_FRONTEND * len(names)):
        await traffic.burst(NUM_BURST_CALLS)
        calls = await asyncio.to_thread(server.calls)
        if all(calls[name] >= NUM_BURST_CALLS for name in names):
            return
    raise RuntimeError(f"the warm-up has not reached every front end: {dict(calls)}")


async def _watch(server: WatchedServer, start: float, every_s: float, looks: list[Look]) -> None:
    while True:
        vitals = await asyncio.to_thread(server.vitals)
        looks.append(Look(time.monotonic() - start, vitals))
        await asyncio.sleep(every_s)


async def _rest(server: WatchedServer, level: Rest | None, num_new: int = 0) -> Rest:
    """The server once it holds no more than `num_new` above `level`, or changes no more; or after a while, whatever
    it holds.

    Idle threads of pools end some time after their last work, and connections after their client.
    """
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    last: dict[str, int] = {}
    num_equal = 0
    while True:
        # A cancelled call of a closed client keeps its connection open until it is collected.
        gc.collect()
        vitals = await asyncio.to_thread(server.vitals)
        now = _settled(vitals)
        num_equal = num_equal + 1 if now == last else 0
        last = now
        if level is None:
            is_settled = num_equal >= 5
        else:
            goal = _settled(level.vitals)
            is_settled = now.keys() == goal.keys() and all(
                now[what] <= goal[what] + (0 if what == "pages" else num_new) for what in now
            )
        if is_settled or time.monotonic() > deadline:
            return Rest(vitals, await asyncio.to_thread(server.holdings))
        await asyncio.sleep(0.5)


def _settled(vitals: Vitals) -> dict[str, int]:
    """What a server without requests has no more of than before."""
    return {
        "pages": vitals.num_used_pages,
        **{
            f"{name}: {what}": getattr(process, field)
            for name, process in vitals.processes.items()
            for what, field, _ in _OF_A_PROCESS[:2]
        },
    }


def _pids(vitals: Vitals) -> dict[str, int]:
    return {name: process.pid for name, process in vitals.processes.items()}


def _now(looks: Sequence[Look]) -> str:
    if not looks:
        return ""
    return "; ".join(
        f"{name} {process.rss_bytes / _MIB:.0f} MiB, {process.num_descriptors} descriptors, "
        f"{process.num_threads} threads"
        for name, process in looks[-1].vitals.processes.items()
    )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Soak, print the table, write the files; 1 if anything is not as it should be."""
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="after the warm-up (default: %(default)g)")
    parser.add_argument("--callers", type=int, default=6, help="calls at a time (default: %(default)s)")
    parser.add_argument(
        "--pause", type=float, default=PAUSE_S, help="mean seconds between a caller's calls (default: %(default)g)"
    )
    parser.add_argument("--every", type=float, default=5.0, help="seconds between looks (default: %(default)g)")
    parser.add_argument("--json", type=Path, default=Path("bench/out/soak.json"), help="default: %(default)s")
    parser.add_argument("server_options", nargs="*", metavar="-- OPTION", help="options of `kestrel-grpc serve`")
    arguments = parser.parse_args()
    with watched_server(arguments.json.with_suffix(".log"), arguments.server_options) as server:
        work = soak(server, 60 * arguments.minutes, arguments.callers, arguments.pause, arguments.every)
        outcome = asyncio.run(work)
    write_json(arguments.json, outcome.as_json())
    for name, svg in outcome.plots().items():
        arguments.json.with_name(f"{arguments.json.stem}-{name}.svg").write_text(svg + "\n")
    print(outcome.as_text())
    return 1 if outcome.complaints() else 0


if __name__ == "__main__":
    sys.exit(main())
