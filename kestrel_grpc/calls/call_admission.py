"""Takes every call of any transport through its steps: authentication, limits, message, end.

A frontend calls in this order, with `admission` for the group of methods of the call:

    call = admission.begin(headers, deadline, method, peer)
    try:
        async with admission.admit(call):                    # token, scope, rate; limit of open calls
            data = await admission.receive(read, call, peer) # limit of messages in memory; timeout
            …                                                # serve, and write each message of a stream with
            with admission.watch_reader(call) as reader:     # a timeout for readers that take nothing
                await reader.wait_for(write(…))
    except BaseException as error:
        failure = admission.fail(call, error)                # error table, log, metrics; None: send nothing
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

# What a caller can do without end: ask for what cannot be, or for more than there is room for.
_REFUSALS = frozenset((Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED))
_log = logging.getLogger("kestrel_grpc.calls")


class CallFailed(Exception):
    """A request of the call has failed with `failure`, which is recorded already."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class CallAdmission:
    """Bounds the open calls: those of one group of methods, which share `gate` for messages and `max_calls`.

    Authenticates each call first, and records each end.
    """

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
        """Creates the admission of a group.

        Without `counts_calls` a call counts neither towards the rate nor the concurrency of its token; without
        `keeps_connections` the connections of open calls count as idle.
        """
        self.max_image_bytes = engine.info.config.max_image_bytes
        """The largest encoded image that a message may hold."""
        self.open_calls: dict[asyncio.Task[object], CallContext] = {}
        """The open calls by the task that serves each, until the task is done: by then the caller has received the
        outcome."""
        self.keeps_connections = keeps_connections
        self._engine = engine
        self._access = access
        self._gate = gate
        self._limit = FairLimit(max_calls)
        self._refusals = refusals
        self._observers = observers
        self._stream_idle_timeout_s = stream_idle_timeout_s
        self._counts_calls = counts_calls

    def begin(self, headers: Headers, deadline: float | None, method: str, peer: Callable[[], str]) -> CallContext:
        """Records the arrival of a call. `peer` returns the address of its connection, as `host:port`."""
        call = CallContext(headers, deadline, method)
        call.peer = peer
        task = asyncio.current_task()
        assert task is not None
        self.open_calls[task] = call
        task.add_done_callback(self._forget)
        return call

    def admit(self, call: CallContext, *, takes_place: bool = True) -> AbstractAsyncContextManager[None]:
        """Returns a context that sets the principal of the call on entry, or raises an `AccessRefused` or
        `TooManyCalls`.

        With `takes_place` False another call of the token holds the place of this one among the concurrent ones.

        On exit it frees all that the call holds. A call that is interrupted meanwhile exits with the cause: the
        refusal of a token that was revoked, `RequestCancelled`, or `StreamIdle`.
        """
        return _Admitted(call, self._access, self._limit, counts=self._counts_calls, takes_place=takes_place)

    def cancel(self, selects: Callable[[CallContext], bool]) -> int:
        """Ends the selected calls among those that are admitted with `RequestCancelled`; returns their number."""
        return sum(
            call.interruptible.interrupt(RequestCancelled()) for call in self.open_calls.values() if selects(call)
        )

    async def receive(self, read: Callable[[], Awaitable[Any]], call: CallContext, peer: Callable[[], str]) -> Any:
        """Returns the result of `read`, which starts once there is memory for a message.

        Raises the errors of `MessageGate.receive`.
        """
        data, permit = await self._gate.receive(read, call.principal, peer)
        call.release = permit.release
        return data

    def watch_connection(self, abort: Callable[[], object]) -> ReaderWatch:
        """Returns a watch for a large answer, which calls `abort` if the caller reads none of its pieces for too
        long."""
        return ReaderWatch(self._stream_idle_timeout_s, lambda _: abort())

    def watch_reader(self, call: CallContext) -> ReaderWatch:
        """Returns a watch for a stream, which ends the call with `StreamIdle` if the caller reads no message for
        too long."""
        return ReaderWatch(self._stream_idle_timeout_s, call.interruptible.interrupt)

    def succeed(self, call: CallContext) -> None:
        """Records that the call has succeeded."""
        self._observe(call, OK)
        if self._refusals.connections and (call.principal or call.request is not None):
            self._refusals.reset(call.peer())

    def abandon(self, call: CallContext) -> None:
        """Records that the caller has cancelled the call or that its deadline has passed: the transport has ended
        it already."""
        self._observe(call, DEADLINE_EXCEEDED if call.is_late else CANCELLED)

    def drop(self, call: CallContext) -> None:
        """Records that the server has stopped before it served the call, and has closed the connection."""
        failure = describe(EngineUnavailable("the server has stopped"), EngineStatus.DRAINING)
        self._observe(call, Outcome(failure.code.name, failure.reason))

    def fail(self, call: CallContext, error: BaseException) -> CallFailure | None:
        """Records the error that ends the call; returns the failure to send to the caller, None if no answer is
        needed.

        Does not record a `CallFailed`, which was recorded before.
        """
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                self.abandon(call)
                return None
            # A future that the call awaited was cancelled, not the call: without an answer its caller would wait
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

    async def hold(self, call: CallContext, error: BaseException, failure: CallFailure) -> None:
        """Waits until the failure that `error` is may be sent to the caller.

        Calls wait only while their connection or their token is refused often, or all connections together. Raises
        `CancelledError` if the caller hangs up meanwhile.
        """
        is_of_connection = isinstance(error, TokenInvalid | MethodUnknown | SourceNotAllowed)
        if not is_of_connection and not (call.principal and failure.code in _REFUSALS):
            return
        task = asyncio.current_task()
        assert task is not None
        self._forget(task)  # `ended` need not wait for it
        if is_of_connection:
            await self._refusals.hold(call.peer())
        else:
            await self._refusals.hold_token(call.principal)

    def _forget(self, task: asyncio.Task[object]) -> None:
        self.open_calls.pop(task, None)

    def _observe(self, call: CallContext, outcome: Outcome) -> None:
        for observe in self._observers:
            try:
                observe(call, outcome)
            except Exception:  # a bug in an observer must not fail a successful call
                _log.exception("cannot record the end of a call")


class _Admitted(AbstractAsyncContextManager[None]):
    """Holds the token's and the group's units of a call from admission to end. A generator would cost more per
    call."""

    __slots__ = ("_access", "_admitted", "_call", "_counts", "_is_open", "_limit", "_takes_place")

    def __init__(
        self, call: CallContext, access: Access, limit: FairLimit, *, counts: bool, takes_place: bool
    ) -> None:
        self._call = call
        self._access = access
        self._limit = limit
        self._counts = counts
        self._takes_place = takes_place
        self._admitted: AdmittedCall | None = None
        self._is_open = False

    async def __aenter__(self) -> None:
        call, limit = self._call, self._limit
        interruptible = call.interruptible
        interruptible.__enter__()
        try:
            self._admitted = admitted = await self._access.admit(
                call.method,
                call.headers,
                interruptible.interrupt,
                counts=self._counts,
                takes_place=self._takes_place,
            )
            principal = call.principal = admitted.name
            call.namespace = admitted.namespace
            call.max_priority = admitted.max_priority
            call.count_further = admitted.count_further
            self._is_open = limit.take(principal)
            if not self._is_open:
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
        if self._is_open:
            self._limit.give_back(call.principal)
            call.release()
        if self._admitted is not None:
            self._admitted.leave()
        call.interruptible.__exit__(kind, error, traceback)


class ReaderWatch:
    """Calls `interrupt` with `StreamIdle` if the reader of a stream takes no message for `limit_s` seconds.

    A write takes long only if the buffers between server and reader are full. A timer for each write would cost as
    much as the write, so one timer for the stream checks how long the current write has taken.
    """

    def __init__(self, limit_s: float, interrupt: Callable[[StreamIdle], object]) -> None:
        self._limit_s = limit_s
        self._interrupt = interrupt
        self._loop = asyncio.get_running_loop()
        self._writing_since: float | None = None

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._limit_s, self._check)
        return self

    async def wait_for(self, write: Awaitable[object]) -> None:
        """Awaits a write, whose duration the watch measures."""
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

    def _check(self) -> None:
        now = self._loop.time()
        since = now if self._writing_since is None else self._writing_since
        if now >= since + self._limit_s:
            self._interrupt(StreamIdle(self._limit_s))
        else:
            self._timer = self._loop.call_at(since + self._limit_s, self._check)


def _drop_frames(error: BaseException) -> None:
    """Releases the frames that an error refers to, and with them the call's message, before the error is
    reported."""
    known: BaseException | None = error
    while known is not None:
        known.__traceback__ = None
        known = known.__cause__ or known.__context__
