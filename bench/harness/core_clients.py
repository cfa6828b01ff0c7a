"""Clients of an engine core in processes of their own: what front ends do with an engine, without their network."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import uvloop

from bench.harness.opcodes import Opcodes
from bench.harness.workload import QUESTIONS, WORKLOADS
from kestrel_grpc.multiprocess.engine_channel.endpoint import CoreEndpoint
from kestrel_grpc.multiprocess.engine_channel.engine_client import EngineClient
from kestrel_grpc.process.resources import freeze_existing_objects
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Query, SamplingParams

_OPCODES = -1
"""Asks a process for its opcodes, instead of a number of requests."""
_SAMPLING = SamplingParams(temperature=0.0, max_tokens=WORKLOADS["cached"].num_tokens)


class CoreClients:
    """Processes that ask the core of a folder in closed loops."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        """Use `started`."""
        self._pipes = pipes

    @classmethod
    @contextlib.contextmanager
    def started(
        cls,
        folder: Path,
        num_processes: int,
        num_at_once: int,
        image: bytes,
        *,
        is_streamed: bool,
        counts_opcodes: bool = False,
    ) -> Iterator[CoreClients]:
        """They ask questions about one image, `num_at_once` together; with `counts_opcodes` they can be asked for
        these."""
        context = multiprocessing.get_context("spawn")
        pipes: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            for index in range(num_processes):
                pipe, theirs = context.Pipe()
                arguments = (
                    *(folder, index, theirs, num_at_once // num_processes, image),
                    *(is_streamed, counts_opcodes),
                )
                process = context.Process(target=_run, args=arguments, daemon=True)
                process.start()
                theirs.close()
                pipes.append(pipe)
                processes.append(process)
            yield cls(pipes)
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(10)

    async def ask(self, num_requests: int) -> float:
        """Have so many requests answered; returns processor seconds of all these processes. Raises RuntimeError
        where one fails or finds nothing in the cache."""
        answers = await self._answers(num_requests // len(self._pipes))
        if None in answers:
            raise RuntimeError("a request failed, or found nothing in the cache")
        return sum(answers)

    async def opcodes(self) -> Counter[str]:
        """Return how many opcodes the event loops of these processes have executed, by function."""
        return sum(await self._answers(_OPCODES), Counter())

    async def _answers(self, asked: int) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(asked)
        return await asyncio.gather(*(asyncio.to_thread(pipe.recv) for pipe in self._pipes))


def question(image: bytes, number: int) -> Query:
    """The question of this number about an image."""
    return Query(QUESTIONS[number % len(QUESTIONS)], image, sampling=_SAMPLING)


def _run(
    folder: Path,
    index: int,
    pipe: Connection,
    num_at_once: int,
    image: bytes,
    is_streamed: bool,
    counts_opcodes: bool,
) -> None:
    opcodes = Opcodes() if counts_opcodes else None
    uvloop.run(_serve(folder, index, pipe, num_at_once, image, is_streamed, opcodes))


async def _serve(
    folder: Path,
    index: int,
    pipe: Connection,
    num_at_once: int,
    image: bytes,
    is_streamed: bool,
    opcodes: Opcodes | None,
) -> None:
    client = await EngineClient.connect([CoreEndpoint(folder, 0)], f"frontend-{index}.1")
    freeze_existing_objects()
    is_first = True

    async def caller(numbers: Iterator[int]) -> None:
        for number in numbers:
            (stream,) = client.submit_samples(question(image, number))
            last = [event async for event in stream][-1] if is_streamed else await stream.result()
            if not (is_first or (isinstance(last, Finished) and last.usage.num_cached_tokens)):
                raise RuntimeError("nothing was cached")

    with contextlib.suppress(EOFError):
        while num_requests := await asyncio.to_thread(pipe.recv):
            if num_requests == _OPCODES:
                assert opcodes is not None, "they are counted"
                pipe.send(opcodes.reading()["MainThread"])
                continue
            numbers, before_s = iter(range(num_requests)), time.process_time()
            try:
                await asyncio.gather(*(caller(numbers) for _ in range(num_at_once)))
            except Exception:
                pipe.send(None)
                raise
            pipe.send(time.process_time() - before_s)
            is_first = False
    client.close()
