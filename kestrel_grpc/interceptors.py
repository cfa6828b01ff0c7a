"""What every call of our own services goes through: a request id, a deadline, a log line, and the one place where
an exception becomes a status. Health and reflection pass untouched.

Response headers carry the request id and leave with the first message: until then a refusal is a bare status,
which clients may retry. Servicers take a `Call` in place of gRPC's context, so they can neither abort nor write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from kestrel_grpc.call import REQUEST_ID_KEY, Call
from kestrel_grpc.errors import to_status
from kestrel_grpc.seam import EngineSeam
from kestrel_runtime.engine import EngineStatus
from kestrel_runtime.errors import EngineUnavailable, InvalidRequest, Violation

Context = grpc.aio.ServicerContext[bytes, bytes]
Unary = Callable[[Message, Call], Awaitable[Message]]
Streaming = Callable[[Message, Call], AsyncGenerator[Message, None]]

_PREFIX = "/kestrel."

_log = logging.getLogger("kestrel_grpc.calls")


class CallScope(grpc.aio.ServerInterceptor):
    """Wraps each of our methods once, when it is first called."""

    def __init__(self, engine: EngineSeam) -> None:
        self._engine = engine
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        method = handler_call_details.method
        known = self._handlers.get(method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith(_PREFIX):
            return handler
        self._handlers[method] = self._wrap(method, handler)
        return self._handlers[method]

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
            call = Call(context.invocation_metadata() or (), context.time_remaining())
            try:
                response = serialize(await serve(parse(request), call))
                await context.send_initial_metadata(((REQUEST_ID_KEY, call.request_id),))
            except BaseException as error:
                await self._fail(method, call, context, error)
                raise
            _note(method, call, "OK")
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
            call = Call(context.invocation_metadata() or (), context.time_remaining())
            try:
                messages = serve(parse(request), call)
                try:
                    is_open = False
                    async for message in messages:
                        if not is_open:
                            await context.send_initial_metadata(((REQUEST_ID_KEY, call.request_id),))
                            is_open = True
                        await context.write(serialize(message))
                finally:
                    await messages.aclose()
            except BaseException as error:
                await self._fail(method, call, context, error)
                raise
            _note(method, call, "OK")

        return handle

    async def _fail(self, method: str, call: Call, context: Context, error: BaseException) -> None:
        """End the call with the status of `error`. Returns only where the caller has to raise it on."""
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                _note(method, call, "CANCELLED")
                return
            # Nobody cancelled this call: something it waited for was. gRPC would leave the caller waiting forever.
            error = EngineUnavailable("a part of the engine was cancelled")
        elif isinstance(error, DecodeError):
            error = InvalidRequest((Violation("", "the message cannot be parsed"),))
        elif not isinstance(error, Exception):
            return
        status = to_status(error, call.request_id, is_draining=self._engine.status is EngineStatus.DRAINING)
        if status.code is grpc.StatusCode.INTERNAL:
            _log.error("request_id=%s failed", call.request_id, exc_info=error)
        _note(method, call, status.reason)
        await context.abort(status.code, status.message, status.trailing_metadata)


def _note(method: str, call: Call, outcome: str) -> None:
    """The one line per call."""
    _log.info(
        "request_id=%s method=%s outcome=%s duration_ms=%.1f", call.request_id, method, outcome, call.duration_ms
    )
