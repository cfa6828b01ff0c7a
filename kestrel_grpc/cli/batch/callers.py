"""Answers the requests of `kestrel-grpc batch` with an engine of this process, or with a server at an address.

Both callers take the path and the body of an HTTP request and return the status and the JSON of the response, so
that fields, checks and answers are those of the HTTP port. `EngineCaller` runs the operations of the HTTP frontends
without HTTP.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import ssl
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from kestrel_client.connection import ClientTls
from kestrel_grpc import __version__
from kestrel_grpc.calls.call_context import REQUEST_ID_KEY, CallContext
from kestrel_grpc.calls.errors import MethodUnknown, describe
from kestrel_grpc.calls.submission import Submission
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.frontends.http.endpoint import TIMEOUT_KEY
from kestrel_grpc.frontends.openai.service import OpenAiService
from kestrel_grpc.frontends.rest.service import RestService
from kestrel_grpc.images.image_uris import ImageSource
from kestrel_runtime.api.deadlines import deadline_in
from kestrel_runtime.api.engine import Engine, EngineStatus

_GRACE_S = 10.0
"""The time by which a client waits longer than the server, so that the server's own timeout reaches it, in
seconds."""
_INLINE_BYTES = 256 * 1024
"""The size from which a body is parsed in a thread."""
_CALLER_MESSAGES = {
    401: "the server asks for a token, or does not know the one of --token or KESTREL_GRPC_TOKEN",
    403: "the server does not allow these calls",
}
_NO_HTTP_PORT = "the address is not that of the HTTP port of a server (--http-port of serve)"
_log = logging.getLogger(__name__)


class RunEnded(Exception):
    """The run cannot answer further lines; the text says why."""


class Unreachable(Exception):
    """The server did not answer; the text says why. A later attempt may succeed."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Represents a response. `retry_after_s` is None if another attempt does not help."""

    status: int
    document: Mapping[str, Any]
    retry_after_s: float | None = None


class Caller(Protocol):
    """Answers requests."""

    async def post(self, path: str, body: bytes, request_id: str) -> Reply:
        """Answers one request. Raises `Unreachable` or `RunEnded`."""
        ...


class EngineCaller:
    """Calls an engine as the HTTP port does, without a port. Callers have no tokens and share all caches."""

    def __init__(
        self, engine: Engine, config: ServerConfig, images: ImageSource, *, timeout_s: float | None = None
    ) -> None:
        """Creates a caller. `images` fetches images by their addresses; a request ends after `timeout_s`
        seconds."""
        self._engine = engine
        self._timeout_s = timeout_s
        names = config.served_model_name or ()
        submission = Submission(engine, images, model_names=names)
        max_image_bytes = engine.info.config.max_image_bytes
        rest = RestService(submission, engine.info.model, None, None, max_image_bytes=max_image_bytes)
        openai = OpenAiService(submission, engine, model_names=names, max_image_bytes=max_image_bytes)
        self._unknown = rest.dialect
        self._operations = {
            operation.path: (operation, service.dialect)
            for service in (rest, openai)
            for operation in service.operations
            if operation.verb == "POST"
        }

    async def post(self, path: str, body: bytes, request_id: str) -> Reply:
        operation, dialect = self._operations.get(path, (None, self._unknown))
        call = CallContext(
            ((REQUEST_ID_KEY, request_id),),
            deadline_in(self._timeout_s),
            operation.method if operation else path,
        )
        try:
            if operation is None:
                raise MethodUnknown(path)
            parsed: Any = {}
            if operation.parse is not None:
                is_small = len(body) <= _INLINE_BYTES
                parsed = operation.parse(body) if is_small else await asyncio.to_thread(operation.parse, body)
            answer = await operation.serve(parsed, call)
            assert isinstance(answer, bytes), "a line with `stream` is refused before"
            return Reply(200, json.loads(answer))
        except Exception as error:
            if self._engine.status is EngineStatus.DEAD:
                raise RunEnded("the engine has failed; its log says why") from error
            failure = describe(error, self._engine.status)
            if failure.http_status == 500:
                _log.error("request %s failed", call.request_id, exc_info=error)
            document = json.loads(dialect.failure(failure, call.request_id))
            return Reply(failure.http_status, document, failure.retry_after_s)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Holds the address of a server's HTTP port. `prefix` stands before the paths of the API, such as /kestrel."""

    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None

    @classmethod
    def parse(cls, text: str, tls: ClientTls | None) -> ServerAddress:
        """Parses `http://host:port`, `https://…`, or `host:port`. Raises ValueError, or OSError for a file of
        TLS."""
        url = urlsplit(text if "://" in text else f"{'http' if tls is None else 'https'}://{text}")
        is_plain = url.scheme == "http"
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment or url.username:
            raise ValueError(
                f"--address {text}: must be the address of the HTTP port, such as http://localhost:8000"
            )
        if is_plain and tls is not None:
            raise ValueError("--address http://… asks for no encryption, and --tls-ca (KESTREL_GRPC_TLS_CA) for it")
        context = None
        if not is_plain:
            context = (tls or ClientTls()).context()
            context.set_alpn_protocols(["http/1.1"])
        port = url.port or (80 if is_plain else 443)
        return cls(url.hostname, port, url.path.rstrip("/").removesuffix("/v1"), context)

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """Returns a connection, which opens with its first request."""
        if self.tls is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=self.tls)


class ServerCaller:
    """Calls the HTTP port of a server, with a thread and a connection for each request in flight."""

    def __init__(
        self, address: ServerAddress, token: str | None, *, timeout_s: float, num_connections: int
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._headers = {
            "content-type": "application/json",
            "user-agent": f"kestrel-grpc/{__version__}",
            TIMEOUT_KEY: f"{timeout_s:g}",
        }
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._threads = ThreadPoolExecutor(num_connections, thread_name_prefix="batch-call")
        self._local = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    async def check(self) -> None:
        """Raises `Unreachable` or `RunEnded` unless a server answers that accepts the token."""
        reply = await self._send("GET", "/v1/models", None, "batch-0")
        if reply.status != 200 and reply.retry_after_s is None:
            raise RunEnded(_NO_HTTP_PORT)

    async def post(self, path: str, body: bytes, request_id: str) -> Reply:
        return await self._send("POST", path, body, request_id)

    def close(self) -> None:
        """Closes all connections. The caller has no request in flight then."""
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()

    async def _send(self, verb: str, path: str, body: bytes | None, request_id: str) -> Reply:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._exchange, verb, path, body, request_id)

    def _exchange(self, verb: str, path: str, body: bytes | None, request_id: str) -> Reply:
        headers = {**self._headers, REQUEST_ID_KEY: request_id}
        while True:
            connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
            is_used = connection is not None and connection.sock is not None
            if connection is None:
                connection = self._local.connection = self._address.connect(self._timeout_s + _GRACE_S)
                self._connections.append(connection)
            try:
                connection.request(verb, self._address.prefix + path, body, headers)
                response = connection.getresponse()
                return _reply(response, response.read())
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                # The server closes a connection that was idle; the request then never reached it.
                if is_used and isinstance(error, ConnectionError | http.client.BadStatusLine):
                    continue
                if isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError):
                    raise RunEnded(_NO_HTTP_PORT) from error  # another protocol, such as that of gRPC
                raise Unreachable(_explained(error)) from error


def _reply(response: http.client.HTTPResponse, body: bytes) -> Reply:
    """Parses a response. Raises `Unreachable` for the answer of a proxy, `RunEnded` for one that concerns every
    request."""
    if response.status in _CALLER_MESSAGES:
        raise RunEnded(_CALLER_MESSAGES[response.status])
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        if response.status >= 500:
            raise Unreachable(f"status {response.status} without an answer of the server")
        raise RunEnded(_NO_HTTP_PORT)
    after_ms, after_s = response.getheader("retry-after-ms"), response.getheader("retry-after")
    try:
        retry_after_s = float(after_ms) / 1000.0 if after_ms else float(after_s) if after_s else None
    except ValueError:  # a date, which only proxies send
        retry_after_s = 1.0
    return Reply(response.status, document, retry_after_s)


def _explained(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
