"""An HTTP port for probes: `/metrics` as Prometheus text, `/healthz` (alive) and `/readyz` (takes requests).

Served by a thread of its own, so that a busy event loop does not delay it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

_CLIENT_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 32

_log = logging.getLogger(__name__)

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class HealthPort:
    """Opened by `open` and closed by `close`. `is_alive` and `is_ready` are asked from other threads."""

    def __init__(
        self, registry: CollectorRegistry, *, is_alive: Callable[[], bool], is_ready: Callable[[], bool]
    ) -> None:
        self.port: int | None = None
        """The port that is listened on; None before `open`."""
        self._metrics: WsgiApp = make_wsgi_app(registry)
        self._answers = {"/healthz": is_alive, "/readyz": is_ready}
        self._server: WSGIServer | None = None

    def open(self, host: str, port: int) -> None:
        """Listen and answer. Raises `OSError`."""
        family = _ThreadingServerV6 if ":" in host else _ThreadingServer
        self._server = make_server(host, port, self._answer, family, _QuietHandler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="kestrel-http-health", daemon=True).start()

    def close(self) -> None:
        """Close the port. Blocks for at most half a second; closing again does nothing."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            return self._metrics(environ, start_response)
        ask = self._answers.get(path)
        if ask is None:
            status, body = "404 Not Found", b"not found\n"
        elif ask():
            status, body = "200 OK", b"ok\n"
        else:
            status, body = "503 Service Unavailable", b"unavailable\n"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
        return [body]


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection, so that an idle one does not delay the others.

    Each connection serves one request, and has some seconds for it. Beyond the largest number of connections the
    oldest one is closed.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._opened_at: dict[socket.socket, float] = {}
        """The connections, the oldest first. Threads remove theirs."""
        super().__init__(*arguments, **named)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Called by the accepting thread with each connection."""
        opened_at = self._opened_at
        if len(opened_at) >= MAX_CONNECTIONS:
            oldest = tuple(opened_at)[0]  # noqa: RUF015 (at once, since threads remove theirs)
            opened_at.pop(oldest, None)
            _hang_up(oldest)
        opened_at[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called by the accepting thread, twice a second at least."""
        now = time.monotonic()
        for request, opened_at in tuple(self._opened_at.items()):
            if now - opened_at > _CLIENT_TIMEOUT_S:
                _hang_up(request)

    def shutdown_request(self, request: Any) -> None:
        """Called by the connection's thread when it has been served."""
        self._opened_at.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Called where a connection broke off or ran out of time. The library's own prints a traceback."""
        _log.debug("a connection of the port for probes ended early", exc_info=True)

    def server_bind(self) -> None:
        # The library's own looks up the host's name, which takes seconds where no name server answers.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()


class _ThreadingServerV6(_ThreadingServer):
    """The same over IPv6."""

    address_family = socket.AF_INET6


def _hang_up(connection: socket.socket) -> None:
    """Have the thread of a connection find it closed."""
    with contextlib.suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


class _QuietHandler(WSGIRequestHandler):
    """Logs nothing, and closes connections on which no request comes."""

    timeout = _CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        pass
