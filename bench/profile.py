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

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from bench.harness.engine_options import add_engine_options, endless, engine_config
from bench.harness.in_process import closed_loop
from bench.harness.phases import PHASES, marked_phases
from bench.harness.report import write_json
from bench.harness.serving import machine_facts
from bench.harness.trace import Cost, PhaseCost, Trace
from bench.harness.workload import WORKLOADS, Album, Workload
from kestrel_runtime.api.errors import KestrelError
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine

WINDOW = "load"
NAMES = ("direct", "cot", "long", "text")
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
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    with (
        endless(engine_config(options, arguments)) as config,
        marked_phases(with_nvtx=arguments.nvtx),
    ):
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
