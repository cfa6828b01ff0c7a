"""Asks a server over gRPC from processes of its own, and says when each answer, and each piece of it, came.

Pictures are drawn before the clock runs, so that a load process does little but send and receive.
Of its own cost each tells the processor time that it used: near 1 core a process measures itself. All processes of
a machine share one monotonic clock. Knows requests and times; what they amount to is for `summary.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import grpc

from bench.harness.closed_loop import ClosedLoop, Sample, Window
from bench.harness.workload import Album, Workload
from kestrel_client.v1 import generation_pb2, media_pb2, vision_service_pb2

METHOD = "/kestrel.v1.VisionService/Query"
_WHOLE_METHOD = "/kestrel.v1.VisionService/CompleteQuery"
CALL_TIMEOUT_S = 120.0
_MAX_MESSAGE_BYTES = 64 * 2**20
# Late by more than this, an event loop is busy with something else than waiting.
_TICK_S = 0.01


@dataclass(frozen=True, slots=True)
class Recording:
    """What happened in a window, as all load processes saw it."""

    window: Window
    samples: tuple[Sample, ...]
    """Requests that overlap the window."""
    busiest_client: float
    """Processor time of the busiest load process, as a share of the window."""
    client_lag_ms: float
    """99th percentile of how late the slowest load process got to what was due."""


class LoadProcesses:
    """Several processes that load one server together. Each command goes to all, which share the work evenly.

    The requests name the given adapters in turn; none where there are none. Pictures are known by the numbers of
    requests, which begin with `first_number`: two who load one server begin far from each other.
    """

    def __init__(
        self,
        address: str,
        num_processes: int,
        num_pictures: int,
        adapters: tuple[str, ...] = (),
        first_number: int = 0,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for index in range(num_processes):
            ours, theirs = context.Pipe()
            arguments = (theirs, address, index, num_processes, num_pictures, adapters, first_number)
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._gather()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.terminate()
                process.join()

    def closed(self, workload: Workload, concurrency: int, duration_s: float, warm_up_s: float) -> Recording:
        """Keep `concurrency` requests running, and record a window once all of them have been answered once, or
        after `warm_up_s`."""
        self._tell("closed", workload, concurrency, warm_up_s)
        self._gather()
        start = time.perf_counter()
        self._tell(Window(start, start + duration_s))
        self._gather()
        self._tell("stop")
        return self._recording(Window(start, start + duration_s))

    def open(self, workload: Workload, rate_per_s: float, duration_s: float, wait_limit_s: float) -> Recording:
        """Send requests at random moments, on average `rate_per_s`, however long the answers take.

        An answer that has not come `wait_limit_s` after the last request was sent counts as an error.
        """
        start = time.perf_counter() + 0.2
        self._tell("open", workload, rate_per_s, Window(start, start + duration_s), wait_limit_s)
        return self._recording(Window(start, start + duration_s))

    def _recording(self, window: Window) -> Recording:
        parts = self._gather()
        return Recording(
            window,
            tuple(itertools.chain.from_iterable(samples for samples, _, _ in parts)),
            max(cpu_s for _, cpu_s, _ in parts) / window.duration_s,
            1e3 * max(lag_s for _, _, lag_s in parts),
        )

    def _tell(self, *command: Any) -> None:
        for pipe in self._pipes:
            pipe.send(command)

    def _gather(self) -> list[Any]:
        return [pipe.recv() for pipe in self._pipes]


def _run(
    pipe: Connection,
    address: str,
    index: int,
    num_processes: int,
    num_pictures: int,
    adapters: tuple[str, ...],
    first_number: int,
) -> None:
    """A load process: answers commands until its pipe closes."""
    with contextlib.suppress(EOFError, KeyboardInterrupt), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        album = Album(num_pictures)
        runner.run(_Load(pipe, address, index, num_processes, album, adapters, first_number).run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Load:
    """One load process's part of every command."""

    def __init__(
        self,
        pipe: Connection,
        address: str,
        index: int,
        num_processes: int,
        album: Album,
        adapters: tuple[str, ...],
        first_number: int,
    ) -> None:
        self._pipe = pipe
        self._index = index
        self._num_processes = num_processes
        self._address = address
        self._album = album
        self._adapters = adapters
        # Never the same in two processes, nor twice in the life of one.
        self._numbers = itertools.count(first_number + index, num_processes)

    async def run(self) -> None:
        options = (("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.insecure_channel(self._address, options) as channel:
            self._call = channel.unary_stream(
                METHOD, response_deserializer=vision_service_pb2.QueryResponse.FromString
            )
            self._whole_call = channel.unary_unary(
                _WHOLE_METHOD, response_deserializer=vision_service_pb2.CompleteQueryResponse.FromString
            )
            self._pipe.send("ready")
            while True:
                name, *arguments = await self._hear()
                await getattr(self, f"_{name}")(*arguments)

    async def _hear(self) -> Any:
        return await asyncio.to_thread(self._pipe.recv)

    async def _closed(self, workload: Workload, concurrency: int, warm_up_s: float) -> None:
        num_callers = len(range(self._index, concurrency, self._num_processes))
        loop = ClosedLoop(lambda started: self._ask(workload, started, CALL_TIMEOUT_S), num_callers)
        await loop.warm_up(warm_up_s)
        self._pipe.send("warm")
        (window,) = await self._hear()
        cpu_s, lag_s = await self._watch(window)
        await loop.outlast(window)
        self._pipe.send("outlasted")
        await self._hear()
        await loop.cancel()
        self._pipe.send((loop.overlapping(window), cpu_s, lag_s))

    async def _open(self, workload: Workload, rate_per_s: float, window: Window, wait_limit_s: float) -> None:
        chance = random.Random(self._index)
        samples: list[Sample] = []
        tasks: list[asyncio.Task[None]] = []

        async def one(due: float) -> None:
            samples.append(await self._ask(workload, due, window.end + wait_limit_s - time.perf_counter()))

        async def send() -> None:
            due = window.start
            while (due := due + chance.expovariate(rate_per_s / self._num_processes)) < window.end:
                await asyncio.sleep(max(due - time.perf_counter(), 0.0))
                tasks.append(asyncio.create_task(one(due)))

        sending = asyncio.create_task(send())
        cpu_s, lag_s = await self._watch(window)
        await sending
        await asyncio.gather(*tasks)
        self._pipe.send((samples, cpu_s, lag_s))

    async def _watch(self, window: Window) -> tuple[float, float]:
        """Sit a window out; returns the processor time spent in it and how late this process was, in seconds."""
        await asyncio.sleep(max(window.start - time.perf_counter(), 0.0))
        cpu_s, lags = time.process_time(), [0.0]
        while (now := time.perf_counter()) < window.end:
            await asyncio.sleep(_TICK_S)
            lags.append(time.perf_counter() - now - _TICK_S)
        return time.process_time() - cpu_s, sorted(lags)[int(0.99 * (len(lags) - 1))]

    async def _ask(self, workload: Workload, started: float, timeout_s: float) -> Sample:
        number = next(self._numbers)
        picture = self._album.picture(workload, number)
        message = vision_service_pb2.QueryRequest(
            question=workload.question(number),
            image=None if picture is None else media_pb2.Image(data=picture),
            reasoning=False,
            sampling=generation_pb2.SamplingParams(temperature=0.0, max_tokens=workload.num_tokens),
        )
        if self._adapters:
            message.options.adapter = self._adapters[number // self._num_processes % len(self._adapters)]
        if not workload.is_streamed:
            return await self._ask_for_whole(message, started, timeout_s)
        arrivals: array[float] = array("d")
        num_tokens, num_first_tokens, num_cached_tokens = 0, 1, 0
        error = ""
        call = self._call(message.SerializeToString(), timeout=timeout_s)
        try:
            while isinstance(response := await call.read(), vision_service_pb2.QueryResponse):  # else the end
                if response.HasField("delta"):
                    if not arrivals:
                        num_first_tokens = response.delta.token_count
                    arrivals.append(time.perf_counter())
                elif response.HasField("completed"):
                    usage = response.completed.info.usage
                    num_tokens, num_cached_tokens = usage.output_token_count, usage.cached_token_count
        except grpc.aio.AioRpcError as failure:
            error = failure.code().name
        finally:
            call.cancel()
        return Sample(
            started, time.perf_counter(), num_tokens, arrivals, error, num_first_tokens, num_cached_tokens
        )

    async def _ask_for_whole(
        self, message: vision_service_pb2.QueryRequest, started: float, timeout_s: float
    ) -> Sample:
        """An answer in one message; the fields that both requests share have the same numbers."""
        try:
            response = await self._whole_call(message.SerializeToString(), timeout=timeout_s)
        except grpc.aio.AioRpcError as failure:
            return Sample(started, time.perf_counter(), error=failure.code().name)
        usage, now = response.result.info.usage, time.perf_counter()
        num_tokens = usage.output_token_count
        return Sample(started, now, num_tokens, array("d", [now]), "", num_tokens, usage.cached_token_count)
