"""Loads a server from processes of its own, and records when each answer, and each piece of it, arrives.

Pictures are read or drawn before the clock runs, so that such a process only sends and receives. Each process
reports the processor time that it used: near 1 core a process measures itself. All processes of a machine share one
monotonic clock. `numbers.py` computes rates and percentiles from the recordings.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from kestrel_grpc.cli.bench.calls import TIMED_OUT, Caller, Question, Target
from kestrel_grpc.cli.bench.loops import ClosedLoop, OpenLoop, Sample, Window, arrivals
from kestrel_grpc.process.resources import loop_factory

CALL_TIMEOUT_S = 120.0
LAST_ANSWERS_S = 10.0
"""The wait for answers that are running when a measurement is ended early, in seconds."""
# An event loop that is later than this is busy with more than waiting.
_TICK_S = 0.01
_WATCHED_EVERY_S = 0.25
_UNTIL_FIRST_DUE_S = 0.2
_SEEDS_APART = 1_000_003
_ENDED = "a process of load has ended"

Work = TypeVar("Work")
Source = Callable[[], Callable[[Work, int], Question]]
"""Prepares, in a process of load, the function that makes the request with a number from the work of a command."""


class LoadFailed(Exception):
    """A process of load cannot start or continue; the text says why."""


class EndedEarly(Exception):
    """The measurement was ended before a window began, so there is nothing to record."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Holds the requests of a window, as all processes measured them."""

    window: Window
    samples: tuple[Sample, ...]
    """The requests that overlap the window."""
    busiest_client: float
    """The processor time of the busiest process, as a share of the window."""
    client_lag_ms: float
    """The 99th percentile of the delays of due work in the slowest process."""
    is_partial: bool = False
    """True if the window was planned to be longer, or to have more requests."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts the progress of a measurement, from its first request on, or during the warm-up."""

    num_answered: int
    num_failed: int
    num_tokens: int
    is_warm_up: bool = False


class LoadProcesses(Generic[Work]):
    """Loads one server from several processes. Each command is sent to all, which share the work evenly.

    The numbers of requests, which begin with `first_number`, choose the pictures: two users who load one server use
    different ranges. While a command runs, `watch` and `is_ended` are called a few times per second.

    Once `is_ended` returns True, the command ends early: its window ends at that moment, and the command waits for
    answers for `LAST_ANSWERS_S`. Requests without an answer then count as failed. SIGINT and SIGTERM, which a
    terminal sends to all processes of a group, are left to the caller: the processes end when it does.
    """

    def __init__(
        self,
        target: Target,
        source: Source[Work],
        num_processes: int,
        *,
        first_number: int = 0,
        timeout_s: float = CALL_TIMEOUT_S,
        watch: Callable[[Tally], None] | None = None,
        is_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """Starts the processes. Raises `LoadFailed`, and like all commands `EndedEarly`."""
        context = multiprocessing.get_context("spawn")
        self._watch = watch
        self._is_ended = is_ended
        self._ended_at: float | None = None
        self._is_recording = False
        self._counts = [context.RawArray("q", 3) for _ in range(num_processes)]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for index, counts in enumerate(self._counts):
            ours, theirs = context.Pipe()
            part = _Part(index, num_processes, first_number, timeout_s)
            process = context.Process(target=_run, args=(theirs, target, source, part, counts), daemon=True)
            with _blocked_signals():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._gather()
        except BaseException:
            self._kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._kill()
        else:
            self.close()

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def _kill(self) -> None:
        """Ends the processes at once."""
        for process in self._processes:
            process.kill()
        self.close()

    def closed(self, work: Work, concurrency: int, duration_s: float, warm_up_s: float) -> Recording:
        """Keeps `concurrency` requests running; records a window once each has been answered once, or after
        `warm_up_s`."""
        self._send("closed", work, concurrency, warm_up_s)
        self._gather()
        window = self._begin(duration_s)
        self._gather()
        self._send("stop")
        return self._recording(window)

    def counted(self, work: Work, concurrency: int, num_requests: int, warm_up_s: float) -> Recording:
        """Keeps `concurrency` requests running until a number has been sent: the window ends with the last
        answer."""
        self._send("counted", work, concurrency, num_requests, warm_up_s)
        self._gather()
        window = self._begin(0.0)
        return self._recording(window)

    def open(
        self,
        work: Work,
        rate_per_s: float,
        duration_s: float,
        wait_limit_s: float,
        *,
        num_requests: int | None = None,
        seed: int = 0,
        warm_up_s: float = 0.0,
    ) -> Recording:
        """Sends requests at random moments, on average `rate_per_s`, regardless of the time that answers take.

        An answer that has not arrived `wait_limit_s` after the last request was sent counts as an error. With
        `num_requests` this many are sent, and the window ends with the last answer. Before the window each process
        waits for the answer to a request, at most `warm_up_s`.
        """
        self._send("open", work, rate_per_s, wait_limit_s, num_requests, seed, warm_up_s)
        self._gather()
        window = self._begin(0.0 if num_requests is not None else duration_s, _UNTIL_FIRST_DUE_S)
        return self._recording(window)

    def _begin(self, duration_s: float, after_s: float = 0.0) -> Window:
        self._is_recording = True
        for counts in self._counts:
            counts[:] = [0, 0, 0]
        start = time.perf_counter() + after_s
        window = Window(start, start + duration_s)
        self._send("window", window)
        return window

    def _recording(self, window: Window) -> Recording:
        parts = self._gather()
        self._is_recording = False
        samples = tuple(itertools.chain.from_iterable(samples for samples, _, _ in parts))
        if window.duration_s == 0.0:
            window = Window(window.start, max((sample.ended for sample in samples), default=window.start))
        else:
            window = window.until(self._ended_at)
        if self._ended_at is not None and not samples:
            raise EndedEarly
        return Recording(
            window,
            samples,
            max(cpu_s for _, cpu_s, _ in parts) / max(window.duration_s, 1e-9),
            1e3 * max(lag_s for _, _, lag_s in parts),
            is_partial=self._ended_at is not None,
        )

    def _send(self, *command: Any) -> None:
        """Sends a command to all processes. Raises `LoadFailed`."""
        try:
            for pipe in self._pipes:
                pipe.send(command)
        except OSError:
            raise LoadFailed(_ENDED) from None

    def _gather(self) -> list[Any]:
        """Returns the next report of each process. Raises `LoadFailed` or `EndedEarly`."""
        said: dict[int, Any] = {}
        while len(said) < len(self._pipes):
            if self._ended_at is None and self._is_ended():
                self._ended_at = time.perf_counter()
                self._send("end", self._ended_at)
            if self._ended_at is not None and not self._is_recording:
                raise EndedEarly
            waiting = {pipe: index for index, pipe in enumerate(self._pipes) if index not in said}
            for pipe in wait(list(waiting), _WATCHED_EVERY_S):
                assert isinstance(pipe, Connection)
                try:
                    said[waiting[pipe]] = pipe.recv()
                except EOFError:
                    raise LoadFailed(_ENDED) from None
            if self._watch is not None:
                counts = (sum(counts[index] for counts in self._counts) for index in range(3))
                self._watch(Tally(*counts, is_warm_up=not self._is_recording))
        for answer in said.values():
            if isinstance(answer, LoadFailed):
                raise answer
        return [said[index] for index in range(len(self._pipes))]


@dataclass(frozen=True, slots=True)
class _Part:
    """Identifies a process among all, and holds its longest wait for an answer."""

    index: int
    num_processes: int
    first_number: int
    timeout_s: float

    def callers(self, concurrency: int) -> range:
        """Returns the number of this process's callers, of all."""
        return range(self.index, concurrency, self.num_processes)

    def share(self, concurrency: int, num_requests: int) -> int:
        """Returns the number of requests that this process's callers send, of all."""
        return sum(len(range(caller, num_requests, concurrency)) for caller in self.callers(concurrency))


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Starts processes in the block that never receive SIGINT and SIGTERM, also while they import."""
    resource_tracker.ensure_running()  # otherwise the first start of a process unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(pipe: Connection, target: Target, source: Source[Any], part: _Part, counts: Any) -> None:
    """Runs a process of load: answers commands until its pipe closes."""
    with contextlib.suppress(EOFError, BrokenPipeError, asyncio.CancelledError):
        try:
            question = source()
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(_serve(pipe, target, question, part, counts))
        except (OSError, ValueError) as error:
            pipe.send(LoadFailed(str(error)))


async def _serve(
    pipe: Connection, target: Target, question: Callable[[Any, int], Question], part: _Part, counts: Any
) -> None:
    async with target.connected() as caller:
        load = _Load(pipe, caller, question, part, counts)
        pipe.send("ready")
        await load.run()


class _Load:
    """Runs one process's part of every command."""

    def __init__(
        self,
        pipe: Connection,
        caller: Caller,
        question: Callable[[Any, int], Question],
        part: _Part,
        counts: Any,
    ) -> None:
        self._pipe = pipe
        self._caller = caller
        self._question = question
        self._part = part
        self._counts = counts
        # Different in every process, and never repeated within one.
        self._numbers = itertools.count(part.first_number + part.index, part.num_processes)
        self._commands: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self._ended_at: float | None = None
        self._last_answers_at: float | None = None
        """The moment, on the clock of the event loop, when unfinished requests fail after the measurement was ended
        early."""
        self._limits: set[asyncio.Timeout] = set()

    async def run(self) -> None:
        """Runs commands until the pipe closes, which cancels the task."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), self._receive, task)
        try:
            while True:
                name, *arguments = await self._commands.get()
                await getattr(self, f"_{name}")(*arguments)
        finally:
            loop.remove_reader(self._pipe.fileno())

    def _receive(self, task: asyncio.Task[Any]) -> None:
        try:
            name, *arguments = self._pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            task.cancel()
            return
        if name == "end":
            self._end(*arguments)
        else:
            self._commands.put_nowait((name, *arguments))

    def _end(self, moment: float) -> None:
        """Ends the measurement at this moment, which has just passed."""
        self._ended_at = moment
        self._last_answers_at = asyncio.get_running_loop().time() + LAST_ANSWERS_S
        for limit in self._limits:
            limit.reschedule(self._last_answers_at)

    async def _closed(self, work: Any, concurrency: int, warm_up_s: float) -> None:
        loop = ClosedLoop(self._asking(work), len(self._part.callers(concurrency)))
        await loop.warm_up(warm_up_s)
        self._pipe.send("warm")
        _, window = await self._commands.get()
        cost = await self._watch(window.start, lambda: time.perf_counter() >= window.end)
        window = window.until(self._ended_at)
        await loop.outlast(window)
        self._pipe.send("outlasted")
        await self._commands.get()
        await loop.cancel()
        self._pipe.send((loop.overlapping(window), *cost))

    async def _counted(self, work: Any, concurrency: int, num_requests: int, warm_up_s: float) -> None:
        num_callers = len(self._part.callers(concurrency))
        window = await self._warm_up(work, num_callers, warm_up_s)
        loop = ClosedLoop(self._asking(work), num_callers, self._part.share(concurrency, num_requests))
        ending = asyncio.ensure_future(loop.end())
        cost = await self._watch(window.start, ending.done)
        loop.stop()
        await ending
        self._pipe.send((loop.samples, *cost))

    async def _open(
        self,
        work: Any,
        rate_per_s: float,
        wait_limit_s: float,
        num_requests: int | None,
        seed: int,
        warm_up_s: float,
    ) -> None:
        part = self._part
        window = await self._warm_up(work, 1, warm_up_s)
        moments = arrivals(window.start, rate_per_s / part.num_processes, _SEEDS_APART * seed + part.index)
        if num_requests is None:
            due = itertools.takewhile(lambda moment: moment < window.end, moments)
        else:
            due = itertools.islice(moments, part.share(num_requests, num_requests))

        async def ask(started: float) -> Sample:
            left_s = part.timeout_s
            if num_requests is None:
                left_s = window.end + wait_limit_s - time.perf_counter()
            return await self._ask(work, started, left_s)

        loop = OpenLoop(ask, due)
        ending = asyncio.ensure_future(loop.end())
        if num_requests is None:
            cost = await self._watch(window.start, lambda: time.perf_counter() >= window.end)
        else:
            cost = await self._watch(window.start, ending.done)
        if self._ended_at is not None:
            loop.stop()
        self._pipe.send((await ending, *cost))

    async def _warm_up(self, work: Any, num_callers: int, longest_s: float) -> Window:
        """Sends a request of each caller if there is time for it; returns the window that begins then."""
        if longest_s > 0.0:
            loop = ClosedLoop(self._asking(work), num_callers, num_callers)
            await loop.warm_up(longest_s)
            await loop.end()
        self._pipe.send("warm")
        _, window = await self._commands.get()
        return window

    async def _watch(self, start: float, is_over: Callable[[], bool]) -> tuple[float, float]:
        """Waits for the end of a window, or until the measurement is ended early.

        Returns the processor time spent in it and the delay of this process, in seconds.
        """
        await asyncio.sleep(max(start - time.perf_counter(), 0.0))
        cpu_s, lags = time.process_time(), [0.0]
        while self._ended_at is None and not is_over():
            now = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            lags.append(time.perf_counter() - now - _TICK_S)
        return time.process_time() - cpu_s, sorted(lags)[int(0.99 * (len(lags) - 1))]

    def _asking(self, work: Any) -> Callable[[float], Any]:
        return lambda started: self._ask(work, started, self._part.timeout_s)

    async def _ask(self, work: Any, started: float, timeout_s: float) -> Sample:
        limit = asyncio.timeout_at(self._last_answers_at)
        try:
            async with limit:
                self._limits.add(limit)
                sample = await self._caller.call(self._question(work, next(self._numbers)), started, timeout_s)
        except TimeoutError:
            text = f"no answer within {LAST_ANSWERS_S:g} s of the end of the measurement"
            sample = Sample(started, time.perf_counter(), error=TIMED_OUT, message=text)
        finally:
            self._limits.discard(limit)
        counts = self._counts
        counts[0] += 1
        counts[1] += bool(sample.error)
        counts[2] += sample.num_tokens
        return sample
