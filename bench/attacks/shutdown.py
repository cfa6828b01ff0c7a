"""SIGTERM while callers wait for answers: each of them must be answered or told to ask elsewhere."""

import asyncio
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from bench.attacks.attack import MAX_END_S
from bench.attacks.target import started_target
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub

NUM_CALLERS = 16
_LOAD_S = 2.0
_TIMEOUT_S = 60.0
_ALLOWED = frozenset(("OK", "UNAVAILABLE"))


@dataclass(frozen=True, slots=True)
class Shutdown:
    """One run. `codes` counts how calls ended."""

    codes: dict[str, int]
    end_s: float | None
    exit_status: int | None

    def failures(self) -> list[str]:
        """What is not as required."""
        found = [f"{count} {code}" for code, count in self.codes.items() if code not in _ALLOWED]
        if self.end_s is None or self.end_s > MAX_END_S:
            found.append("SIGTERM did not end the process")
        elif self.exit_status:
            found.append(f"ended with status {self.exit_status}")
        return found


def shut_down_under_load(server_options: Sequence[str] = ()) -> Shutdown:
    """A server of its own, SIGTERM after two seconds of load."""
    options = ("--withdrawal-delay", "1", "--drain-timeout", "10", *server_options)
    with tempfile.TemporaryDirectory() as folder, started_target(Path(folder), options, None) as target:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        stop = context.Event()
        process = context.Process(
            target=_load, args=(target.address, target.tokens["alice"], stop, theirs), daemon=True
        )
        process.start()
        theirs.close()
        try:
            if not ours.poll(_TIMEOUT_S) or ours.recv() != "ready":
                raise RuntimeError("the load does not start")
            time.sleep(_LOAD_S)
            target.terminate(2 * MAX_END_S)
            stop.set()
            codes: dict[str, int] = ours.recv() if ours.poll(_TIMEOUT_S) else {"no answer at all": 1}
        finally:
            process.kill()
            process.join()
    return Shutdown(codes, target.end_s, target.exit_status)


def as_text(runs: Sequence[Shutdown]) -> str:
    """A line for all runs together."""
    codes: Counter[str] = Counter()
    for run in runs:
        codes.update(run.codes)
    listed = ", ".join(f"{count} {code}" for code, count in sorted(codes.items()))
    num_held = sum(not run.failures() for run in runs)
    ended = ", ".join("not" if run.end_s is None else f"{run.end_s:.1f}" for run in runs)
    held = f"{num_held} of {len(runs)} runs held"
    return f"SIGTERM under load of {NUM_CALLERS} callers: {held}; {listed}; ended after {ended} s"


def _load(address: str, token: str, stop: Any, pipe: Connection) -> None:
    asyncio.run(_ask_until(address, token, stop, pipe))


async def _ask_until(address: str, token: str, stop: Any, pipe: Connection) -> None:
    """Streams and unary calls without a pause and without retries, until the server has gone."""
    codes: Counter[str] = Counter()
    metadata = (("authorization", f"Bearer {token}"),)
    fields: Any = {"question": "hello", "sampling": {"max_tokens": 24, "temperature": 50.0, "top_p": 1.0}}
    options = (("grpc.enable_retries", 0),)

    async def caller(number: int, stub: Any) -> None:
        while not stop.is_set():
            if number % 2:
                call = stub.Query(wire.QueryRequest(**fields), metadata=metadata)
                code = await _code_of_stream(call)
            else:
                call = stub.CompleteQuery(wire.CompleteQueryRequest(**fields), metadata=metadata)
                code = await call.code()
            codes[code.name] += 1
            if code is grpc.StatusCode.UNAVAILABLE:
                await asyncio.sleep(0.1)

    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = VisionServiceStub(channel)
        pipe.send("ready")
        await asyncio.gather(*(caller(number, stub) for number in range(NUM_CALLERS)))
    pipe.send(dict(codes))


async def _code_of_stream(call: Any) -> grpc.StatusCode:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await call.code()
