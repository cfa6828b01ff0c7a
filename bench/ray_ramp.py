"""How does Ray Serve scale replicas with the load (`ramp`), and what does its gRPC proxy cost (`proxy`)?

    make test-ray ARGS=--collect-only      # installs Ray into build/ray
    PYTHONPATH=.:runtime:kernels:clients/python build/ray/bin/python -m bench.ray_ramp ramp
    PYTHONPATH=.:runtime:kernels:clients/python build/ray/bin/python -m bench.ray_ramp proxy

`ramp`: the built-in model on the processors, one to three replicas, two requests at a time for each; one caller,
then six, then one again, each of whom asks again as soon as it is answered. Twice a second the number of replicas,
of callers and of answers is noted, from before the first caller until one replica is left. It writes a plot too.

`proxy`: the same calls to `kestrel-grpc serve` and to one replica behind the proxy, one after the other.
`ListModels` has no work, so that its time is that of the way alone; the query is about a known image. Beside the
time of calls it measures the processor time of all processes but the caller's, which a busy machine changes less;
what these use while nobody calls is subtracted.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from bench.harness.output import parser_of, write_json
from bench.harness.ray_cluster import cluster, deploy, num_running, ray_version
from bench.harness.serving import started_server
from kestrel_client import AsyncClient, Client, KestrelClientError
from kestrel_grpc.cli.bench.plot import Axis, Series, line_plot

PICTURE = files("kestrel_grpc").joinpath("demo_picture.png").read_bytes()
QUESTION = "What is in this image?"
FEW, MANY = 1, 6
"""Callers at a time."""
AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": 3,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 5,
    "downscale_delay_s": 10,
    "metrics_interval_s": 1,
    "look_back_period_s": 5,
}
SAMPLE_EVERY_S = 0.5
IDLE_S = 5.0
LONG: dict[str, Any] = {"temperature": 50.0, "top_p": 1.0, "seed": 14, "max_tokens": 256}
"""An answer of 256 tokens, whatever the model thinks of the question."""


@dataclass
class Callers:
    """Asks in a thread of its own, by as many callers at a time as wanted."""

    address: str
    wanted: int = 0
    latencies_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Ask until `wanted` is below 0."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with AsyncClient(self.address, max_retries=0, max_retry_s=0, timeout_s=300) as client:
            running: set[asyncio.Task[None]] = set()
            while self.wanted >= 0:
                while len(running) < self.wanted:
                    running.add(asyncio.create_task(self._ask(client)))
                done, running = await asyncio.wait(
                    running or {asyncio.create_task(asyncio.sleep(SAMPLE_EVERY_S))},
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    task.result()
            await asyncio.gather(*running)

    async def _ask(self, client: AsyncClient) -> None:
        started = time.perf_counter()
        try:
            await client.complete_query(PICTURE, QUESTION, temperature=0)
        except KestrelClientError as error:
            self.failures.append(f"{error.code.name} {error.reason}: {error.message}")
        else:
            self.latencies_s.append(time.perf_counter() - started)


def ramp(few_s: float, many_s: float) -> dict[str, Any]:
    """Samples of a ramp, and what came of it."""
    samples: list[dict[str, float]] = []
    with cluster() as address:
        deploy(autoscaling_config=AUTOSCALING)
        callers = Callers(address)
        thread = threading.Thread(target=callers.run)
        started = time.perf_counter()

        def sample_until(passed_s: float, num_replicas: int | None = None) -> None:
            until = time.perf_counter() + passed_s
            while time.perf_counter() < until and (num_replicas is None or num_running() != num_replicas):
                samples.append(
                    {
                        "time_s": time.perf_counter() - started,
                        "callers": callers.wanted,
                        "replicas": num_running(),
                        "answers": len(callers.latencies_s),
                    }
                )
                time.sleep(SAMPLE_EVERY_S)

        thread.start()
        try:
            for num_callers, duration_s in ((FEW, few_s), (MANY, many_s)):
                callers.wanted = num_callers
                sample_until(duration_s)
            callers.wanted = FEW
            sample_until(many_s * 2, num_replicas=1)
            sample_until(few_s)
        finally:
            callers.wanted = -1
            thread.join()
    latencies_ms = sorted(1e3 * value for value in callers.latencies_s)
    return {
        "samples": samples,
        "answers": len(latencies_ms),
        "failures": callers.failures,
        "p50_ms": statistics.median(latencies_ms),
        "p99_ms": latencies_ms[int(0.99 * (len(latencies_ms) - 1))],
        "scaling": _scaling(samples),
    }


def _scaling(samples: list[dict[str, float]]) -> list[dict[str, float]]:
    """When the number of callers or of replicas changed, and to what."""
    changes = [samples[0]]
    for sample in samples:
        if any(sample[name] != changes[-1][name] for name in ("callers", "replicas")):
            changes.append(sample)
    return changes


def write_plot(file: Path, samples: list[dict[str, float]]) -> None:
    """Callers, replicas and answers per second over time, as SVG."""
    window = round(5 / SAMPLE_EVERY_S)
    rates = [
        (later["time_s"], (later["answers"] - former["answers"]) / (later["time_s"] - former["time_s"]))
        for former, later in zip(samples, samples[window:], strict=False)
    ]
    lines = [
        Series(name, tuple((sample["time_s"], sample[name]) for sample in samples))
        for name in ("callers", "replicas")
    ]
    lines.append(Series("answers per second, over 5 s", tuple(rates)))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(line_plot("Ray Serve under a ramp", Axis("seconds"), Axis("number"), lines))


def cost(address: str, num_calls: int, num_streams: int) -> dict[str, float]:
    """What calls take, and what they cost the processes behind the address."""
    with Client(address, max_retries=0, max_retry_s=0, timeout_s=300) as client:
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "ListModels": (client.list_models, num_calls),
            "query of one token": (
                lambda: client.complete_query(PICTURE, QUESTION, temperature=0, max_tokens=1),
                num_calls,
            ),
            "stream of 256 tokens": (lambda: client.query(None, "hello", **LONG).result(), num_streams),
        }
        for call, _ in calls.values():
            call()
        idle_cores = _idle_cores()
        measured: dict[str, float] = {}
        for name, (call, count) in calls.items():
            started, before_s = time.perf_counter(), _processor_s()
            times_ms = [1e3 * _seconds(call) for _ in range(count)]
            processor_s = _processor_s() - before_s - idle_cores * (time.perf_counter() - started)
            measured[f"{name}: median, ms"] = statistics.median(times_ms)
            measured[f"{name}: fastest, ms"] = min(times_ms)
            measured[f"{name}: processor, ms"] = 1e3 * processor_s / count
    return measured | {"idle: processors in use": idle_cores}


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _idle_cores() -> float:
    """Processors in use while nobody calls."""
    before_s = _processor_s()
    time.sleep(IDLE_S)
    return (_processor_s() - before_s) / IDLE_S


def _processor_s() -> float:
    """The processor time of all processes that this one has started, and of those that they have."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents[int(folder.name)] = int(fields[1])
        ticks[int(folder.name)] = int(fields[11]) + int(fields[12])
    ours, found = {os.getpid()}, set[int]()
    while ours:
        ours = {pid for pid, parent in parents.items() if parent in ours}
        found |= ours
    return sum(ticks[pid] for pid in found) / os.sysconf("SC_CLK_TCK")


def proxy(num_calls: int, num_streams: int) -> dict[str, Any]:
    """The cost of calls to a server, and through the proxy."""
    with started_server(("--device", "cpu")) as server:
        alone = cost(server.address, num_calls, num_streams)
    with cluster() as address:
        deploy(autoscaling_config={"min_replicas": 1, "max_replicas": 1})
        return {"a server": alone, "Ray's proxy": cost(address, num_calls, num_streams)}


def main() -> int:
    """Print what was measured, and write it as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("ramp", "proxy"))
    parser.add_argument("--few", type=float, default=20, help="seconds with one caller (default: %(default)s)")
    parser.add_argument("--many", type=float, default=90, help="seconds with six callers (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=300, help="short calls of each kind (default: %(default)s)")
    parser.add_argument(
        "--streams", type=int, default=10, help="streams, one after the other (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="default: bench/out/ray_WHAT.json")
    arguments = parser.parse_args()
    facts = {"python": platform.python_version(), "ray": ray_version(), "cores": os.cpu_count()}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    file = arguments.json or Path(f"bench/out/ray_{arguments.what}.json")
    if arguments.what == "ramp":
        result = ramp(arguments.few, arguments.many)
        print(f"{'s':>6} {'callers':>8} {'replicas':>9}")
        for change in result["scaling"]:
            print(f"{change['time_s']:6.1f} {change['callers']:8.0f} {change['replicas']:9.0f}")
        print(
            f"{result['answers']} answers, {len(result['failures'])} failures; "
            f"p50 {result['p50_ms']:.1f} ms, p99 {result['p99_ms']:.1f} ms"
        )
        write_plot(file.with_suffix(".svg"), result["samples"])
    else:
        result = proxy(arguments.calls, arguments.streams)
        alone, through = result.values()
        print(f"{'':36} {'a server':>10} {'by Ray':>10}")
        for name, value in alone.items():
            print(f"{name:36} {value:10.2f} {through[name]:10.2f}")
    write_json(file, {**facts, **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
