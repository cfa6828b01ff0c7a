"""Serves HTTP/1.1 connections and the ports that accept them: uvicorn's protocol with limits on time, size and
number.

Bounds the resources that a client can take before the application sees its request: the bytes and the time of the
headers, the bytes that frame a body, the time between requests, and the number of connections. The reader of the
body bounds the body itself; until then at most 64 KiB of it are held.

Also decides where a request ends, so that a proxy, the parser and the application see the same end: offers of
another protocol (`Upgrade`) are ignored, fields behind a body are dropped, and a body that is neither counted by
`Content-Length` nor in chunks is refused.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kestrel_grpc.process.free_ports import PortUnavailable, address_of, require_free_port

App = Callable[..., Any]
"""An ASGI application."""
HEAD_TIMEOUT_S = 10.0
"""The time limit for the headers of a request, in seconds from the connection or from their first byte."""
IDLE_TIMEOUT_S = 75.0
"""The longest time between two requests on a connection, in seconds."""
MAX_HEAD_BYTES = 64 * 1024
"""The most bytes of a request apart from its body: request line, headers, and the framing of chunks."""
MAX_CONNECTIONS = 1024
MAX_REPLACED_PER_S = 200
"""The most new connections of one address per second that may replace others at the limit of connections. Further
ones are closed."""
CONNECTION_KEY = "kestrel.connection"
"""The entry of an ASGI scope that holds the `Connection`."""
_BODY_BYTES_PER_FRAMING_BYTE = 8
_DESCRIPTOR_SHARE = 4
_CLOSING_S = 1.0
_LINGER_S = 1.0
_BACKLOG = 1024
_PROBES: Mapping[str, int] = MappingProxyType({"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 2})
_TOO_LARGE = "the headers, or the framing of the body, are too large"
_INVALID = "this is no valid HTTP/1.1 request"
_VERSIONS = frozenset(("1.0", "1.1"))
_CHUNKED = b"chunked"
# The headers by which a client offers another protocol, and the options of `Connection` that belong to them.
_OFFERS = frozenset((b"upgrade", b"http2-settings"))


class ReplaceableConnections:
    """Orders the connections that a new one may replace: first those with a refused request, then idle ones, oldest
    first.

    The order is kept up to date, since under attack every new connection replaces another one.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """The most concurrent connections of all kinds."""
        self._refused: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}
        self._second = 0
        self._num_replaced: Counter[str] = Counter()

    def may_replace(self, address: str) -> bool:
        """Counts a new connection of this address. Returns True if it may replace another one."""
        second = int(time.monotonic())
        if second != self._second:
            self._second = second
            self._num_replaced.clear()
        self._num_replaced[address] += 1
        return self._num_replaced[address] <= MAX_REPLACED_PER_S

    def add_refused(self, connection: Connection) -> None:
        """Adds a connection whose request was refused: only its answer or the rest of its body is outstanding."""
        self.remove(connection)
        self._refused[connection] = None

    def add_idle(self, connection: Connection) -> None:
        """Adds a connection that waits for a request."""
        self.remove(connection)
        self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """Removes a connection that serves a request or is closed."""
        self._refused.pop(connection, None)
        self._idle.pop(connection, None)

    def pop(self) -> Connection | None:
        """Removes and returns the first connection; None if there is none."""
        for group in (self._refused, self._idle):
            for connection in group:
                del group[connection]
                return connection
        return None


class Connection(HttpToolsProtocol):
    """Serves one request at a time. The task that serves it is cancelled when the client disconnects.

    A request that arrives before the previous answer is complete is not read; the connection then closes with that
    answer.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        replaceable: ReplaceableConnections,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.closed: asyncio.Future[None] = self.loop.create_future()
        """Done when the connection has ended."""
        self._is_refused = False
        self._replaceable = replaceable
        self._serving: asyncio.Task[Any] | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._framing_bytes = self._header_bytes = self._body_bytes = 0
        self._ignores_input = False
        self._has_head = False
        self._refusal: tuple[int, str] | None = None
        self.body_problem = ""
        """The problem with the framing of the body that is being received; empty if there is none."""

    @property
    def is_idle(self) -> bool:
        """True while the connection waits for a request."""
        return self.cycle is None or self.cycle.response_complete

    def note_refusal(self) -> None:
        """Records that the request is refused: a new connection may replace this one before its answer is sent."""
        self._is_refused = True
        if not self.transport.is_closing():
            self._replaceable.add_refused(self)

    def serve_by(self, task: asyncio.Task[Any] | None) -> None:
        """Has this task cancelled if the client disconnects; None cancels nothing."""
        self._serving = task
        if task is not None and self.closed.done():
            task.cancel()

    def watch_client(self) -> None:
        """Reads on behind a whole body: otherwise nothing is read until the answer is complete, and it is not seen
        that the client disconnects."""
        self.flow.resume_reading()

    def abort(self) -> None:
        """Closes at once. Bytes that have not been sent are lost."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._replaceable.add_idle(self)
        _probe_when_silent(transport.get_extra_info("socket"))
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._replaceable.remove(self)
        self._disarm_head_timer()
        self._stop_idle_timer()
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.cancel()
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        self._framing_bytes += len(data)
        self._stop_idle_timer()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._end_input()
        if self.transport.is_closing() or self._ignores_input:
            return
        if self._framing_bytes > MAX_HEAD_BYTES + self._body_bytes // _BODY_BYTES_PER_FRAMING_BYTE:
            self._refuse(431, _TOO_LARGE)
        elif self.is_idle and self._head_timer is None:
            self._arm_head_timer()

    def _parse(self, data: bytes) -> None:
        """Feeds the parser. Raises `HttpParserError`, also if a method that the parser calls has raised."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            # The parser takes what follows the headers for another protocol. So a new one gets the headers without
            # the offer, and then the rest.
            head = self._head_without_offer()
            self._header_bytes = 0
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(head)
            if rest := data[offer.args[0] :]:
                self._parse(rest)

    def _head_without_offer(self) -> bytes:
        """Returns the request line and the parsed headers, without headers that offer another protocol."""
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = (option.strip() for option in value.split(b","))
                lines.append(b"connection: " + b", ".join(item for item in options if item.lower() not in _OFFERS))
            elif name not in _OFFERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        if not self.is_idle:
            # The exception stops the parser.
            self._ignores_input = True
            self.cycle.keep_alive = False
            raise ValueError("a request before the answer to the one before it")
        super().on_message_begin()
        self._has_head = False
        if self._is_refused:
            self._is_refused = False
            self._replaceable.add_idle(self)
        scope: Any = self.scope  # its declared type lists the keys of the specification
        scope[CONNECTION_KEY] = self

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEAD_BYTES:
            self._stop(431, _TOO_LARGE)
        if not self._has_head:  # otherwise it is a field behind the body, which no proxy checks
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            self._stop(501, "this server is no proxy")
        if self.parser.should_upgrade():
            return  # `_parse` has them parsed again
        self._require_framing()
        if not self.url.startswith(b"/"):
            self._use_address()
        self._has_head = True
        self._disarm_head_timer()
        self.server_state.default_headers = _default_headers(int(time.time()))
        self._replaceable.remove(self)
        super().on_headers_complete()

    def _require_framing(self) -> None:
        """Refuses a request whose end other HTTP software might find elsewhere."""
        version = self.parser.get_http_version()
        if version not in _VERSIONS:
            self._stop(505, "this port speaks HTTP/1.1")
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if not codings:
            return
        if version == "1.0":
            self._stop(400, _INVALID)  # HTTP/1.0 has no such header, and its proxies ignore it
        if len(codings) > 1 or codings[0].strip(b" \t").lower() != _CHUNKED:
            self._stop(501, "the only Transfer-Encoding that this server reads is chunked")

    def _use_address(self) -> None:
        """Takes the host and the path from a target such as `http://localhost:8000/v1/models`."""
        _, separator, rest = self.url.partition(b"://")
        if not separator:
            return
        length = next((index for index, byte in enumerate(rest) if byte in b"/?#"), len(rest))
        host, path = rest[:length], rest[length:]
        self.headers[:] = [(b"host", host), *(header for header in self.headers if header[0] != b"host")]
        self.url = path if path.startswith(b"/") else b"/" + path

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_parse` has the message parsed again
        self._framing_bytes = self._header_bytes = self._body_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self._is_refused and not self.transport.is_closing():
            self._replaceable.add_idle(self)
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing():
            self.transport.close()  # the rest of an unread body has no other timeout

    def _stop(self, status: int, message: str) -> None:
        """Stops the parser, from a method that it calls; the request is refused."""
        self._refusal = (status, message)
        raise ValueError(message)

    def _end_input(self) -> None:
        """Refuses the request after the parser has stopped."""
        if not self._ignores_input:
            self._refuse(*(self._refusal or (400, _INVALID)))

    def _refuse(self, status: int, message: str) -> None:
        """Refuses the request. If it has not reached the application, answers and closes; otherwise the application
        answers."""
        self._ignores_input = True
        if not self.is_idle:
            self.cycle.keep_alive = False
            if self.cycle.more_body:
                self.body_problem = message
                self.cycle.message_event.set()
            return
        if self.transport.is_closing():
            return
        content = message.encode() + b"\n"
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + content)
        self._disarm_head_timer()
        if self.transport.can_write_eof():
            # A client that still sends would lose the answer if the connection closed now.
            self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _stop_idle_timer(self) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def _arm_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._end_head_time)

    def _disarm_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_head_time(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"the headers were not complete within {HEAD_TIMEOUT_S:g} s")


def _probe_when_silent(item: socket.socket) -> None:
    """Has the system close the connection of a client that no longer exists, within 80 seconds."""
    item.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            item.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Listener:
    """Listens on one port and passes the requests of its connections to the ASGI application `app`."""

    def __init__(self, app: App, *, max_connections: int | None = None) -> None:
        """If `max_connections` is None, it is a share of the descriptors, at most `MAX_CONNECTIONS`."""
        self.port: int | None = None
        """The TCP port; None before `start`."""
        self.is_local = False
        """True if only this machine reaches the port; known after `start`."""
        self._app = app
        self._max_connections = max_connections
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(
        self, host: str, port: int, context: ssl.SSLContext | None = None, *, is_shared: bool = False
    ) -> None:
        """Listens and serves, with TLS if there is a context. Raises `PortUnavailable`.

        If `is_shared` is True, other processes of this server listen on the port, too.
        """
        if not is_shared:
            require_free_port(host, port)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                _connection_factory(self._app, self._state, self._max_connections or connection_limit()),
                host,
                port,
                family=socket.AF_INET6 if ":" in host else socket.AF_UNSPEC,
                backlog=_BACKLOG,
                # None where the port is not shared: the option does not exist everywhere.
                reuse_port=is_shared or None,
                ssl=context,
                ssl_handshake_timeout=None if context is None else HEAD_TIMEOUT_S,
            )
        except OSError as error:
            raise PortUnavailable(f"cannot listen on {address_of(host, port)}: {error.strerror}") from error
        names = [item.getsockname() for item in self._server.sockets]
        self.port = names[0][1]
        self.is_local = all(ipaddress.ip_address(name[0].partition("%")[0]).is_loopback for name in names)

    async def close(self) -> None:
        """Accepts no further connection and ends the existing ones. May be repeated."""
        if self._server is not None:
            self._server.close()
        connections: list[Any] = list(self._state.connections)
        for connection in connections:
            connection.shutdown()
        if connections:
            await asyncio.wait([connection.closed for connection in connections], timeout=_CLOSING_S)
        for connection in list(self._state.connections):
            assert isinstance(connection, Connection)
            connection.abort()


def connection_limit() -> int:
    """Returns the largest number of connections that use at most a quarter of the process's descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, limit // _DESCRIPTOR_SHARE)


def _connection_factory(app: App, state: ServerState, max_connections: int) -> Callable[[], asyncio.Protocol]:
    """Makes the connections of a listener, which `state` keeps."""
    config = Config(
        app,
        http=Connection,
        interface="asgi3",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=round(IDLE_TIMEOUT_S),
    )
    config.load()
    replaceable = ReplaceableConnections(max_connections)
    return lambda: _NewConnection(lambda: Connection(config, state, {}, replaceable), state, replaceable)


class _NewConnection(asyncio.Protocol):
    """Decides about a new connection before it takes resources: under attack, most are closed at once."""

    def __init__(
        self, new_connection: Callable[[], Connection], state: ServerState, replaceable: ReplaceableConnections
    ) -> None:
        self._new_connection = new_connection
        self._state = state
        self._replaceable = replaceable

    def connection_made(self, transport: Any) -> None:
        if len(self._state.connections) >= self._replaceable.limit:
            address = transport.get_extra_info("peername")
            may_replace = self._replaceable.may_replace(address[0] if address else "")
            replaced = self._replaceable.pop() if may_replace else None
            if replaced is None:
                transport.abort()
                return
            self._state.connections.discard(replaced)
            replaced.transport.close()
        connection = self._new_connection()
        transport.set_protocol(connection)
        connection.connection_made(transport)


@lru_cache(maxsize=1)
def _default_headers(now_s: int) -> list[tuple[bytes, bytes]]:
    """Returns the header `date`, which has whole seconds."""
    return [(b"date", formatdate(now_s, usegmt=True).encode())]
