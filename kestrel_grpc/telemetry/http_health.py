"""An HTTP port for probes: `/metrics` as Prometheus text, `/healthz` (alive) and `/readyz` (takes requests).

Served by a thread of its own, so that a busy event loop does not delay it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

_CLIENT_TIMEOUT_S = 10.0

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
    """A thread for each connection, so that an idle one does not delay the others."""

    daemon_threads = True

    def server_bind(self) -> None:
        # The library's own looks up the host's name, which takes seconds where no name server answers.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()


class _ThreadingServerV6(_ThreadingServer):
    """The same over IPv6."""

    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    """Logs nothing, and closes connections on which no request comes."""

    timeout = _CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        pass
