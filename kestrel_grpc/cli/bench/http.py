"""Sends requests to the REST and OpenAI APIs for `kestrel-grpc bench`, over HTTP/1.1 with little processor time.

Each connection has one request at a time; as many connections are open as requests are running.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import httptools

from kestrel_grpc import __version__
from kestrel_grpc.cli.batch.callers import ServerAddress
from kestrel_grpc.cli.bench.calls import STREAMED, TEXT_FIELDS, TIMED_OUT, Question, Target
from kestrel_grpc.cli.bench.loops import Sample

_MEDIA_TYPES = (
    (b"\xff\xd8", "image/jpeg"),
    (b"\x89PNG", "image/png"),
    (b"RIFF", "image/webp"),
    (b"GIF8", "image/gif"),
)
_UNREACHABLE = "UNAVAILABLE"


class HttpConnection(asyncio.Protocol):
    """Represents one connection. `is_open` is True if another request may be sent over it."""

    def __init__(self) -> None:
        self.is_open = True
        self._parser = httptools.HttpResponseParser(self)
        self._take: Callable[[bytes], None] | None = None
        self._ended: asyncio.Future[int] | None = None

    @classmethod
    async def connect(cls, address: ServerAddress) -> HttpConnection:
        """Opens the connection. Raises OSError."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, address.host, address.port, ssl=address.tls)
        return connection

    async def exchange(self, request: bytes, take: Callable[[bytes], None]) -> int:
        """Sends a request, and passes the body to `take` as it arrives. Returns the status.

        Raises OSError if the connection ends before the response does, and ValueError for an invalid response.
        After a cancellation the connection must be closed.
        """
        self._take = take
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._ended

    def close(self) -> None:
        """Closes the connection, also in the middle of a request."""
        self.is_open = False
        self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionResetError("the server has closed the connection"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._transport.close()
            self._fail(ValueError(f"no response of HTTP/1.1: {error}"))

    def on_body(self, body: bytes) -> None:
        """Receives a part of the body from the parser."""
        if self._take is not None:
            self._take(body)

    def on_message_complete(self) -> None:
        """Receives the end of a response from the parser."""
        self.is_open = self.is_open and self._parser.should_keep_alive()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(self._parser.get_status_code())

    def _fail(self, error: Exception) -> None:
        self.is_open = False
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)


class HttpCaller:
    """Calls the HTTP port of a server."""

    def __init__(self, target: Target) -> None:
        self._address = ServerAddress.parse(target.address, target.tls)
        self._target = target
        headers = {
            "host": f"{self._address.host}:{self._address.port}",
            "content-type": "application/json",
            "user-agent": f"kestrel-grpc/{__version__}",
        }
        if target.token:
            headers["authorization"] = f"Bearer {target.token}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: list[HttpConnection] = []

    def close(self) -> None:
        """Closes the idle connections. The caller has no request in flight then."""
        for connection in self._idle:
            connection.close()

    async def call(self, question: Question, started: float, timeout_s: float) -> Sample:
        is_openai = self._target.api == "openai"
        path, fields = (_chat if is_openai else _rest)(question, self._target.model)
        body = json.dumps(fields).encode()
        head = f"POST {self._address.prefix}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        reading = _Reading(is_openai=is_openai)
        connection = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connection()
                status = await connection.exchange(head.encode() + body, reading.take)
            reading.end(status)
        except TimeoutError:
            reading.fail(TIMED_OUT, "no answer in time")
        except OSError as error:
            reading.fail(_UNREACHABLE, error.strerror or str(error) or type(error).__name__)
        except (ValueError, KeyError, TypeError) as error:
            reading.fail("UNKNOWN", f"no answer of this API: {error}")
        finally:
            if connection is not None:
                if reading.is_whole and connection.is_open:
                    self._idle.append(connection)
                else:
                    connection.close()
        return reading.sample(started)

    async def _connection(self) -> HttpConnection:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        return await HttpConnection.connect(self._address)


class _Reading:
    """Collects one answer: JSON as a whole, or server-sent events."""

    def __init__(self, *, is_openai: bool) -> None:
        self.is_whole = False
        """True once the response has ended properly, also if it reports an error."""
        self._is_openai = is_openai
        self._rest = b""
        self._pieces: array[float] = array("d")
        self._usage: Mapping[str, Any] = {}
        self._is_streamed = False
        self._error = self._message = ""

    def take(self, data: bytes) -> None:
        """Takes a part of the body."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            self._is_streamed = True
            if event.startswith(b"data: ") and event != b"data: [DONE]":
                self._event(json.loads(event[6:]))

    def end(self, status: int) -> None:
        """Completes the response. Raises the errors of parsing."""
        self.is_whole = True
        if self._is_streamed:
            return
        if status != 200:
            self.fail(str(status), _text_of(json.loads(self._rest).get("error")))
            return
        self._usage = self._usage_of(json.loads(self._rest))
        self._pieces.append(time.perf_counter())

    def fail(self, error: str, message: str) -> None:
        """Records the failure of the request."""
        self._error, self._message = self._error or error, self._message or message

    def sample(self, started: float) -> Sample:
        """Returns the sample of the request, which ends at this moment."""
        if not self._error and not self._usage:
            self.fail("UNKNOWN", "the answer has no end")
        usage = self._usage
        if self._is_openai:
            num_tokens, num_input = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
            num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        else:
            num_tokens, num_input = usage.get("output_tokens", 0), usage.get("input_tokens", 0)
            num_cached = usage.get("cached_tokens", 0)
        num_first = 1 if self._is_streamed else num_tokens
        return Sample(
            started,
            time.perf_counter(),
            num_tokens,
            self._pieces,
            self._error,
            num_first,
            num_cached,
            num_input,
            self._message,
        )

    def _event(self, event: Mapping[str, Any]) -> None:
        if (error := event.get("error")) is not None:
            self.fail(str(error.get("status") or error.get("code")).upper(), _text_of(error))
        elif self._is_piece(event):
            self._pieces.append(time.perf_counter())
        elif event.get("completed") or event.get("usage"):
            self._usage = self._usage_of(event)

    def _is_piece(self, event: Mapping[str, Any]) -> bool:
        if not self._is_openai:
            return not event["completed"]
        delta = event["choices"][0]["delta"] if event["choices"] else {}
        return bool(delta.get("content") or delta.get("reasoning"))

    def _usage_of(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        return answer["usage" if self._is_openai else "metrics"]


def _text_of(error: Any) -> str:
    if not isinstance(error, Mapping):
        return "no answer of this API"
    return f"{str(error.get('code')).upper()}: {error.get('message')}"


def _rest(question: Question, model: str) -> tuple[str, dict[str, Any]]:
    settings = {"temperature": question.temperature, "max_tokens": question.max_tokens}
    fields: dict[str, Any] = {"settings": {name: value for name, value in settings.items() if value is not None}}
    if (name := TEXT_FIELDS.get(question.skill)) is not None:
        fields[name] = question.text
    if question.picture is not None:
        fields["image_url"] = _url(question.picture)
    if question.is_streamed and question.skill in STREAMED:
        fields["stream"] = True
    if question.adapter:
        fields["model"] = f"{model}/{question.adapter}"
    return f"/v1/{question.skill}", fields


def _chat(question: Question, model: str) -> tuple[str, dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": question.text}]
    if question.picture is not None:
        parts.append({"type": "image_url", "image_url": {"url": _url(question.picture)}})
    fields: dict[str, Any] = {
        "model": f"{model}/{question.adapter}" if question.adapter else model,
        "messages": [{"role": "user", "content": parts}],
    }
    if question.temperature is not None:
        fields["temperature"] = question.temperature
    if question.max_tokens is not None:
        fields["max_tokens"] = question.max_tokens
    if question.is_streamed:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return "/v1/chat/completions", fields


def _url(picture: bytes) -> str:
    media_type = next(
        (name for start, name in _MEDIA_TYPES if picture.startswith(start)), "application/octet-stream"
    )
    return f"data:{media_type};base64,{base64.b64encode(picture).decode()}"
