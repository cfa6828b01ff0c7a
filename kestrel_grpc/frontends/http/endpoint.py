"""Runs every operation over HTTP through `CallAdmission`: reads its body, writes its response or its failure.

`frontends/grpc/method_handlers.py` does the same over gRPC. The caller is authenticated from the headers before the
body is read. The response begins with the first event of a stream: until then a refusal has its own status.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

from kestrel_grpc.calls.call_admission import CallAdmission
from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.errors import CallFailure, Code
from kestrel_grpc.frontends.http.answers import Answer
from kestrel_grpc.frontends.http.bodies import Body
from kestrel_grpc.frontends.http.exchange import (
    JSON,
    EventStream,
    Exchange,
    Header,
    Receive,
    Scope,
    Send,
    encoded,
)
from kestrel_grpc.frontends.http.fair_threads import FairThreads
from kestrel_runtime.api.deadlines import deadline_in, remaining_s
from kestrel_runtime.api.errors import DeadlineExceeded, InvalidRequest, Violation

TIMEOUT_KEY = "x-request-timeout"
"""The header with the seconds that the caller waits, as gRPC's deadline."""
_INLINE_BYTES, _INLINE_MARKS = 256 * 1024, 1000
"""A larger body, or one with more quotes and commas, is parsed in a thread, so that other calls do not wait for the
parser. A thousand marks take about a millisecond, an image hardly any time."""
_WRITE_BYTES = 256 * 1024
"""The bytes that are written at once. The rest waits until the caller has taken them, so that encryption delays no
other calls."""
# `float` accepts more, such as 1_0.
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+")
MAX_TIMEOUT_S = 86_400.0
"""The largest value of that header, in seconds."""
_NO_TIMEOUT = nullcontext()


class Dialect(Protocol):
    """Describes the differences between frontends: the place of the token, and the form of errors."""

    failure_description: str
    """A sentence about the form of errors, for the OpenAPI document."""

    def authorizations(self, exchange: Exchange) -> Sequence[str]:
        """Returns the `authorization` headers that other headers of the request replace."""
        ...

    def failure(self, failure: CallFailure, request_id: str) -> bytes:
        """Returns the body of the response to a call that has failed."""
        ...


class Group(Enum):
    """Names the group of calls that share limits."""

    INFERENCE = auto()
    OPERATIONS = auto()
    IMAGES = auto()


@dataclass(frozen=True, slots=True)
class Description:
    """Describes an operation in the OpenAPI document."""

    id: str
    summary: str
    answer: str
    body: type[Body] | None = None
    """The model of the JSON body."""
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    """The descriptions of the query's parameters, by name."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Defines the operation at a path. `parse` is pure and may run in a thread; `serve` gets its result.

    `serve` answers with JSON or with a stream of server-sent events.
    """

    verb: str
    path: str
    method: str
    """The name of the call for access rules, metrics and logs, such as `rest/query`."""
    parse: Callable[..., Any] | None
    """Parses the body; None for an operation without one. `serve` then gets the variable parts of the path, by
    name."""
    serve: Callable[[Any, CallContext], Awaitable[Answer]]
    content_type: bytes = JSON
    takes_forms: bool = False
    """True if the body may be a form or an image in place of JSON: `parse` also gets the `Form`, None for JSON."""
    takes_file: bool = False
    """True if the body is a file, not JSON: `parse` also gets the parameters of the query."""
    group: Group = Group.INFERENCE
    description: Description | None = None
    """The text of the OpenAPI document; None if the document omits the operation."""


class Endpoint:
    """Serves one operation, as an ASGI application."""

    def __init__(
        self,
        operation: Operation,
        admission: CallAdmission,
        dialect: Dialect,
        max_message_bytes: int,
        parsing: FairThreads,
    ) -> None:
        self._operation = operation
        self._admission = admission
        self._dialect = dialect
        self._max_message_bytes = max_message_bytes
        self._parsing = parsing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        headers, admission = exchange.headers, self._admission
        if further := self._dialect.authorizations(exchange):
            headers = [*headers, *(("authorization", value) for value in further)]
        timeout_s, problem = _timeout(exchange.header(TIMEOUT_KEY))
        call = admission.begin(headers, deadline_in(timeout_s), self._operation.method, exchange.peer)
        exchange.connection.serve_by(asyncio.current_task())
        events: EventStream | None = None  # a whole answer needs no comments while it is awaited
        try:
            async with admission.admit(call):
                if problem is not None:
                    raise problem
                answer = await self._operation.serve(await self._received(exchange, call), call)
                if not isinstance(answer, bytes):
                    events = EventStream(exchange, call.request_id, answer.failure)
                    await self._stream(answer.pieces, events, call)
        except BaseException as error:
            await self._fail(error, call, exchange, events)
            return
        exchange.connection.serve_by(None)
        admission.succeed(call)
        if events is not None:
            await events.end()
        else:
            assert isinstance(answer, bytes)
            await self._respond(answer, call, exchange)

    async def _respond(self, answer: bytes, call: CallContext, exchange: Exchange) -> None:
        content_type = self._operation.content_type
        if len(answer) <= _WRITE_BYTES:
            await exchange.respond(200, answer, call.request_id, content_type=content_type)
            return
        await exchange.begin(len(answer), call.request_id, content_type)
        with self._admission.watch_connection(exchange.connection.abort) as reader:
            for piece in _pieces(answer):
                await reader.wait_for(exchange.write(piece))
        await exchange.write(b"", is_last=True)

    async def _received(self, exchange: Exchange, call: CallContext) -> Any:
        parse = self._operation.parse
        if parse is None:
            return exchange.path_parameters
        if self._operation.takes_file:
            exchange.require_file(self._max_message_bytes)
            parse = partial(parse, parameters=exchange.parameters())
        elif self._operation.takes_forms:
            parse = partial(parse, form=exchange.form(self._max_message_bytes))
        else:
            exchange.require_json(self._max_message_bytes)

        read = partial(exchange.read_body, self._max_message_bytes)
        try:
            async with _NO_TIMEOUT if call.deadline is None else asyncio.timeout(remaining_s(call.deadline)):
                pieces: list[bytes] = await self._admission.receive(read, call, exchange.peer)
        except TimeoutError:
            raise DeadlineExceeded from None
        if sum(map(len, pieces)) <= _INLINE_BYTES and _is_quick(body := b"".join(pieces)):
            return parse(body)
        return await self._parsing.run(call.principal, lambda: parse(b"".join(pieces)))

    async def _stream(self, pieces: AsyncGenerator[bytes, None], events: EventStream, call: CallContext) -> None:
        try:
            with self._admission.watch_reader(call) as reader:
                async for written in pieces:
                    for piece in _pieces(written):
                        await reader.wait_for(events.write(piece))
        finally:
            events.close()
            await pieces.aclose()

    async def _fail(
        self, error: BaseException, call: CallContext, exchange: Exchange, events: EventStream | None
    ) -> None:
        """Answers with the failure, unless the caller has ended the call."""
        failure = self._admission.fail(call, error)
        begun = events if events is not None and events.has_begun else None
        if failure is not None and begun is None:
            exchange.connection.note_refusal()
            try:
                await self._admission.hold(call, error, failure)
            except asyncio.CancelledError:  # the client has disconnected
                return
        exchange.connection.serve_by(None)
        if failure is None:
            exchange.connection.abort()
            if not isinstance(error, asyncio.CancelledError):
                raise error
        elif failure.code is Code.ABORTED:  # the client does not read
            exchange.connection.abort()
        elif begun is not None:
            await begun.fail(failure)
        else:
            body = self._dialect.failure(failure, call.request_id)
            await exchange.respond(failure.http_status, body, call.request_id, headers=failure_headers(failure))


def _is_quick(body: bytes) -> bool:
    return body.count(b'"') + body.count(b",") <= _INLINE_MARKS


def _pieces(data: bytes) -> Iterable[bytes]:
    if len(data) <= _WRITE_BYTES:
        return (data,)
    return (data[start : start + _WRITE_BYTES] for start in range(0, len(data), _WRITE_BYTES))


def failure_headers(failure: CallFailure) -> list[Header]:
    """Returns the headers of the response to a call that has failed."""
    headers: dict[str, str] = {}
    if failure.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(failure.retry_after_s)))
        headers["retry-after-ms"] = str(round(failure.retry_after_s * 1000.0))
    if failure.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    if "allowed" in failure.facts:
        headers["allow"] = failure.facts["allowed"]
    return encoded(headers)


def _timeout(text: str | None) -> tuple[float | None, InvalidRequest | None]:
    """Returns the seconds in the header, or the error in it."""
    if text is None:
        return None, None
    seconds = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0.0 < seconds <= MAX_TIMEOUT_S:
        description = f"must be a number of seconds above 0 and at most {MAX_TIMEOUT_S:g}"
        return None, InvalidRequest((Violation(TIMEOUT_KEY, description),))
    return seconds, None
