"""The HTTP port: opens it, routes requests to the services on it, answers probes, closes it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from uvicorn.server import ServerState

from kestrel_grpc.access.sources import SourceGuard
from kestrel_grpc.access.tls import CertificateFiles
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.frontends.http import openapi
from kestrel_grpc.frontends.http.connection import HEAD_TIMEOUT_S, Connection, connection_factory
from kestrel_grpc.frontends.http.endpoint import TIMEOUT_KEY, Dialect, Endpoint, Group, Operation, failure_headers
from kestrel_grpc.frontends.http.exchange import Exchange, Receive, Scope, Send
from kestrel_grpc.listeners import PortUnavailable, address_of, require_free_port
from kestrel_grpc.wire.call_admission import CallAdmission
from kestrel_grpc.wire.call_context import REQUEST_ID_KEY, CallContext
from kestrel_grpc.wire.call_groups import CallGroups
from kestrel_grpc.wire.errors import MethodUnknown, describe
from kestrel_grpc.wire.readiness import Readiness
from kestrel_runtime.api.engine import Engine, EngineStatus

_CLOSING_S = 1.0
_BACKLOG = 1024
_TEXT = b"text/plain; charset=utf-8"
_METRICS = b"text/plain; version=0.0.4; charset=utf-8"

App = Callable[[Scope, Receive, Send], Any]


class HttpService(Protocol):
    """One API on the port."""

    @property
    def dialect(self) -> Dialect: ...

    @property
    def operations(self) -> Sequence[Operation]: ...


class HttpFrontend:
    """Serves `services` on one port; the first one's dialect is that of refusals which belong to none.

    Belongs to the event loop of its calls. `metrics` gives the text of all metrics, in any thread.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        groups: CallGroups,
        readiness: Readiness,
        services: Sequence[HttpService],
        certificate: CertificateFiles | None,
        metrics: Callable[[], bytes],
    ) -> None:
        self.port: int | None = None
        """The port that is listened on; None before `start`."""
        self._engine = engine
        self._refusals = groups.refusals
        self._config = config
        self._readiness = readiness
        self._services = services
        self._certificate = certificate
        self._metrics = metrics
        described = [
            (item, service.dialect.failure_description) for service in services for item in service.operations
        ]
        self._document = openapi.document(described, engine.info.model)
        self._state = ServerState()
        self._guard = SourceGuard(_hosts(config), config.http_origins or ())
        handlers = self._handlers(groups)
        # Most paths are looked up here: the router tries one pattern after the other.
        self._fixed = {path: handler for path, handler in handlers.items() if "{" not in path}
        patterns = [Route(path, handler) for path, handler in handlers.items() if path not in self._fixed]
        self._router = Router(patterns, default=self._unknown, redirect_slashes=False)
        self._listener: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen and serve. Raises `PortUnavailable`."""
        host, port = self._config.host, self._config.http_port or 0
        require_free_port(host, port)
        app: App = self._serve
        if self._config.http_origins:
            app = CORSMiddleware(
                app,
                allow_origins=self._config.http_origins,
                allow_methods=("GET", "POST", "PUT", "DELETE"),
                allow_headers=("authorization", "content-type", "x-moondream-auth", REQUEST_ID_KEY, TIMEOUT_KEY),
                expose_headers=(REQUEST_ID_KEY, "retry-after", "retry-after-ms"),
            )
        context = None if self._certificate is None else _following(self._certificate)
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                connection_factory(app, self._state),
                host,
                port,
                family=socket.AF_INET6 if ":" in host else socket.AF_UNSPEC,
                backlog=_BACKLOG,
                ssl=context,
                ssl_handshake_timeout=None if context is None else HEAD_TIMEOUT_S,
            )
        except OSError as error:
            raise PortUnavailable(f"cannot listen on {address_of(host, port)}: {error.strerror}") from error
        self.port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Accept no connection any more and end those that there are. May be repeated."""
        if self._listener is not None:
            self._listener.close()
        connections: list[Any] = list(self._state.connections)
        for connection in connections:
            connection.shutdown()
        if connections:
            await asyncio.wait([connection.closed for connection in connections], timeout=_CLOSING_S)
        for connection in list(self._state.connections):
            assert isinstance(connection, Connection)
            connection.abort()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._guard.check(scope["headers"])
        except Exception as error:
            await self._refuse(error, scope, receive, send)
            return
        await self._fixed.get(scope["path"], self._router)(scope, receive, send)

    async def _unknown(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._refuse(MethodUnknown(scope["path"]), scope, receive, send)

    async def _refuse(
        self, error: Exception, scope: Scope, receive: Receive, send: Send, dialect: Dialect | None = None
    ) -> None:
        """Answer a request that becomes no call."""
        exchange = Exchange(scope, receive, send)
        request_id = CallContext(exchange.headers, None, "").request_id
        exchange.connection.note_refusal()
        exchange.connection.serve_by(asyncio.current_task())
        try:
            await self._refusals.hold(exchange.peer())
        except asyncio.CancelledError:  # the client does not wait
            return
        exchange.connection.serve_by(None)
        failure = describe(error, self._engine.status)
        body = (dialect or self._services[0].dialect).failure(failure, request_id)
        await exchange.respond(failure.http_status, body, request_id, headers=failure_headers(failure))

    def _handlers(self, groups: CallGroups) -> Mapping[str, App]:
        """An ASGI application for each path, which may have variable parts."""
        paths: dict[str, _Path] = {}

        def add(operation: Operation, admission: CallAdmission, dialect: Dialect) -> None:
            endpoint = Endpoint(operation, admission, dialect, self._config.max_message_bytes)
            path = paths.setdefault(operation.path, _Path(self._refuse, dialect))
            path.endpoints[operation.verb] = endpoint

        admissions = {
            Group.INFERENCE: groups.inference,
            Group.OPERATIONS: groups.operations,
            Group.IMAGES: groups.images,
        }
        for service in self._services:
            for operation in service.operations:
                add(operation, admissions[operation.group], service.dialect)
        own = self._services[0].dialect
        add(
            Operation("GET", "/metrics", "http/metrics", None, self._scrape, content_type=_METRICS),
            groups.unrecorded(needs_token=True),
            own,
        )
        if self._config.reflection != "off":
            add(
                Operation("GET", "/openapi.json", "http/openapi", None, self._describe),
                groups.unrecorded(needs_token=self._config.reflection == "token"),
                own,
            )
        probes = {"/healthz": self._is_alive, "/livez": self._is_alive, "/readyz": lambda: self._readiness.is_ready}
        return {**{path: _Probe(is_well) for path, is_well in probes.items()}, **paths}

    def _is_alive(self) -> bool:
        return self._engine.status is not EngineStatus.DEAD

    async def _scrape(self, _: object, call: CallContext) -> bytes:
        return await asyncio.to_thread(self._metrics)

    async def _describe(self, _: object, call: CallContext) -> bytes:
        return self._document


class _Path:
    """An ASGI application for all verbs of one path."""

    def __init__(self, refuse: Callable[..., Any], dialect: Dialect) -> None:
        self.endpoints: dict[str, Endpoint] = {}
        self._refuse = refuse
        self._dialect = dialect

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        endpoint = self.endpoints.get(scope["method"])
        if endpoint is not None:
            return endpoint(scope, receive, send)
        error = MethodUnknown(scope["path"], tuple(self.endpoints))
        return self._refuse(error, scope, receive, send, self._dialect)


class _Probe:
    """An ASGI application that says whether all is well; no call, since probes come all the time."""

    def __init__(self, is_well: Callable[[], bool]) -> None:
        self._is_well = is_well

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        status, body = (200, b"ok\n") if self._is_well() else (503, b"unavailable\n")
        await exchange.respond(status, body, CallContext(exchange.headers, None, "").request_id, content_type=_TEXT)


def _hosts(config: ServerConfig) -> tuple[str, ...] | None:
    if config.http_hosts is not None:
        return (*config.http_hosts, config.host)
    return None if config.tokens is not None else (config.host,)


def _following(certificate: CertificateFiles) -> ssl.SSLContext:
    """A context that gives each new connection the certificate that is in the files then."""
    first = certificate.value.context

    def choose(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        certificate.refresh()
        if certificate.value.context is not first:
            connection.context = certificate.value.context

    first.sni_callback = choose
    return first
