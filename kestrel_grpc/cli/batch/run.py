"""Runs a batch: keeps a number of requests in flight, writes answers in the order of the input, shows progress.

    records ──▶ worker 1 ──▶ caller ──┐
            ──▶ worker 2 ──▶ caller ──┼──▶ finished lines that wait for earlier ones ──▶ output
            ──▶ …                     ┘

A worker takes the next record once its answer has arrived. No worker is further ahead of the output than the
window, so that the memory of a run does not depend on the number of lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from kestrel_grpc.cli.batch.callers import Caller, Reply, RunEnded, Unreachable
from kestrel_grpc.cli.batch.lines import (
    InputUnusable,
    Line,
    OutputLine,
    Record,
    Source,
    Template,
    answer_line,
    reason_of,
    refusal_line,
)
from kestrel_grpc.cli.batch.output import AnyOutput
from kestrel_grpc.process.terminal import print_error
from kestrel_runtime.api.errors import InvalidRequest

_WINDOW = 16
"""The finished lines that may wait for an earlier one, for each request in flight."""
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
_SHOWN_EVERY_S = {True: 0.5, False: 10.0}
"""The interval of progress in seconds: on a terminal (True), and elsewhere."""
_CALLERS_OWN_LIMIT = "QUEUE_TIMEOUT"
"""The reason of a line that limits its own wait: another attempt would exceed the limit."""


class _Abandoned(Exception):
    """The run ends while the request waits for another attempt."""


class Run:
    """Answers the records that have no line in the output yet."""

    def __init__(
        self,
        records: Iterator[Record],
        output: AnyOutput,
        caller: Caller,
        template: Template,
        *,
        num_in_flight: int,
        max_retry_s: float,
        on_first_failure: Callable[[str], object] = lambda reason: None,
    ) -> None:
        """Creates a run. `max_retry_s` is the longest time in which requests are sent again while none is answered.

        `on_first_failure` is called with the number of the first record that fails and the reason, as one text.
        """
        self.num_written = 0
        self._records = records
        self._output = output
        self._caller = caller
        self._template = template
        self._num_in_flight = num_in_flight
        self._max_retry_s = max_retry_s
        self._on_first_failure = on_first_failure
        self._has_failed = False
        self._stopping = asyncio.Event()
        self._error: Exception | None = None
        self._answered_at = time.monotonic()
        self._num_taken = output.num_lines
        self._waiting: dict[int, tuple[Record, OutputLine]] = {}
        """The finished lines by their positions in the output."""
        self._has_written = asyncio.Event()

    def stop(self) -> None:
        """Takes no further record. `run` returns once the lines of all requests in flight are written."""
        self._stopping.set()
        self._has_written.set()

    async def run(self) -> bool:
        """Answers all records; returns False if `stop` was called first.

        Raises `InputUnusable` if the records cannot be read, and `RunEnded` or OSError if no more can be answered
        or written.
        """
        await asyncio.gather(*(self._work() for _ in range(self._num_in_flight)))
        if self._error is not None:
            raise self._error
        return not self._stopping.is_set()

    async def _work(self) -> None:
        try:
            while True:
                taken = await self._next()
                if taken is None:
                    return
                place, record = taken
                self._finish(place, record, await self._answer(record))
        except _Abandoned:
            return
        except Exception as error:
            self._error = self._error or error
            self.stop()

    async def _next(self) -> tuple[int, Record] | None:
        """Returns the next record and its position in the output, once the window has room for it; None at the
        end."""
        while self._num_taken - self._output.num_lines >= _WINDOW * self._num_in_flight:
            if self._stopping.is_set():
                return None
            self._has_written.clear()
            await self._has_written.wait()
        if self._stopping.is_set():
            return None
        try:
            record = next(self._records, None)
        except OSError as error:
            raise InputUnusable(f"the input cannot be read: {error.strerror or error}") from error
        if record is None:
            return None
        self._num_taken += 1
        return self._num_taken, record

    def _finish(self, place: int, record: Record, line: OutputLine) -> None:
        """Writes the line, and the lines that waited for it."""
        self._waiting[place] = (record, line)
        while (found := self._waiting.pop(self._output.num_lines + 1, None)) is not None:
            written, answer = found
            self._output.append(written.digest, answer)
            self.num_written += 1
            if answer.is_failure and not self._has_failed:
                self._has_failed = True
                self._on_first_failure(f"record {written.number} failed: {reason_of(answer.data)}")
        self._has_written.set()

    async def _answer(self, record: Record) -> OutputLine:
        line = Line.read(record, self._template)
        body = b""
        if not line.violations:
            try:
                body = await asyncio.to_thread(line.body) if line.reads_file else line.body()
            except InvalidRequest as error:
                line.violations += error.violations
        if line.violations:
            return refusal_line(line)
        reply = await self._reply(line, body)
        return answer_line(line, reply.status, reply.document)

    async def _reply(self, line: Line, body: bytes) -> Reply:
        """Returns the response to the request, which is sent again while the server refuses it temporarily."""
        begun = time.monotonic()
        least_wait_s = _FIRST_WAIT_S
        while True:
            try:
                reply = await self._caller.post(line.path, body, line.request_id)
                wait_s, why = _wait_s(reply), f"{reply.status} {_code(reply)}"
            except Unreachable as error:
                wait_s, why, reply = 0.0, str(error), None
            if reply is not None and wait_s is None:
                self._answered_at = time.monotonic()
                return reply
            if time.monotonic() - max(begun, self._answered_at) > self._max_retry_s:
                raise RunEnded(f"no line was answered for {self._max_retry_s:g} s: {why}")
            # Requests that were refused together must not be sent again together.
            await self._pause(max(wait_s or 0.0, least_wait_s) * random.uniform(1.0, 1.5))
            least_wait_s = min(2.0 * least_wait_s, _LONGEST_WAIT_S)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        if self._stopping.is_set():
            raise _Abandoned


def _code(reply: Reply) -> str:
    """Returns the reason of a refusal, in capitals."""
    error = reply.document.get("error")
    return str(error.get("code", "")).upper() if isinstance(error, dict) else ""


def _wait_s(reply: Reply) -> float | None:
    """Returns the delay before another attempt; None for an answer, and for a refusal that stays."""
    return None if _code(reply) == _CALLERS_OWN_LIMIT else reply.retry_after_s


class Progress:
    """Shows how far a run is: one line that is rewritten on a terminal, else a line at a time."""

    def __init__(self, run: Run, source: Source, output: AnyOutput, stream: TextIO = sys.stderr) -> None:
        self._run = run
        self._source = source
        self._output = output
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._began = time.monotonic()
        self._share_at_start = source.share_read() or 0.0

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Shows the progress during the block."""
        showing = asyncio.ensure_future(self._show())
        try:
            yield
        finally:
            showing.cancel()
            if self._is_terminal:
                self._stream.write("\r\x1b[K")
                self._stream.flush()

    def line(self) -> str:
        """Returns a line such as "1,234 lines, 3 failed, 56.7/s, 2 min left"."""
        elapsed_s = max(time.monotonic() - self._began, 1e-9)
        facts = [f"{self._output.num_lines:,} lines"]
        if self._output.num_failures:
            facts.append(f"{self._output.num_failures:,} failed")
        facts.append(f"{self._run.num_written / elapsed_s:.1f}/s")
        share = self._source.share_read()
        read = 0.0 if share is None else share - self._share_at_start
        if share is not None and read > 0.0 and share < 1.0 and self._run.num_written:
            facts.append(f"{_duration(elapsed_s * (1.0 - share) / read)} left")
        return ", ".join(facts)

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        print_error(text)

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(_SHOWN_EVERY_S[self._is_terminal])
            self._stream.write(f"\r\x1b[K{self.line()}" if self._is_terminal else f"{self.line()}\n")
            self._stream.flush()


def _duration(seconds: float) -> str:
    if seconds < 90.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 5400.0 else f"{seconds / 3600.0:.1f} h"
