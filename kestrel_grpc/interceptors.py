"""What every call of our own services goes through: a request id, a deadline, the question who calls, a log line,
and the one place where an exception becomes a status.

Response headers carry the request id and leave with the first message: until then a refusal is a bare status,
which clients may retry. Servicers take a `Call` in place of gRPC's context, so they can neither abort nor write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from kestrel_grpc.access import Access
from kestrel_grpc.call import OK, REQUEST_ID_KEY, Call, Outcome
from kestrel_grpc.errors import to_status
from kestrel_grpc.logs import log_call
from kestrel_grpc.reader_watch import ReaderWatch
from kestrel_grpc.seam import EngineSeam
from kestrel_runtime.errors import EngineUnavailable, InvalidRequest, Violation

Context = grpc.aio.ServicerContext[bytes, bytes]
Unary = Callable[[Message, Call], Awaitable[Message]]
Streaming = Callable[[Message, Call], AsyncGenerator[Message, None]]
Observer = Callable[[Call, Outcome], None]
"""Told of each call when it has ended, on the event loop."""

# What gRPC has told the caller already.
_CANCELLED = Outcome("CANCELLED", "CANCELLED")
_DEADLINE_EXCEEDED = Outcome("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")

_log = logging.getLogger("kestrel_grpc.calls")


class CallScope:
    """Stands in for the server where services are added: `add_…_to_server(servicer, scope)` adds wrapped methods.

    It does the work of an interceptor once, at start. Methods go to the server as generic handlers only, since each
    method that is registered by name slows down every call of all the others.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        engine: EngineSeam,
        access: Access,
        observers: Sequence[Observer] = (),
        *,
        stream_idle_timeout_s: float,
    ) -> None:
        self._server = server
        self._stream_idle_timeout_s = stream_idle_timeout_s
        self._engine = engine
        self._access = access
        self._observers = (*observers, log_call)

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
        parse, serialize = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(method, handler.unary_stream, parse, serialize)
            )
        return grpc.unary_unary_rpc_method_handler(self._unary(method, handler.unary_unary, parse, serialize))

    def _unary(
        self,
        method: str,
        serve: Unary,
        parse: Callable[[bytes], Message],
        serialize: Callable[[Message], bytes],
    ) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def handle(request: bytes, context: Context) -> bytes:
            call = Call(context.invocation_metadata() or (), context.time_remaining(), method)
            try:
                with self._access.admit(method, call.metadata) as call.tenant:
                    response = serialize(await serve(parse(request), call))
                context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
            except BaseException as error:
                await self._fail(call, context, error)
                raise
            self._end(call, OK)
            return response

        return handle

    def _streaming(
        self,
        method: str,
        serve: Streaming,
        parse: Callable[[bytes], Message],
        serialize: Callable[[Message], bytes],
    ) -> Callable[[bytes, Context], Awaitable[None]]:
        # A coroutine that writes, not a generator that yields: a cancelled call then always unwinds from here, and
        # the servicer's `finally` runs at once rather than whenever its generator is collected.
        async def handle(request: bytes, context: Context) -> None:
            call = Call(context.invocation_metadata() or (), context.time_remaining(), method)
            try:
                with self._access.admit(method, call.metadata) as call.tenant:
                    messages = serve(parse(request), call)
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
        elif isinstance(error, DecodeError):
            error = InvalidRequest((Violation("", "the message cannot be parsed"),))
        elif not isinstance(error, Exception):
            return
        status = to_status(error, call.request_id, self._engine.status)
        if status.code is grpc.StatusCode.INTERNAL:
            _log.error("request_id=%(request_id)s failed", {"request_id": call.request_id}, exc_info=error)
        self._end(call, Outcome(status.code.name, status.reason))
        await context.abort(status.code, status.message, status.trailing_metadata)

    def _end(self, call: Call, outcome: Outcome) -> None:
        for observe in self._observers:
            try:
                observe(call, outcome)
            except Exception:  # our own bug, and no reason to fail a call that has gone well
                _log.exception("cannot note the end of a call")
