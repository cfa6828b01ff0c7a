"""Handles one request over HTTP and its response: reads the body within limits, writes answers and events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from kestrel_grpc.access.sources import SITE_KEY, require_own_site
from kestrel_grpc.calls.call_context import REQUEST_ID_KEY
from kestrel_grpc.calls.errors import CallFailure, MediaTypeUnsupported
from kestrel_grpc.calls.message_gate import MessageTooLarge
from kestrel_grpc.frontends.http.connection import CONNECTION_KEY, Connection
from kestrel_runtime.api.errors import EngineUnavailable, InvalidRequest, Violation

if TYPE_CHECKING:
    from kestrel_grpc.frontends.http.forms import Form

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON = b"application/json"
# The longest wait for the rest of an unread body. A client that still sends when the connection closes would lose
# the answer.
_DISCARD_S = 2.0
HEARTBEAT_S = 15.0
"""The silence on a stream after which a comment is sent, in seconds. Proxies close a connection after about a
minute of silence."""
_HEARTBEAT = b": waiting\n\n"
_ALWAYS: tuple[Header, ...] = ((b"x-content-type-options", b"nosniff"),)


class Exchange:
    """Represents one request and its response. `headers` are those of the request, decoded, with names in lower
    case."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers: list[tuple[str, str]] = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        self._first_values = dict(reversed(self.headers))
        self.connection: Connection = scope[CONNECTION_KEY]
        self.path_parameters: Mapping[str, Any] = scope.get("path_params", {})
        self.send = send
        self._scope = scope
        self._receive = receive
        self._has_whole_body = False

    def header(self, name: str) -> str | None:
        """Returns the first value of a header; None if it is absent."""
        return self._first_values.get(name)

    def peer(self) -> str:
        """Returns the address of the client, as `host:port`."""
        client = self._scope.get("client")
        return f"{client[0]}:{client[1]}" if client else ""

    @property
    def media_type(self) -> str:
        """The media type that the headers announce, in lower case; empty if they announce none."""
        return (self.header("content-type") or "").partition(";")[0].strip().lower()

    def require_json(self, limit_bytes: int) -> None:
        """Raises an error if the headers announce a body that is not JSON, is compressed or exceeds the limit."""
        if self.media_type != "application/json":
            raise MediaTypeUnsupported("JSON, with the content type application/json")
        self.require_fit(limit_bytes)

    def form(self, limit_bytes: int) -> Form | None:
        """Returns what the headers say of a form; None if they announce JSON.

        Raises an error if they announce another body, one that is compressed or exceeds the limit, or a form that a
        page of another site may have sent.
        """
        # Frontends that take forms have imported it: others, such as that of probes, need no library of bodies.
        from kestrel_grpc.frontends.http.forms import Form, boundary_of

        media_type, boundary = self.media_type, None
        if media_type == "application/json":
            self.require_fit(limit_bytes)
            return None
        if media_type != "multipart/form-data" and not _is_file(media_type):
            raise MediaTypeUnsupported("JSON, a form or an image: application/json, multipart/form-data or image/…")
        require_own_site(value for name, value in self.headers if name == SITE_KEY)
        self.require_fit(limit_bytes)
        if media_type == "multipart/form-data":
            boundary = boundary_of(self.header("content-type") or "")
        # Some clients send bytes of UTF-8 in addresses without escapes.
        query = self._scope["query_string"].decode(errors="surrogateescape")
        pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
        return Form(boundary, [(_raw(name), _raw(value)) for name, value in pairs])

    def require_file(self, limit_bytes: int) -> None:
        """Raises an error if the headers announce a body that is not a file, is compressed or exceeds the limit."""
        if not _is_file(self.media_type):
            raise MediaTypeUnsupported("a file, with the content type application/octet-stream or image/…")
        self.require_fit(limit_bytes)

    def parameters(self) -> Mapping[str, str]:
        """Returns the parameters of the query. Of a repeated name the last value counts."""
        return dict(parse_qsl(self._scope["query_string"].decode("latin-1"), keep_blank_values=True))

    def require_fit(self, limit_bytes: int) -> None:
        """Raises an error if the headers announce a body that is compressed or exceeds the limit."""
        if (self.header("content-encoding") or "identity").lower() != "identity":
            raise MediaTypeUnsupported("sent without compression")
        length = self.header("content-length")
        if length is not None and int(length) > limit_bytes:
            raise MessageTooLarge(limit_bytes)

    async def read_body(self, limit_bytes: int) -> list[bytes]:
        """Returns the pieces of the whole body: joining a large one takes a while.

        Raises `MessageTooLarge` as soon as it exceeds the limit.
        """
        pieces: list[bytes] = []
        num_bytes = 0
        while not self._has_whole_body:
            pieces.append(await self._next_piece())
            num_bytes += len(pieces[-1])
            if num_bytes > limit_bytes:
                raise MessageTooLarge(limit_bytes)
        self.connection.watch_client()
        return pieces

    async def _next_piece(self) -> bytes:
        message = await self._receive()
        if problem := self.connection.body_problem:
            raise InvalidRequest((Violation("", problem),))
        if message["type"] != "http.request":  # the task is about to be cancelled, if it was not already
            raise EngineUnavailable("the client has disconnected")
        self._has_whole_body = not message.get("more_body", False)
        return message.get("body", b"")

    async def respond(
        self,
        status: int,
        body: bytes,
        request_id: str,
        *,
        content_type: bytes = JSON,
        headers: Iterable[Header] = (),
    ) -> None:
        """Sends a whole response. If the body has not been read, the connection closes after the response."""
        is_last = not self._has_whole_body and self.connection.cycle.more_body
        head: list[Header] = [
            (b"content-type", content_type),
            (REQUEST_ID_KEY.encode(), request_id.encode()),
            *_ALWAYS,
            *headers,
        ]
        if status != 304:  # a 304 has no body, and its `content-length` would be that of the omitted body
            head.append((b"content-length", str(len(body)).encode()))
        if is_last:
            head.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": status, "headers": head})
        await self.send({"type": "http.response.body", "body": body, "more_body": is_last})
        if is_last:
            await self._discard_body()
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def begin(self, num_bytes: int, request_id: str, content_type: bytes) -> None:
        """Sends the headers of a response of `num_bytes`, which `write` sends in pieces."""
        head: list[Header] = [
            (b"content-type", content_type),
            (REQUEST_ID_KEY.encode(), request_id.encode()),
            *_ALWAYS,
            (b"content-length", str(num_bytes).encode()),
        ]
        await self.send({"type": "http.response.start", "status": 200, "headers": head})

    async def begin_events(self, request_id: str) -> None:
        """Sends the headers of a stream of server-sent events."""
        head: list[Header] = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # otherwise proxies buffer events
            (REQUEST_ID_KEY.encode(), request_id.encode()),
            *_ALWAYS,
        ]
        await self.send({"type": "http.response.start", "status": 200, "headers": head})

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Sends a piece of a response that has begun."""
        await self.send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _discard_body(self) -> None:
        with contextlib.suppress(TimeoutError, EngineUnavailable, InvalidRequest):
            async with asyncio.timeout(_DISCARD_S):
                while not self._has_whole_body and not self.connection.body_problem:
                    await self._next_piece()


class EventStream:
    """Writes server-sent events, and a comment whenever the stream has been silent for `heartbeat_s`.

    The response begins with the first event or heartbeat: until then a refusal can have its own status.
    """

    def __init__(
        self,
        exchange: Exchange,
        request_id: str,
        failure: Callable[[CallFailure], bytes],
        *,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """`failure` returns the last events of a stream that fails."""
        self.has_begun = False
        self._failure = failure
        self._exchange = exchange
        self._request_id = request_id
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._is_writing = False
        self._written_at = self._loop.time()
        self._timer = self._loop.call_later(heartbeat_s, self._look)
        self._beating: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        """Sends one or more whole events."""
        self._is_writing = True
        if not self.has_begun:
            self.has_begun = True
            await self._exchange.begin_events(self._request_id)
        await self._exchange.write(data)
        self._is_writing = False
        self._written_at = self._loop.time()

    async def end(self) -> None:
        """Ends the response."""
        await self._exchange.write(b"", is_last=True)

    async def fail(self, failure: CallFailure) -> None:
        """Sends the failure as the last events and ends the response."""
        await self._exchange.write(self._failure(failure), is_last=True)

    def close(self) -> None:
        """Stops the heartbeat."""
        self._timer.cancel()
        if self._beating is not None:
            self._beating.cancel()

    def _look(self) -> None:
        silent_s = self._loop.time() - self._written_at
        if silent_s >= self._heartbeat_s and not self._is_writing:
            self._beating = self._loop.create_task(self.write(_HEARTBEAT))
            silent_s = 0.0
        self._timer = self._loop.call_later(max(self._heartbeat_s - silent_s, 0.01), self._look)


def _is_file(media_type: str) -> bool:
    return media_type == "application/octet-stream" or media_type.startswith("image/")


def _raw(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def encoded(headers: Mapping[str, str]) -> list[Header]:
    """Returns the headers in the form in which they are sent."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
