"""`kestrel-grpc batch`: its rate beside the engine's own, its memory over many lines, and what kills leave.

- `rate`: questions, each about a picture of its own, are answered in a closed loop, and by a batch that reads the
  pictures from files, with as many requests in flight: by an engine in this process, and by a server (`--address`),
  whose closed loop is that of `kestrel-grpc bench --api rest --whole`. The four take turns; each ratio is the
  median over pairs of neighbours.
- `memory`: a batch over an engine that answers at once. Tells the memory of the process by the number of lines.
- `kills`: a batch of the built-in model, with sampled answers, is killed at random points and resumed, and its
  output is compared with that of a run without a break, byte for byte.

    python -m bench.batch rate --requests 200 --rounds 5
    python -m bench.batch memory --lines 1000000
    python -m bench.batch kills --lines 500 --kills 3
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.frontend import EVENTS, EmptyEngine
from bench.harness.engines import add_engine_options, closed_loop, endless, engine_config
from bench.harness.load import Questions
from bench.harness.output import parser_of, write_json
from bench.harness.serving import RunningServer, machine_facts, started_server
from bench.harness.workload import WORKLOADS, Album, Workload
from kestrel_grpc.cli.batch.callers import Caller, EngineCaller, ServerAddress, ServerCaller
from kestrel_grpc.cli.batch.command import IN_FLIGHT_OF_SERVER
from kestrel_grpc.cli.batch.lines import Record, Template, open_source
from kestrel_grpc.cli.batch.output import Output
from kestrel_grpc.cli.batch.run import Run
from kestrel_grpc.cli.bench.calls import Target
from kestrel_grpc.cli.bench.processes import CALL_TIMEOUT_S
from kestrel_grpc.cli.bench.processes import LoadProcesses as Processes
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.images.image_uris import NoRemoteImages
from kestrel_grpc.process.resources import SWITCH_INTERVAL_S, loop_factory
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Query, Request, SamplingParams
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.engine.warm_up import warm_up

_NUM_DRAWINGS = 16
_FIRST_NUMBER = 1_000_000
_IN_PROCESS, _BY_ADDRESS = "in process", "by --address"
_KINDS = ("closed loop", "batch")
_FIRST_UTILIZATION = 0.45
"""Of the engine, on a GPU that it shares with the server."""
_POLL_S = 0.01
_NUM_READINGS = 10


# The rate


def _numbers(round_: int, count: int) -> range:
    """The numbers of a round's pictures: no two rounds show the same one."""
    return range(round_ * count, (round_ + 1) * count)


async def _run_lines(caller: Caller, given: Iterator[Record], target: Path, num_in_flight: int) -> None:
    output = Output(target, {}, resumes=False, replaces=True)
    run = Run(given, output, caller, Template("query"), num_in_flight=num_in_flight, max_retry_s=60.0)
    assert await run.run()
    output.finish()
    output.close()
    assert not output.num_failures, f"{output.num_failures} requests have failed; see {target}"


class _Input:
    """What is asked: each picture once, in the closed loops and in files for the batches."""

    workload = replace(WORKLOADS["direct"], is_streamed=False)

    def __init__(self, folder: Path, num_requests: int) -> None:
        self.folder = folder
        self.num_requests = num_requests
        self._album = Album(_NUM_DRAWINGS)

    def requests(self, round_: int) -> Iterator[Request]:
        sampling = SamplingParams(temperature=0.0, max_tokens=self.workload.num_tokens)
        for number, picture in self._pictures(round_):
            yield Query(self.workload.question(number), picture, sampling=sampling)

    def lines(self, round_: int) -> Iterator[Record]:
        path = self.folder / "lines.jsonl"
        with path.open("w") as file:
            for number, picture in self._pictures(round_):
                image = self.folder / f"{number}.jpg"
                image.write_bytes(picture)
                settings = {"temperature": 0, "max_tokens": self.workload.num_tokens}
                line = {"image": str(image), "question": self.workload.question(number), "settings": settings}
                file.write(json.dumps(line) + "\n")
        return iter(open_source(path))

    def _pictures(self, round_: int) -> Iterator[tuple[int, bytes]]:
        for number in _numbers(round_, self.num_requests):
            picture = self._album.picture(self.workload, number)
            assert picture is not None
            yield number, picture


Form = Callable[[int], Awaitable[float]]
"""Answers the requests of a round; returns the seconds that it took."""


async def _rates(folder: Path, config: EngineConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    num_requests: int = arguments.requests
    num_in_flight: int | None = arguments.in_flight
    given = _Input(folder, num_requests)
    seconds: dict[str, list[float]] = {}
    with endless(replace(config, memory_utilization=_FIRST_UTILIZATION)) as config:
        # The server finds the memory of the engine in use, and takes what is left.
        engine = await asyncio.to_thread(LocalEngine.start, config)
        try:
            await warm_up(engine)
            options = ("--model", config.model, "--device", arguments.device, "--dtype", arguments.dtype)
            options += tuple(f"--{option}" for option in arguments.set)
            with started_server((*options, "--http-port", "0")) as server:
                at_once = {
                    _IN_PROCESS: num_in_flight or 2 * engine.info.max_batch_size,
                    _BY_ADDRESS: num_in_flight or IN_FLIGHT_OF_SERVER,
                }
                with (
                    contextlib.closing(_load(server)) as load,
                    contextlib.closing(_server_caller(server, at_once[_BY_ADDRESS])) as caller,
                ):
                    forms = {
                        _IN_PROCESS: _in_process(engine, given, at_once[_IN_PROCESS]),
                        _BY_ADDRESS: _by_address(load, caller, given, at_once[_BY_ADDRESS]),
                    }
                    for round_ in range(arguments.rounds + 1):  # the first is not counted
                        for name, pair in forms.items():
                            for kind, form in zip(_KINDS, pair, strict=True):
                                took_s = await form(round_)
                                seconds.setdefault(f"{kind}, {name}", []).append(took_s)
                                print(f"{kind}, {name}: {num_requests / took_s:.1f}/s", flush=True)
        finally:
            engine.close()
    return {name: _compared(seconds, name, num_requests) | {"in_flight": at_once[name]} for name in at_once}


def _in_process(engine: LocalEngine, given: _Input, num_at_once: int) -> tuple[Form, Form]:
    async def loop(round_: int) -> float:
        begun = time.perf_counter()
        await closed_loop(engine, given.requests(2 * round_), num_at_once, _require_answer)
        return time.perf_counter() - begun

    async def batch(round_: int) -> float:
        lines = given.lines(2 * round_ + 1)
        begun = time.perf_counter()
        caller = EngineCaller(engine, ServerConfig(), NoRemoteImages())
        await _run_lines(caller, lines, given.folder / "out.jsonl", num_at_once)
        return time.perf_counter() - begun

    return loop, batch


def _by_address(
    load: Processes[Workload], caller: ServerCaller, given: _Input, num_at_once: int
) -> tuple[Form, Form]:
    async def loop(_: int) -> float:
        recording = await asyncio.to_thread(load.counted, given.workload, num_at_once, given.num_requests, 0.0)
        errors = {sample.error for sample in recording.samples} - {""}
        assert not errors, f"requests have failed: {errors}"
        return recording.window.duration_s

    async def batch(round_: int) -> float:
        lines = given.lines(2 * round_ + 1)
        begun = time.perf_counter()
        await _run_lines(caller, lines, given.folder / "out.jsonl", num_at_once)
        return time.perf_counter() - begun

    return loop, batch


def _load(server: RunningServer) -> Processes[Workload]:
    """The closed loop of `kestrel-grpc bench --api rest --whole`; its pictures are not those of the batches."""
    target = Target("rest", f"http://{server.http_address}")
    return Processes(target, Questions(_NUM_DRAWINGS, (), 1), 1, first_number=_FIRST_NUMBER)


def _server_caller(server: RunningServer, num_connections: int) -> ServerCaller:
    address = ServerAddress.parse(server.http_address, None)
    return ServerCaller(address, None, timeout_s=CALL_TIMEOUT_S, num_connections=num_connections)


def _compared(seconds: Mapping[str, list[float]], name: str, num_requests: int) -> dict[str, Any]:
    loop_s, batch_s = (seconds[f"{kind}, {name}"][1:] for kind in _KINDS)
    ratios = [alone / batch for alone, batch in zip(loop_s, batch_s, strict=True)]
    return {
        "requests": num_requests,
        "closed_loop_per_s": num_requests / statistics.median(loop_s),
        "batch_per_s": num_requests / statistics.median(batch_s),
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def _require_answer(number: int, answer: object) -> None:
    if isinstance(answer, Exception):
        raise answer


# The memory


class _InstantEngine(EmptyEngine):
    """Ends each request at once, and notes the memory of the process now and then."""

    def __init__(self, note_every: int) -> None:
        super().__init__()
        self._note_every = note_every
        self.num_requests = 0
        self.readings: list[dict[str, float]] = []

    def submit_samples(
        self,
        request: Request,
        *,
        deadline: float | None = None,
        tenant: str = "",
        namespace: str = "",
        route: str = "",
    ) -> list[Stream]:
        self.num_requests += 1
        if self.num_requests % self._note_every == 0:
            self.readings.append({"lines": self.num_requests, "mib": _resident_bytes() / 2**20})
        stream = Stream()
        self.add(stream, [EVENTS[-1]])
        return [stream]


async def _memory(folder: Path, num_lines: int) -> dict[str, Any]:
    path = folder / "lines.jsonl"
    with path.open("w") as file:
        for number in range(num_lines):
            file.write(json.dumps({"id": f"line {number}", "question": f"What is in picture {number}?"}) + "\n")
    engine = _InstantEngine(num_lines // _NUM_READINGS)
    begun = time.perf_counter()
    caller = EngineCaller(engine, ServerConfig(), NoRemoteImages())
    await _run_lines(caller, iter(open_source(path)), folder / "out.jsonl", 2 * engine.info.max_batch_size)
    duration_s = time.perf_counter() - begun
    for reading in engine.readings:
        print(f"{reading['lines']:>9,.0f} lines  {reading['mib']:.1f} MiB")
    print(f"{num_lines / duration_s:,.0f} lines/s")
    return {"lines": num_lines, "lines_per_s": num_lines / duration_s, "readings": engine.readings}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# The kills


def _kills(folder: Path, num_lines: int, num_kills: int, seed: int) -> dict[str, Any]:
    settings = {"temperature": 1.0, "max_tokens": 4}
    path = folder / "lines.jsonl"
    with path.open("w") as file:
        for number in range(num_lines):
            line = {"question": f"How many shapes, {number}?", "settings": settings}
            file.write(json.dumps(line) + "\n")
    whole, parts = folder / "whole.jsonl", folder / "parts.jsonl"
    subprocess.run(_command(path, whole), check=True)
    points = sorted(random.Random(seed).sample(range(1, num_lines), num_kills))
    found: list[int] = []
    for point in points:
        found.append(_run_until_killed(_command(path, parts, "--resume"), parts, point))
        print(f"killed when {point} lines were asked for: {found[-1]} were written")
    subprocess.run(_command(path, parts, "--resume"), check=True)
    are_equal = whole.read_bytes() == parts.read_bytes()
    print(f"{num_lines} lines, {num_kills} kills: the outputs are {'equal' if are_equal else 'DIFFERENT'}")
    return {"lines": num_lines, "killed_at": found, "equal": are_equal}


def _command(path: Path, target: Path, *words: str) -> Sequence[str]:
    options = ("--skill", "query", "--deterministic", "--log-level", "warning", *words)
    return (sys.executable, "-m", "kestrel_grpc", "batch", str(path), str(target), *options)


def _run_until_killed(command: Sequence[str], target: Path, num_lines: int) -> int:
    """Kill the command once its output has so many lines; returns how many it has."""
    with subprocess.Popen(command) as process:
        while _count(target) < num_lines:
            if process.poll() is not None:
                raise RuntimeError("the run has ended before it could be killed")
            time.sleep(_POLL_S)
        process.kill()
    return _count(target)


def _count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = parser_of(__doc__)
    kinds = result.add_subparsers(dest="kind", required=True)
    rate = kinds.add_parser("rate")
    rate.add_argument("--requests", type=int, default=200, help="of each round (default: %(default)s)")
    rate.add_argument("--rounds", type=int, default=5, help="of each kind (default: %(default)s)")
    add_engine_options(rate)
    rate.add_argument("--in-flight", type=int, help="default: as `kestrel-grpc batch`")
    memory = kinds.add_parser("memory")
    memory.add_argument("--lines", type=int, default=1_000_000, help="default: %(default)s")
    kills = kinds.add_parser("kills")
    kills.add_argument("--lines", type=int, default=500, help="default: %(default)s")
    kills.add_argument("--kills", type=int, default=3, help="default: %(default)s")
    kills.add_argument("--seed", type=int, default=0, help="of the points at which it is killed")
    result.add_argument("--json", type=Path, default=Path("bench/out/batch.json"), help="default: %(default)s")
    return result


def main() -> int:
    """Measure, print, write the numbers; 1 if outputs differ."""
    command = parser()
    arguments = command.parse_args()
    with tempfile.TemporaryDirectory(prefix="kestrel-batch-") as name:
        folder = Path(name)
        if arguments.kind == "kills":
            found = _kills(folder, arguments.lines, arguments.kills, arguments.seed)
        else:
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            measured = (
                _memory(folder, arguments.lines)
                if arguments.kind == "memory"
                else _rates(folder, engine_config(command, arguments), arguments)
            )
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                found = runner.run(measured)
    if arguments.kind == "rate":
        for name, form in found.items():
            print(f"{name}, {form['in_flight']} in flight: batch over closed loop {form['ratio']:.3f}")
    write_json(arguments.json, {**machine_facts(), arguments.kind: found})
    return 0 if found.get("equal", True) else 1


if __name__ == "__main__":
    sys.exit(main())
