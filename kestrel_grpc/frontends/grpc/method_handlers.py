"""Runs every gRPC method through `CallAdmission`: reads its message, writes its responses, aborts with a status.

Every method is registered as one that streams its requests, although most take exactly one message. On the wire
this is the same, but gRPC then reads no message by itself, so that the caller is authenticated from the headers
before its message is received. If a method takes one message, a second one is never read; the end of the call
discards it.

Response headers carry the request id and are sent with the first message: until then a refusal is a bare status,
which clients may retry. Servicers take a `CallContext` in place of gRPC's context, so they can neither abort nor
write.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
)
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from kestrel_grpc.calls.call_admission import CallAdmission
from kestrel_grpc.calls.call_context import REQUEST_ID_KEY, CallContext
from kestrel_grpc.calls.errors import CallFailure, Unsupported
from kestrel_grpc.calls.message_gate import MessageTimeout, MessageTooLarge
from kestrel_grpc.frontends.grpc.connections import Connections
from kestrel_grpc.frontends.grpc.load_reports import LoadReports
from kestrel_grpc.frontends.grpc.message_shape import check_shape, shape_of
from kestrel_grpc.frontends.grpc.status import status_code, trailing_metadata
from kestrel_grpc.images.stored_images import MAX_CHUNK_BYTES
from kestrel_runtime.api.deadlines import deadline_in
from kestrel_runtime.api.errors import InvalidRequest, Violation

Context = grpc.aio.ServicerContext[bytes, bytes]

FailureTranslator = Callable[[CallFailure], CallFailure]

_Receive = Callable[[Context, CallContext], Awaitable[Any]]
_Answer = Callable[[Context, CallContext], Awaitable[Message]]
_Begin = Callable[[Context, CallContext], Awaitable[AsyncGenerator[Message, None]]]

# A chunk of an image, and the tags around it.
_MAX_PART_BYTES = MAX_CHUNK_BYTES + 1024
_CANCELLATION_S = 0.05
# The first bytes of data in gRPC's encodings `gzip` and `deflate`. The latter is the format of zlib, whose second
# byte depends on the level of compression.
_GZIP, _DEFLATE = b"\x1f\x8b", (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
# The value that reading returns if no message is left; the type stubs do not list it.
_END_OF_STREAM: Any = vars(grpc.aio)["EOF"]
# What our own mistakes raise, and the end of a call that has been aborted.
_NOT_GONE = (grpc.aio.AbortError, grpc.aio.UsageError)


class UnparsedMessage:
    """Holds a message that has been received and is parsed when it is needed, since few are."""

    __slots__ = ("_data", "_parse")

    def __init__(self, data: bytes, parse: Callable[[bytes], Message]) -> None:
        self._data = data
        self._parse = parse

    @property
    def num_bytes(self) -> int:
        return len(self._data)

    def parsed(self) -> Any:
        """Returns the message. Raises `InvalidRequest`, `ImageError`, `MessageTooLarge`, and `Unsupported` for a
        compressed message."""
        return self._parse(self._data)


class AdmittedServices:
    """Takes the place of the server in `add_…_to_server(servicer, server)` and adds wrapped methods to it.

    It wraps each method once, at start; an interceptor of gRPC would do so for each call. Methods are added as
    generic handlers only, since each method that is registered by name slows down every call of all the others.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        admission: CallAdmission,
        connections: Connections,
        max_message_bytes: int,
        translate_failure: FailureTranslator | None = None,
        load_reports: LoadReports | None = None,
        takes: Callable[[str], bool] = lambda method: True,
        *,
        parses: bool = True,
    ) -> None:
        """`max_message_bytes` is the largest message that is accepted. `translate_failure` changes a failure to the
        form that the service's clients expect. With `parses` False methods get each message as `UnparsedMessage`.

        With `load_reports`, calls that end well have one in their trailing metadata. `takes` selects the methods of
        a service, by their names; another admission has the others.
        """
        self._server = server
        self._admission = admission
        self._connections = connections
        self._max_message_bytes = max_message_bytes
        self._translate_failure = translate_failure
        self._load_reports = load_reports
        self._takes = takes
        self._parses = parses

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        """Adds the methods of a service. The generated code calls it with each method's handler."""
        wrapped = {
            name: self._wrap(f"{service_name}/{name}", handler)
            for name, handler in method_handlers.items()
            if self._takes(name)
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, wrapped),))

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Does nothing. The generated code calls it with the same methods, unwrapped."""

    def _wrap(self, method: str, handler: Any) -> grpc.RpcMethodHandler:
        # Bytes are parsed and written here: gRPC itself ends a call whose message does not parse with INTERNAL.
        serialize, receive = handler.response_serializer, self._receiver(handler.request_deserializer)
        if not handler.response_streaming:
            answer = (
                self._upload(handler.stream_unary, handler.request_deserializer)
                if handler.request_streaming
                else _one_to_one(handler.unary_unary, receive)
            )
            return grpc.stream_unary_rpc_method_handler(self._unary(method, answer, serialize))
        begin = (
            _many_to_many(handler.stream_stream, receive)
            if handler.request_streaming
            else _one_to_many(handler.unary_stream, receive)
        )
        return grpc.stream_stream_rpc_method_handler(self._streaming(method, begin, serialize))

    def _receiver(self, parse: Any) -> _Receive:
        """Returns a function that receives the next message of a call; it returns None if there is none.

        It raises `InvalidRequest`, `MessageTooLarge`, and `Unsupported` for a compressed message.
        """
        shape = shape_of(parse.__self__.DESCRIPTOR)
        admission, limit_bytes, parses = self._admission, self._max_message_bytes, self._parses

        async def receive(context: Context, call: CallContext) -> Any:
            data = await admission.receive(context.read, call, context.peer)
            if data is _END_OF_STREAM:
                return None
            return parsed(data) if parses else UnparsedMessage(data, parsed)

        def parsed(data: bytes) -> Message:
            if len(data) > limit_bytes:
                raise MessageTooLarge(limit_bytes)
            if data[:2] == _GZIP:  # no message begins with these bytes
                raise _compressed()
            try:
                check_shape(data, shape, admission.max_image_bytes)
                return parse(data)
            except (DecodeError, InvalidRequest) as error:
                if data[:2] in _DEFLATE:  # a message could begin with these bytes
                    raise _compressed() from None
                if isinstance(error, InvalidRequest):
                    raise
                raise _invalid("the message cannot be parsed") from None

        return receive

    def _upload(
        self, serve: Callable[[AsyncIterator[Message], CallContext], Awaitable[Message]], parse: Any
    ) -> _Answer:
        """Answers many small messages by one. Together they count as one message.

        One limit of messages and one timeout hold for all of them, as long as the servicer collects them.
        """
        admission = self._admission

        async def messages(context: Context) -> AsyncGenerator[Message, None]:
            while (data := await context.read()) is not _END_OF_STREAM:
                if data[:2] == _GZIP:
                    raise _compressed()
                if len(data) > _MAX_PART_BYTES:
                    raise _invalid(f"a part of an upload must not exceed {_MAX_PART_BYTES} bytes")
                try:
                    message = parse(data)
                except DecodeError:
                    if data[:2] in _DEFLATE:
                        raise _compressed() from None
                    raise _invalid("a part of the upload cannot be parsed") from None
                del data
                yield message

        async def answer(context: Context, call: CallContext) -> Message:
            async def collect() -> Message:
                # The task that reads the parts must close their generator; with a timeout that is another task.
                async with aclosing(messages(context)) as parts:
                    return await serve(parts, call)

            return await admission.receive(collect, call, context.peer)

        return answer

    def _unary(
        self, method: str, answer: _Answer, serialize: Callable[[Message], bytes]
    ) -> Callable[[object, Context], Awaitable[bytes]]:
        admission = self._admission

        async def handle(_: object, context: Context) -> bytes:
            call = admission.begin(
                context.invocation_metadata() or (), deadline_in(context.time_remaining()), method, context.peer
            )
            try:
                async with admission.admit(call):
                    response = serialize(await answer(context, call))
                context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id), *self._load_report()))
            except BaseException as error:
                await self._abort(call, context, error)
                raise
            admission.succeed(call)
            self._connections.expect_reader(len(response), context.peer)
            return response

        return handle

    def _streaming(
        self, method: str, begin: _Begin, serialize: Callable[[Message], bytes]
    ) -> Callable[[object, Context], Awaitable[None]]:
        admission = self._admission

        # A coroutine that writes, not a generator that yields: a cancelled call then always unwinds from here, and
        # the servicer's `finally` runs at once rather than whenever its generator is collected.
        async def handle(_: object, context: Context) -> None:
            call = admission.begin(
                context.invocation_metadata() or (), deadline_in(context.time_remaining()), method, context.peer
            )
            try:
                async with admission.admit(call):
                    messages = await begin(context, call)
                    try:
                        is_open = False
                        with admission.watch_reader(call) as reader:
                            async for message in messages:
                                if not is_open:
                                    await context.send_initial_metadata(((REQUEST_ID_KEY, call.request_id),))
                                    is_open = True
                                await reader.wait_for(context.write(serialize(message)))
                    finally:
                        await messages.aclose()
                if report := self._load_report():
                    context.set_trailing_metadata(report)
            except BaseException as error:
                await self._abort(call, context, error)
                raise
            admission.succeed(call)

        return handle

    def _load_report(self) -> tuple[tuple[str, bytes], ...]:
        return () if self._load_reports is None else self._load_reports.metadata()

    async def _abort(self, call: CallContext, context: Context, error: BaseException) -> None:
        """Ends the call with the status of `error`. If this returns, the caller must raise the error again."""
        if isinstance(error, grpc.aio.InternalError):
            # A write to a client that has cancelled the call; sometimes it fails before gRPC cancels the task.
            self._admission.abandon(call)
            raise asyncio.CancelledError from error
        if isinstance(error, grpc.aio.BaseError) and not isinstance(error, _NOT_GONE):
            # gRPC's server has stopped. The call arrived before that, and its task runs only now.
            self._admission.drop(call)
            raise asyncio.CancelledError from error
        failure = self._admission.fail(call, error)
        if failure is not None:
            await self._admission.hold(call, error, failure)
            if self._translate_failure is not None:
                failure = self._translate_failure(failure)
            trailers = trailing_metadata(failure, call.request_id)
            try:
                await context.abort(status_code(failure), failure.message, trailers)
            except _NOT_GONE:
                raise
            except grpc.aio.BaseError as gone:
                raise asyncio.CancelledError from gone


async def _required(message: Message | None) -> Message:
    """Returns the one message of a call. Raises `InvalidRequest` if there is none."""
    if message is None:
        # gRPC also reports this where the caller has hung up, or where it refuses a message itself; then the call
        # is cancelled a moment later.
        await asyncio.sleep(_CANCELLATION_S)
        raise _invalid("there is no message")
    return message


def _compressed() -> Unsupported:
    return Unsupported("messages are taken without compression")


def _invalid(description: str) -> InvalidRequest:
    return InvalidRequest((Violation("", description),))


def _one_to_one(serve: Callable[[Message, CallContext], Awaitable[Message]], receive: _Receive) -> _Answer:
    """Answers one message by one."""

    async def answer(context: Context, call: CallContext) -> Message:
        # Only the servicer refers to the message, and drops it when the engine has the request.
        return await serve(await _required(await receive(context, call)), call)

    return answer


def _one_to_many(
    serve: Callable[[Message, CallContext], AsyncGenerator[Message, None]], receive: _Receive
) -> _Begin:
    """Answers one message by many."""

    async def begin(context: Context, call: CallContext) -> AsyncGenerator[Message, None]:
        return serve(await _required(await receive(context, call)), call)

    return begin


def _many_to_many(
    serve: Callable[[AsyncIterator[Message], CallContext], AsyncGenerator[Message, None]], receive: _Receive
) -> _Begin:
    """Answers many messages by many. The requests end if no further message arrives in time."""

    async def requests(context: Context, call: CallContext) -> AsyncIterator[Message]:
        is_first = True
        while True:
            try:
                message = await receive(context, call)
            except MessageTimeout:
                if is_first:
                    raise
                return
            finally:
                call.release()
            if message is None:
                return
            is_first = False
            yield message
            del message  # frees it while waiting for the next one

    async def begin(context: Context, call: CallContext) -> AsyncGenerator[Message, None]:
        return serve(requests(context, call), call)

    return begin
