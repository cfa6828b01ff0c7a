"""Clients of an engine core in processes of their own: what front ends do with an engine, without their network."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import uvloop

from bench.harness.workload import QUESTIONS, WORKLOADS
from kestrel_grpc.multiprocess.engine_channel.endpoint import CoreEndpoint
from kestrel_grpc.multiprocess.engine_channel.engine_client import EngineClient
from kestrel_grpc.process.resources import freeze_existing_objects
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Query, SamplingParams

_SAMPLING = SamplingParams(temperature=0.0, max_tokens=WORKLOADS["cached"].num_tokens)


class CoreClients:
    """Processes that ask the core of a folder in closed loops."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        """Use `started`."""
        self._pipes = pipes

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, folder: Path, num_processes: int, num_at_once: int, image: bytes, *, is_streamed: bool
    ) -> Iterator[CoreClients]:
        """They ask questions about one image, `num_at_once` together."""
        context = multiprocessing.get_context("spawn")
        pipes: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            for index in range(num_processes):
                pipe, theirs = context.Pipe()
                arguments = (folder, index, theirs, num_at_once // num_processes, image, is_streamed)
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
        for pipe in self._pipes:
            pipe.send(num_requests // len(self._pipes))
        answers = await asyncio.gather(*(asyncio.to_thread(pipe.recv) for pipe in self._pipes))
        if None in answers:
            raise RuntimeError("a request failed, or found nothing in the cache")
        return sum(answers)


def question(image: bytes, number: int) -> Query:
    """The question of this number about an image."""
    return Query(QUESTIONS[number % len(QUESTIONS)], image, sampling=_SAMPLING)


def _run(folder: Path, index: int, pipe: Connection, num_at_once: int, image: bytes, is_streamed: bool) -> None:
    uvloop.run(_serve(folder, index, pipe, num_at_once, image, is_streamed))


async def _serve(
    folder: Path, index: int, pipe: Connection, num_at_once: int, image: bytes, is_streamed: bool
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
            numbers, before_s = iter(range(num_requests)), time.process_time()
            try:
                await asyncio.gather(*(caller(numbers) for _ in range(num_at_once)))
            except Exception:
                pipe.send(None)
                raise
            pipe.send(time.process_time() - before_s)
            is_first = False
    client.close()
