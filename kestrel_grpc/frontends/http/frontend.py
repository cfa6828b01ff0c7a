"""Serves the HTTP port: routes requests to the services on it, and answers probes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router

from kestrel_grpc.access.sources import SourceGuard
from kestrel_grpc.access.tls import CertificateFiles
from kestrel_grpc.calls.call_admission import CallAdmission
from kestrel_grpc.calls.call_context import REQUEST_ID_KEY, CallContext
from kestrel_grpc.calls.call_groups import CallGroups
from kestrel_grpc.calls.errors import MethodUnknown, describe
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.frontends.http import openapi
from kestrel_grpc.frontends.http.connection import App, Listener
from kestrel_grpc.frontends.http.endpoint import TIMEOUT_KEY, Dialect, Endpoint, Group, Operation, failure_headers
from kestrel_grpc.frontends.http.exchange import Exchange, Receive, Scope, Send
from kestrel_grpc.frontends.http.fair_threads import FairThreads
from kestrel_grpc.frontends.http.probes import METRICS_TEXT, Probes
from kestrel_runtime.api.engine import Engine

_PARSING_THREADS = 2


class HttpService(Protocol):
    """Describes one API on the port: its operations and the form of its failures."""

    @property
    def dialect(self) -> Dialect: ...

    @property
    def operations(self) -> Sequence[Operation]: ...


class WebUi(Protocol):
    """Describes the web UI that the port serves to browsers."""

    @property
    def files(self) -> Mapping[str, App]:
        """The applications that answer GET and HEAD with a file, by path. They ask for no token."""
        ...

    @property
    def description(self) -> Operation:
        """The operation that describes the server to the scripts of the web UI."""
        ...


class HttpFrontend:
    """Serves `services` on one port. Refusals of unknown paths use the dialect of the first service.

    With a `web_ui`, requests whose `Origin` is this port are answered, too. Belongs to the event loop of its calls.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        groups: CallGroups,
        services: Sequence[HttpService],
        certificate: CertificateFiles | None,
        probes: Probes,
        web_ui: WebUi | None,
        *,
        shares_port: bool = False,
    ) -> None:
        """If `shares_port` is True, other processes of this server listen on the same port."""
        self._engine = engine
        self._shares_port = shares_port
        self._refusals = groups.refusals
        self._config = config
        self._services = services
        self._certificate = certificate
        self._probes = probes
        self._probe_apps = probes.apps()
        self._web_ui = web_ui
        described = [
            (item, service.dialect.failure_description) for service in services for item in service.operations
        ]
        self._document = openapi.document(described, engine.info.model)
        self._guard = SourceGuard(_hosts(config), config.http_origins or (), has_pages=web_ui is not None)
        handlers = self._handlers(groups)
        # Most paths have no variable parts and need no search through the patterns of the router.
        self._fixed = {path: handler for path, handler in handlers.items() if "{" not in path}
        patterns = [Route(path, handler) for path, handler in handlers.items() if path not in self._fixed]
        self._router = Router(patterns, default=self._unknown, redirect_slashes=False)
        self._listener = Listener(self._serve if not config.http_origins else _with_cors(self._serve, config))

    @property
    def port(self) -> int | None:
        """The TCP port; None before `start`."""
        return self._listener.port

    async def start(self) -> None:
        """Listens and serves. Raises `PortUnavailable`."""
        context = None if self._certificate is None else _reloading_context(self._certificate)
        config = self._config
        await self._listener.start(config.host, config.http_port or 0, context, is_shared=self._shares_port)

    async def close(self) -> None:
        """Stops listening and ends all connections. May be repeated."""
        await self._listener.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        probe = self._probe_apps.get(scope["path"])
        if probe is not None:  # without a check of `Host`: load balancers send foreign names or none
            await probe(scope, receive, send)
            return
        try:
            self._guard.check(scope["headers"], scope["scheme"], scope["http_version"])
        except Exception as error:
            await self._refuse(error, scope, receive, send)
            return
        await self._fixed.get(scope["path"], self._router)(scope, receive, send)

    async def _unknown(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._refuse(MethodUnknown(scope["path"]), scope, receive, send)

    async def _refuse(
        self, error: Exception, scope: Scope, receive: Receive, send: Send, dialect: Dialect | None = None
    ) -> None:
        """Refuses a request before it becomes a call."""
        exchange = Exchange(scope, receive, send)
        request_id = CallContext(exchange.headers, None, "").request_id
        exchange.connection.note_refusal()
        exchange.connection.serve_by(asyncio.current_task())
        try:
            await self._refusals.hold(exchange.peer())
        except asyncio.CancelledError:  # the client has disconnected
            return
        exchange.connection.serve_by(None)
        failure = describe(error, self._engine.status)
        body = (dialect or self._services[0].dialect).failure(failure, request_id)
        await exchange.respond(failure.http_status, body, request_id, headers=failure_headers(failure))

    def _handlers(self, groups: CallGroups) -> Mapping[str, App]:
        """Returns the ASGI application of each path. Paths may have variable parts, as `/v1/images/{image_id}`."""
        paths: dict[str, _Path] = {}
        parsing = FairThreads(_PARSING_THREADS)

        def add(operation: Operation, admission: CallAdmission, dialect: Dialect) -> None:
            endpoint = Endpoint(operation, admission, dialect, self._config.max_message_bytes, parsing)
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
            Operation("GET", "/metrics", "http/metrics", None, self._scrape, content_type=METRICS_TEXT),
            groups.unrecorded(needs_token=True),
            own,
        )
        if self._config.reflection != "off":
            add(
                Operation("GET", "/openapi.json", "http/openapi", None, self._describe),
                groups.unrecorded(needs_token=self._config.reflection == "token"),
                own,
            )
        if self._web_ui is not None:
            add(self._web_ui.description, groups.unrecorded(needs_token=True), own)
            for name, file in self._web_ui.files.items():
                paths[name] = path = _Path(self._refuse, own)
                path.endpoints.update(GET=file, HEAD=file)
        for path in paths.values():
            if "GET" in path.endpoints:
                path.endpoints.setdefault("HEAD", path.endpoints["GET"])  # the connection leaves out the body
        return paths

    async def _scrape(self, _: object, call: CallContext) -> bytes:
        return await self._probes.scrape()

    async def _describe(self, _: object, call: CallContext) -> bytes:
        return self._document


class _Path:
    """Routes the requests for one path by their verb, as an ASGI application."""

    def __init__(self, refuse: Callable[..., Any], dialect: Dialect) -> None:
        self.endpoints: dict[str, App] = {}
        self._refuse = refuse
        self._dialect = dialect

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        endpoint = self.endpoints.get(scope["method"])
        if endpoint is not None:
            return endpoint(scope, receive, send)
        error = MethodUnknown(scope["path"], tuple(self.endpoints))
        return self._refuse(error, scope, receive, send, self._dialect)


def _with_cors(app: App, config: ServerConfig) -> App:
    """Returns the application, wrapped so that browsers let pages of the allowed origins call it (CORS)."""
    return CORSMiddleware(
        app,
        allow_origins=config.http_origins or (),
        allow_methods=("GET", "POST", "PUT", "DELETE"),
        allow_headers=("authorization", "content-type", "x-moondream-auth", REQUEST_ID_KEY, TIMEOUT_KEY),
        expose_headers=(REQUEST_ID_KEY, "retry-after", "retry-after-ms"),
    )


def _hosts(config: ServerConfig) -> tuple[str, ...] | None:
    """Returns the names that `Host` may have; None if it may have any."""
    if config.http_hosts is not None:
        return (*config.http_hosts, config.host)
    return None if config.tokens is not None else (config.host,)


def _reloading_context(certificate: CertificateFiles) -> ssl.SSLContext:
    """Returns a TLS context that gives each new connection the certificate that was read last."""
    first = certificate.value.context

    def choose(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        if certificate.value.context is not first:
            connection.context = certificate.value.context

    first.sni_callback = choose
    return first
