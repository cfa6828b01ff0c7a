"""Serves probes and metrics over HTTP.

| `/healthz`, `/livez` | 200 while the engine runs, else 503 |
| `/readyz` | 200 while the server accepts requests, else 503 |
| `/metrics` | Prometheus text |

The HTTP port answers them in addition to its services, `/metrics` to callers with a token. `ProbePort` answers them
alone, without a token, until the server has stopped. Probes are answered whatever `Host` a request names. Pages of
other sites do not get `/metrics` (`access/sources.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping

from kestrel_grpc.access.sources import SourceGuard, SourceNotAllowed
from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.errors import describe
from kestrel_grpc.frontends.http.connection import App, Listener
from kestrel_grpc.frontends.http.exchange import Exchange, Receive, Scope, Send
from kestrel_runtime.api.errors import InvalidRequest

TEXT = b"text/plain; charset=utf-8"
METRICS_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
MAX_CONNECTIONS = 32
"""The most connections of a `ProbePort`. Beyond that number a new connection replaces the longest idle one."""


class Probes:
    """Answers probes. A probe is not recorded as a call, since probes arrive all the time."""

    def __init__(
        self, is_alive: Callable[[], bool], is_ready: Callable[[], bool], scrape: Callable[[], Awaitable[bytes]]
    ) -> None:
        """`scrape` returns the text of all metrics."""
        self.scrape = scrape
        self._is_alive = is_alive
        self._is_ready = is_ready

    def apps(self) -> Mapping[str, App]:
        """Returns an ASGI application for the path of each probe."""
        alive = _answer_if(self._is_alive)
        return {"/healthz": alive, "/livez": alive, "/readyz": _answer_if(self._is_ready)}


class ProbePort(Listener):
    """Serves probes and metrics on a port of their own, without a token."""

    def __init__(self, probes: Probes, hosts: Collection[str] = ()) -> None:
        """`hosts` are the port's names on this machine, in addition to addresses and `localhost`.

        A port that other machines reach may have any name there.
        """
        super().__init__(self._serve, max_connections=MAX_CONNECTIONS)
        self._probes = probes
        self._apps = probes.apps()
        self._local_guard = SourceGuard(hosts, (), has_pages=False)
        self._guard = SourceGuard(None, (), has_pages=False)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._apps.get(scope["path"])
        if app is not None:
            await app(scope, receive, send)
        elif scope["path"] == "/metrics":
            await self._answer_metrics(scope, Exchange(scope, receive, send))
        else:
            await _respond(Exchange(scope, receive, send), 404, b"not found\n")

    async def _answer_metrics(self, scope: Scope, exchange: Exchange) -> None:
        guard = self._local_guard if self.is_local else self._guard
        try:
            guard.check(scope["headers"], scope["scheme"], scope["http_version"])
        except (SourceNotAllowed, InvalidRequest) as error:
            failure = describe(error)
            await _respond(exchange, failure.http_status, f"{failure.message}\n".encode())
            return
        await _respond(exchange, 200, await self._probes.scrape(), METRICS_TEXT)


def _answer_if(is_well: Callable[[], bool]) -> App:
    """Returns an ASGI application that answers 200 if `is_well` returns True, else 503."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        status, body = (200, b"ok\n") if is_well() else (503, b"unavailable\n")
        await _respond(Exchange(scope, receive, send), status, body)

    return answer


async def _respond(exchange: Exchange, status: int, body: bytes, content_type: bytes = TEXT) -> None:
    request_id = CallContext(exchange.headers, None, "").request_id
    await exchange.respond(status, body, request_id, content_type=content_type)
