"""What every call goes through: a request id, a deadline, the question who calls, room for its message, and the one
place where an exception becomes a status.

Every method is served as one that streams its requests, although most have exactly one. On the wire that is the
same, but gRPC then reads no message by itself: who calls is known from the headers, before the message is received.
A second message is never read, and the end of the call discards it.

Response headers carry the request id and leave with the first message: until then a refusal is a bare status,
which clients may retry. Servicers take a `Call` in place of gRPC's context, so they can neither abort nor write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from kestrel_grpc.access.access import Access
from kestrel_grpc.frontends.grpc.message_shape import check_shape
from kestrel_grpc.frontends.grpc.reader_watch import ReaderWatch
from kestrel_grpc.frontends.grpc.receiving import END_OF_STREAM, MessageGate, MessageTimeout, TooManyCalls
from kestrel_grpc.wire.call_context import OK, REQUEST_ID_KEY, Call, Outcome
from kestrel_grpc.wire.errors import to_status
from kestrel_grpc.wire.open_calls import OpenCalls
from kestrel_grpc.wire.shares import Shares
from kestrel_runtime.api.engine import Engine
from kestrel_runtime.api.errors import EngineUnavailable, InvalidRequest, Violation

Context = grpc.aio.ServicerContext[bytes, bytes]
Observer = Callable[[Call, Outcome], None]
"""Told of each call when it has ended, on the event loop."""

_Receive = Callable[[Context, Call], Awaitable[Message]]
_Begin = Callable[[Context, Call], Awaitable[AsyncGenerator[Message, None]]]

# What gRPC has told the caller already.
_CANCELLED = Outcome("CANCELLED", "CANCELLED")
_DEADLINE_EXCEEDED = Outcome("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")

_log = logging.getLogger("kestrel_grpc.calls")


class _NoMessage(Exception):
    """The caller has sent all its messages."""


class CallScope:
    """Stands in for the server where services are added: `add_…_to_server(servicer, scope)` adds wrapped methods.

    It does the work of an interceptor once, at start. Methods go to the server as generic handlers only, since each
    method that is registered by name slows down every call of all the others. All methods of a scope share its
    `gate` for messages and its `calls`, the most that may run at a time.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        engine: Engine,
        access: Access,
        gate: MessageGate,
        calls: Shares,
        open_calls: OpenCalls,
        observers: Sequence[Observer] = (),
        *,
        stream_idle_timeout_s: float,
    ) -> None:
        self._server = server
        self._stream_idle_timeout_s = stream_idle_timeout_s
        self._engine = engine
        self._access = access
        self._gate = gate
        self._calls = calls
        self._open_calls = open_calls
        self._observers = observers

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        """Called by the generated code, with each method's handler."""
        wrapped = {name: self._wrap(f"{service_name}/{name}", handler) for name, handler in method_handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, wrapped),))

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Called by the generated code with the same methods unwrapped, which are not wanted."""

    def _wrap(self, method: str, handler: Any) -> grpc.RpcMethodHandler:
        # Bytes are parsed and written here: what gRPC itself says about a message that does not parse is INTERNAL.
        serialize, receive = handler.response_serializer, self._receiver(handler.request_deserializer)
        if not handler.response_streaming:
            unary = self._unary(method, handler.unary_unary, receive, serialize)
            return grpc.stream_unary_rpc_method_handler(unary)
        begin = (
            _conversation(handler.stream_stream, receive)
            if handler.request_streaming
            else _answer(handler.unary_stream, receive)
        )
        return grpc.stream_stream_rpc_method_handler(self._streaming(method, begin, serialize))

    def _receiver(self, parse: Any) -> _Receive:
        """Receives the next message of a call. Raises `_NoMessage` where there is none."""
        image = parse.__self__.DESCRIPTOR.fields_by_name.get("image")
        image_field = None if image is None else image.number

        async def receive(context: Context, call: Call) -> Message:
            data, place = await self._gate.receive(context.read, call.tenant, context.peer)
            call.release = place.release
            if data is END_OF_STREAM:
                raise _NoMessage
            check_shape(data, image_field, self._engine.info.config.max_image_bytes)
            return parse(data)

        return receive

    def _unary(
        self,
        method: str,
        serve: Callable[[Message, Call], Awaitable[Message]],
        receive: _Receive,
        serialize: Callable[[Message], bytes],
    ) -> Callable[[object, Context], Awaitable[bytes]]:
        async def handle(_: object, context: Context) -> bytes:
            call = Call(context.invocation_metadata() or (), context.time_remaining(), method)
            self._open_calls.add(context.peer)
            try:
                with self._access.admit(method, call.metadata) as call.tenant, _Open(call, self._calls):
                    # Held by nobody but the servicer, which lets go of it when the engine has the request.
                    response = serialize(await serve(await receive(context, call), call))
                context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
            except BaseException as error:
                await self._fail(call, context, error)
                raise
            self._end(call, OK)
            return response

        return handle

    def _streaming(
        self, method: str, begin: _Begin, serialize: Callable[[Message], bytes]
    ) -> Callable[[object, Context], Awaitable[None]]:
        # A coroutine that writes, not a generator that yields: a cancelled call then always unwinds from here, and
        # the servicer's `finally` runs at once rather than whenever its generator is collected.
        async def handle(_: object, context: Context) -> None:
            call = Call(context.invocation_metadata() or (), context.time_remaining(), method)
            self._open_calls.add(context.peer)
            try:
                with self._access.admit(method, call.metadata) as call.tenant, _Open(call, self._calls):
                    messages = await begin(context, call)
                    try:
                        is_open = False
                        async with ReaderWatch(self._stream_idle_timeout_s) as reader:
                            async for message in messages:
                                if not is_open:
                                    await context.send_initial_metadata(((REQUEST_ID_KEY, call.request_id),))
                                    is_open = True
                                await reader.wait_for(context.write(serialize(message)))
                    finally:
                        await messages.aclose()
            except BaseException as error:
                await self._fail(call, context, error)
                raise
            self._end(call, OK)

        return handle

    async def _fail(self, call: Call, context: Context, error: BaseException) -> None:
        """End the call with the status of `error`. Returns only where the caller has to raise it on."""
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                self._end(call, _DEADLINE_EXCEEDED if call.is_late else _CANCELLED)
                return
            # Nobody cancelled this call: something it waited for was. gRPC would leave the caller waiting forever.
            error = EngineUnavailable("a part of the engine was cancelled")
        elif isinstance(error, grpc.aio.InternalError):
            # A write to a caller who has hung up; sometimes it fails before gRPC cancels the call.
            self._end(call, _DEADLINE_EXCEEDED if call.is_late else _CANCELLED)
            raise asyncio.CancelledError from error
        elif isinstance(error, _NoMessage):
            error = InvalidRequest((Violation("", "there is no message"),))
        elif isinstance(error, DecodeError):
            error = InvalidRequest((Violation("", "the message cannot be parsed"),))
        elif not isinstance(error, Exception):
            return
        status = to_status(error, call.request_id, self._engine.status)
        if status.code is grpc.StatusCode.INTERNAL:
            _log.error("request_id=%(request_id)s failed", {"request_id": call.request_id}, exc_info=error)
        _forget_frames(error)
        self._end(call, Outcome(status.code.name, status.reason))
        await context.abort(status.code, status.message, status.trailing_metadata)

    def _end(self, call: Call, outcome: Outcome) -> None:
        for observe in self._observers:
            try:
                observe(call, outcome)
            except Exception:  # our own bug, and no reason to fail a call that has gone well
                _log.exception("cannot note the end of a call")


def _forget_frames(error: BaseException) -> None:
    """Let go of the frames in which an error came up, and with them of the message, before its caller is told."""
    known: BaseException | None = error
    while known is not None:
        known.__traceback__ = None
        known = known.__cause__ or known.__context__


class _Open:
    """For the length of a call that is let in. Raises `TooManyCalls` where it cannot be."""

    __slots__ = ("_call", "_calls")

    def __init__(self, call: Call, calls: Shares) -> None:
        self._call = call
        self._calls = calls

    def __enter__(self) -> None:
        if not self._calls.take(self._call.tenant):
            raise TooManyCalls(f"all of the {self._calls.limit} calls that may be open, or this caller's share")

    def __exit__(self, *_: object) -> None:
        self._calls.give_back(self._call.tenant)
        self._call.release()


def _answer(serve: Callable[[Message, Call], AsyncGenerator[Message, None]], receive: _Receive) -> _Begin:
    """One message is answered by many."""

    async def begin(context: Context, call: Call) -> AsyncGenerator[Message, None]:
        return serve(await receive(context, call), call)

    return begin


def _conversation(
    serve: Callable[[AsyncIterator[Message], Call], AsyncGenerator[Message, None]], receive: _Receive
) -> _Begin:
    """Many messages are answered by many. The caller has to go on within the time that a message may take."""

    async def requests(context: Context, call: Call) -> AsyncIterator[Message]:
        is_first = True
        while True:
            try:
                message = await receive(context, call)
            except _NoMessage:
                return
            except MessageTimeout:
                if is_first:
                    raise
                return
            finally:
                call.release()
            is_first = False
            yield message

    async def begin(context: Context, call: Call) -> AsyncGenerator[Message, None]:
        return serve(requests(context, call), call)

    return begin
