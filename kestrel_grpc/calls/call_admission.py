"""The steps of every call of any transport: authentication, limits, message, end.

A frontend calls in this order, with `admission` for the group of methods that the call belongs to:

    call = admission.begin(headers, deadline_s, method, peer)
    try:
        async with admission.admit(call):                    # token, scope, rate; limit of open calls
            data = await admission.receive(read, call, peer) # limit of messages in memory; timeout
            …                                                # serve, and write each message of a stream with
            with admission.watch_reader(call) as reader:     # a timeout for readers that take nothing
                await reader.wait_for(write(…))
    except BaseException as error:
        failure = admission.fail(call, error)                # error table, log, metrics; None: tell nothing
        …
        raise
    admission.succeed(call)                                  # log, metrics

Belongs to one event loop; each call runs in a task of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self

from kestrel_grpc.access.access import Access, AdmittedCall, TokenInvalid
from kestrel_grpc.access.limits import AccessRefused
from kestrel_grpc.access.sources import SourceNotAllowed
from kestrel_grpc.calls.call_context import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    OK,
    CallContext,
    Headers,
    Outcome,
    RequestCancelled,
    StreamIdle,
)
from kestrel_grpc.calls.errors import CallFailure, Code, MethodUnknown, describe
from kestrel_grpc.calls.message_gate import Gate, TooManyCalls
from kestrel_grpc.calls.refusals import Refusals
from kestrel_runtime.api.engine import Engine, EngineStatus
from kestrel_runtime.api.errors import EngineUnavailable
from kestrel_runtime.fairness.fair_limit import FairLimit

Observer = Callable[[CallContext, Outcome], None]
"""Called with each call when it has ended, on the event loop."""

_log = logging.getLogger("kestrel_grpc.calls")


class CallFailed(Exception):
    """A call ends because one of the requests that it brought has failed, with `failure`, which is recorded."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class CallAdmission:
    """Admits the calls of one group of methods, which share `gate` for messages and `max_calls` open calls."""

    def __init__(
        self,
        engine: Engine,
        access: Access,
        gate: Gate,
        max_calls: int,
        refusals: Refusals,
        observers: Sequence[Observer] = (),
        *,
        stream_idle_timeout_s: float,
        counts_calls: bool = True,
        keeps_connections: bool = True,
    ) -> None:
        """Without `counts_calls` a call counts neither towards the rate nor the concurrency of its token; without
        `keeps_connections` the connections of open calls count as idle."""
        self.max_image_bytes = engine.info.config.max_image_bytes
        """The largest encoded image that a message may hold."""
        self.open_calls: dict[asyncio.Task[object], CallContext] = {}
        """By the tasks that serve them, until these are done: the caller has been told then how the call ended."""
        self.keeps_connections = keeps_connections
        self._engine = engine
        self._access = access
        self._gate = gate
        self._limit = FairLimit(max_calls)
        self._refusals = refusals
        self._observers = observers
        self._stream_idle_timeout_s = stream_idle_timeout_s
        self._counts_calls = counts_calls

    def begin(
        self, headers: Headers, deadline_s: float | None, method: str, peer: Callable[[], str]
    ) -> CallContext:
        """A call has arrived. `peer` gives the address of its connection, as `host:port`."""
        call = CallContext(headers, deadline_s, method)
        call.peer = peer
        task = asyncio.current_task()
        assert task is not None
        self.open_calls[task] = call
        task.add_done_callback(self._forget)
        return call

    def admit(self, call: CallContext) -> AbstractAsyncContextManager[None]:
        """Entering sets the principal of the call, or raises an `AccessRefused` or `TooManyCalls`.

        Leaving gives back what the call takes up. A call that is interrupted meanwhile leaves with the reason: the
        refusal of a token that was revoked, `RequestCancelled`, or `StreamIdle`.
        """
        return _Admitted(call, self._access, self._limit, counts=self._counts_calls)

    def cancel(self, selects: Callable[[CallContext], bool]) -> int:
        """End the admitted calls that are selected with `RequestCancelled`; returns how many."""
        return sum(
            call.interruptible.interrupt(RequestCancelled()) for call in self.open_calls.values() if selects(call)
        )

    async def receive(self, read: Callable[[], Awaitable[Any]], call: CallContext, peer: Callable[[], str]) -> Any:
        """What `read` returns, once there is memory for a message. Raises as `MessageGate.receive` does."""
        data, place = await self._gate.receive(read, call.principal, peer)
        call.release = place.release
        return data

    def watch_connection(self, abort: Callable[[], object]) -> ReaderWatch:
        """For the length of a large answer: calls `abort` where the caller takes none of its pieces."""
        return ReaderWatch(self._stream_idle_timeout_s, lambda _: abort())

    def watch_reader(self, call: CallContext) -> ReaderWatch:
        """For the length of a stream: ends a call with `StreamIdle` whose caller takes none of its messages."""
        return ReaderWatch(self._stream_idle_timeout_s, call.interruptible.interrupt)

    def succeed(self, call: CallContext) -> None:
        """The call has ended well."""
        self._observe(call, OK)
        if self._refusals.connections and (call.principal or call.request is not None):
            self._refusals.forgive(call.peer())

    def abandon(self, call: CallContext) -> None:
        """The caller has cancelled the call, or its deadline has passed. The transport has ended it already."""
        self._observe(call, DEADLINE_EXCEEDED if call.is_late else CANCELLED)

    def drop(self, call: CallContext) -> None:
        """The server has stopped before it served the call, and has hung up on its caller."""
        failure = describe(EngineUnavailable("the server has stopped"), EngineStatus.DRAINING)
        self._observe(call, Outcome(failure.code.name, failure.reason))

    def fail(self, call: CallContext, error: BaseException) -> CallFailure | None:
        """The call ends with an error. Returns the failure to tell the caller; None if the caller needs no answer.

        A `CallFailed` was recorded before, and is not recorded again.
        """
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                self.abandon(call)
                return None
            # Not the call was cancelled, but a future that it awaited. Without an answer the caller would wait
            # forever.
            error = EngineUnavailable("a part of the engine was cancelled")
        elif not isinstance(error, Exception):
            return None
        if isinstance(error, CallFailed):
            return error.failure
        failure = describe(error, self._engine.status)
        if failure.code is Code.INTERNAL:
            _log.error("request_id=%(request_id)s failed", {"request_id": call.request_id}, exc_info=error)
        _drop_frames(error)
        self._observe(call, Outcome(failure.code.name, failure.reason))
        return failure

    async def hold(self, call: CallContext, error: BaseException) -> None:
        """Wait until the caller may be told of this error.

        Only calls without a principal wait, and only while their connection, or all connections together, are
        refused often. Raises `CancelledError` if the caller hangs up meanwhile.
        """
        if isinstance(error, TokenInvalid | MethodUnknown | SourceNotAllowed):
            task = asyncio.current_task()
            assert task is not None
            self._forget(task)  # nothing has to wait for it
            await self._refusals.hold(call.peer())

    def _forget(self, task: asyncio.Task[object]) -> None:
        self.open_calls.pop(task, None)

    def _observe(self, call: CallContext, outcome: Outcome) -> None:
        for observe in self._observers:
            try:
                observe(call, outcome)
            except Exception:  # a bug in an observer must not fail a successful call
                _log.exception("cannot note the end of a call")


class _Admitted(AbstractAsyncContextManager[None]):
    """A call from its admission to its end. A class and no generator, which would take longer for each call."""

    __slots__ = ("_access", "_admitted", "_call", "_counts", "_has_place", "_limit")

    def __init__(self, call: CallContext, access: Access, limit: FairLimit, *, counts: bool) -> None:
        self._call = call
        self._access = access
        self._limit = limit
        self._counts = counts
        self._admitted: AdmittedCall | None = None
        self._has_place = False

    async def __aenter__(self) -> None:
        call, limit = self._call, self._limit
        interruptible = call.interruptible
        interruptible.__enter__()
        try:
            self._admitted = admitted = await self._access.admit(
                call.method, call.headers, interruptible.interrupt, counts=self._counts
            )
            principal = call.principal = admitted.name
            call.namespace = admitted.namespace
            call.max_priority = admitted.max_priority
            self._has_place = limit.take(principal)
            if not self._has_place:
                raise TooManyCalls(f"all of the {limit.limit} calls that may be open, or this caller's share")
        except BaseException as error:
            if isinstance(error, AccessRefused):
                call.principal = error.name  # for the log
            await self.__aexit__(type(error), error, error.__traceback__)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        call = self._call
        if self._has_place:
            self._limit.give_back(call.principal)
            call.release()
        if self._admitted is not None:
            self._admitted.leave()
        call.interruptible.__exit__(kind, error, traceback)


class ReaderWatch:
    """Calls `interrupt` with `StreamIdle` where the reader of a stream takes no message for `limit_s` seconds.

    A write takes long only where the buffers between server and reader are full. A timer for each write would cost
    as much as the write, so one timer for the stream checks how long the current write has taken.
    """

    def __init__(self, limit_s: float, interrupt: Callable[[StreamIdle], object]) -> None:
        self._limit_s = limit_s
        self._interrupt = interrupt
        self._loop = asyncio.get_running_loop()
        self._writing_since: float | None = None

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    async def wait_for(self, write: Awaitable[object]) -> None:
        """Await a write."""
        self._writing_since = self._loop.time()
        await write
        self._writing_since = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._writing_since is None else self._writing_since
        if now >= since + self._limit_s:
            self._interrupt(StreamIdle(self._limit_s))
        else:
            self._timer = self._loop.call_at(since + self._limit_s, self._look)


def _drop_frames(error: BaseException) -> None:
    """Release the frames that an error refers to, and with them the call's message, before the caller is told."""
    known: BaseException | None = error
    while known is not None:
        known.__traceback__ = None
        known = known.__cause__ or known.__context__
