"""How much processor time of the host does a request take whose image is known?

Many questions about one image are asked at once, so that each finds the image's pages in the prefix cache. Steps
after the first return at once (`instant_steps.py`): the model and the launching of its kernels have no part.
First the engine alone is asked, in this process, then a server through gRPC; its time is that of all its threads,
beside it that of the event loop alone. Processor time changes less than rates do with what else the machine does.

To compare two checkouts, run this in each of them, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from bench.harness.in_process import closed_loop
from bench.harness.instant_steps import leave_out_model
from bench.harness.load import LoadProcesses
from bench.harness.serving import started_server
from bench.harness.workload import QUESTIONS, WORKLOADS, chart
from kestrel_grpc.cli.serve import SWITCH_INTERVAL_S
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import KestrelError
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine

_NUM_TOKENS = WORKLOADS["cached"].num_tokens
_WARM_UP_REQUESTS = 500


def requests(count: int, image: bytes) -> Iterator[Query]:
    """Questions about one image in turn."""
    sampling = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS)
    for number in range(count):
        yield Query(QUESTIONS[number % len(QUESTIONS)], image, sampling=sampling)


def engine_costs(num_requests: int, num_at_once: int, num_rounds: int) -> Iterator[dict[str, float]]:
    """Processor µs of a request by thread, round by round. Raises RuntimeError where a request misses the cache."""
    leave_out_model()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in the server
    image = chart(0)
    engine = LocalEngine.start(EngineConfig(device="cpu", max_batch_size=num_at_once))

    def check(number: int, answer: Finished | KestrelError) -> None:
        if isinstance(answer, KestrelError):
            raise answer
        if number > num_at_once and not answer.usage.num_cached_tokens:
            raise RuntimeError(f"request {number} found nothing in the cache")

    run = partial(closed_loop, engine, num_at_once=num_at_once, answered=check)
    try:
        asyncio.run(run(requests(_WARM_UP_REQUESTS, image)))
        for _ in range(num_rounds):
            before = _thread_times()
            asyncio.run(run(requests(num_requests, image)))
            by_thread = {
                kind: 1e6 * (seconds - before.get(kind, 0.0)) / num_requests
                for kind, seconds in _thread_times().items()
            }
            yield {"all": sum(by_thread.values()), **by_thread}
    finally:
        engine.close()


def server_costs(name: str, seconds: float, num_at_once: int, num_rounds: int) -> Iterator[dict[str, float]]:
    """Processor µs of a request of a workload through gRPC, round by round.

    Raises RuntimeError where one fails or misses the cache.
    """
    options = ("--device", "cpu", "--max-batch-size", str(num_at_once))
    workload = WORKLOADS[name]
    with (
        started_server(options, program="bench.harness.instant_steps") as server,
        LoadProcesses(server.address, 1, 1) as load,
    ):
        load.closed(workload, num_at_once, 1.0, 20.0)
        for _ in range(num_rounds):
            before, began = _process_times(server.pid), time.perf_counter()
            recording = load.closed(workload, num_at_once, seconds, 0.0)
            after, ended = _process_times(server.pid), time.perf_counter()
            samples = recording.samples
            if any(sample.error or not sample.num_cached_tokens for sample in samples):
                raise RuntimeError("a request failed, or found nothing in the cache")
            window = recording.window
            rate = sum(window.start <= sample.ended < window.end for sample in samples) / window.duration_s
            num_requests = rate * (ended - began)
            spent = {name: 1e6 * (after[name] - before[name]) / num_requests for name in after}
            yield {**spent, "requests/s": rate}


def _thread_times() -> dict[str, float]:
    """Processor seconds of the threads of this process, by kind of thread."""
    found: defaultdict[str, float] = defaultdict(float)
    for thread in threading.enumerate():
        assert thread.ident is not None, "it runs"
        kind = "preprocessing" if thread.name.startswith("kestrel-preprocess") else thread.name
        kind = {"MainThread": "event loop", "kestrel-engine": "engine thread"}.get(kind, kind)
        found[kind] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


def _process_times(pid: int) -> dict[str, float]:
    """Processor seconds of a process: of all its threads, and of the first one."""
    tasks = Path(f"/proc/{pid}/task")
    times = {int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks.iterdir()}
    return {"all": sum(times.values()), "event loop": times[pid]}


def as_text(name: str, rounds: list[Mapping[str, float]]) -> str:
    """Medians in µs, and all rounds of the first value."""
    parts = ", ".join(
        f"{part} {statistics.median(costs[part] for costs in rounds):.0f}"
        for part in rounds[0]
        if statistics.median(costs[part] for costs in rounds) >= 1
    )
    totals = " ".join(f"{costs['all']:.0f}" for costs in rounds)
    return f"{name}: {parts} ({totals})"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000, help="of a round in process (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a round through gRPC (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=64, help="requests that run at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each (default: %(default)s)")
    arguments = parser.parse_args()
    print("processor time of a request in µs, medians (and that of all threads by round)")
    print(as_text("engine", list(engine_costs(arguments.requests, arguments.at_once, arguments.rounds))))
    for name, workload in (("server, streamed", "cached"), ("server, whole", "cached-whole")):
        costs = server_costs(workload, arguments.seconds, arguments.at_once, arguments.rounds)
        print(as_text(name, list(costs)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
