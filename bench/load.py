"""Asks a server over gRPC from processes of its own, and says when each answer, and each piece of it, came.

Requests are drawn and serialised before the clock runs, so that a load process does little but send and receive.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import grpc

from bench.workload import Workload, chart
from kestrel_client.v1 import generation_pb2, media_pb2, vision_service_pb2

METHOD = "/kestrel.v1.VisionService/Query"
CALL_TIMEOUT_S = 120.0
_MAX_MESSAGE_BYTES = 64 * 2**20
# Late by more than this, an event loop is busy with something else than waiting.
_TICK_S = 0.01


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times are seconds of the monotonic clock; `error` is empty or names what it ended in."""

    started: float
    """When it was sent, or should have been."""
    ended: float
    num_tokens: int = 0
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    """When each piece of the answer came."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the monotonic clock."""

    start: float
    end: float

    @property
    def duration_s(self) -> float:
        return self.end - self.start


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


def requests(workload: Workload, numbers: Sequence[int]) -> list[bytes]:
    """The messages of the requests with these numbers."""
    messages: list[bytes] = []
    for number in numbers:
        seed = workload.picture_seed(number)
        message = vision_service_pb2.QueryRequest(
            question=workload.question(number),
            image=None if seed is None else media_pb2.Image(data=chart(seed)),
            reasoning=False,
            sampling=generation_pb2.SamplingParams(temperature=0.0, max_tokens=workload.num_tokens),
        )
        messages.append(message.SerializeToString())
    return messages


class LoadProcesses:
    """Several processes that load one server together. Each command goes to all, which share the work evenly."""

    def __init__(self, address: str, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for index in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(theirs, address, index, num_processes), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

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

    def prepare(self, workload: Workload, num_requests: int) -> None:
        """Draw that many requests; asked for more, they begin again."""
        self._tell("prepare", workload, num_requests)
        self._gather()

    def closed(self, concurrency: int, duration_s: float, warm_up_s: float) -> Recording:
        """Keep `concurrency` requests running, and record a window once all lanes have had an answer.

        The load goes on until every request of the window has ended, so that none ends in a calm.
        """
        self._tell("closed", concurrency, warm_up_s)
        self._gather()
        start = time.perf_counter()
        self._tell(Window(start, start + duration_s))
        self._gather()
        self._tell("stop")
        return self._recording(Window(start, start + duration_s))

    def open(self, rate_per_s: float, duration_s: float, patience_s: float) -> Recording:
        """Send requests at random moments, on average `rate_per_s`, however long the answers take.

        An answer that has not come `patience_s` after the last request was sent counts as an error.
        """
        start = time.perf_counter() + 0.2
        self._tell("open", rate_per_s, Window(start, start + duration_s), patience_s)
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


def _run(pipe: Connection, address: str, index: int, num_processes: int) -> None:
    """A load process: answers commands until its pipe closes."""
    with contextlib.suppress(EOFError, KeyboardInterrupt), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_Load(pipe, address, index, num_processes).run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Load:
    """One load process's part of every command."""

    def __init__(self, pipe: Connection, address: str, index: int, num_processes: int) -> None:
        self._pipe = pipe
        self._index = index
        self._num_processes = num_processes
        self._address = address
        self._messages: list[bytes] = []
        self._next = 0

    async def run(self) -> None:
        options = (("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.insecure_channel(self._address, options) as channel:
            self._call = channel.unary_stream(
                METHOD, response_deserializer=vision_service_pb2.QueryResponse.FromString
            )
            while True:
                name, *arguments = await self._hear()
                await getattr(self, f"_{name}")(*arguments)

    async def _hear(self) -> Any:
        return await asyncio.to_thread(self._pipe.recv)

    async def _prepare(self, workload: Workload, num_requests: int) -> None:
        self._messages = requests(workload, range(self._index, num_requests, self._num_processes))
        self._next = 0
        self._pipe.send("ready")

    async def _closed(self, concurrency: int, warm_up_s: float) -> None:
        num_lanes = len(range(self._index, concurrency, self._num_processes))
        running: dict[int, float] = {}
        samples: list[Sample] = []
        warm: set[int] = set()
        changed = asyncio.Event()

        async def lane(number: int) -> None:
            while True:
                running[number] = time.perf_counter()
                sample = await self._ask(running[number])
                samples.append(sample)
                warm.add(number)
                changed.set()
                if sample.error:
                    # A server that refuses at once would otherwise be asked without a pause.
                    await asyncio.sleep(_TICK_S)

        async def until(condition: Callable[[], bool]) -> None:
            while not condition():
                changed.clear()
                await changed.wait()

        lanes = [asyncio.create_task(lane(number)) for number in range(num_lanes)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(warm_up_s):
                await until(lambda: len(warm) == num_lanes)
        self._pipe.send("warm")
        (window,) = await self._hear()
        cpu_s, lag_s = await self._watch(window)
        await until(lambda: all(started >= window.end for started in running.values()))
        self._pipe.send("covered")
        await self._hear()
        for task in lanes:
            task.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
        overlapping = [item for item in samples if item.ended > window.start and item.started < window.end]
        self._pipe.send((overlapping, cpu_s, lag_s))

    async def _open(self, rate_per_s: float, window: Window, patience_s: float) -> None:
        chance = random.Random(self._index)
        samples: list[Sample] = []
        tasks: list[asyncio.Task[None]] = []

        async def one(due: float) -> None:
            samples.append(await self._ask(due, window.end + patience_s - time.perf_counter()))

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

    def _message(self) -> bytes:
        message = self._messages[self._next % len(self._messages)]
        self._next += 1
        return message

    async def _ask(self, started: float, timeout_s: float = CALL_TIMEOUT_S) -> Sample:
        arrivals: array[float] = array("d")
        num_tokens = 0
        error = ""
        call = self._call(self._message(), timeout=timeout_s)
        try:
            while isinstance(response := await call.read(), vision_service_pb2.QueryResponse):  # else the end
                if response.HasField("delta"):
                    arrivals.append(time.perf_counter())
                elif response.HasField("completed"):
                    num_tokens = response.completed.info.usage.output_token_count
        except grpc.aio.AioRpcError as failure:
            error = failure.code().name
        finally:
            call.cancel()
        return Sample(started, time.perf_counter(), num_tokens, arrivals, error)


def gaps(arrivals: Sequence[float]) -> Iterator[float]:
    """Seconds between neighbours."""
    return (later - earlier for earlier, later in itertools.pairwise(arrivals))
