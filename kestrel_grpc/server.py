"""The server's life: bind, serve, drain, stop. One event loop, one engine, and the doors to it. Knows no RPC."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME

from kestrel_client.v1 import (
    engine_service_pb2,
    engine_service_pb2_grpc,
    vision_service_pb2,
    vision_service_pb2_grpc,
)
from kestrel_grpc.access.access import Access, OpenAccess, TokenAccess
from kestrel_grpc.access.tls import server_credentials
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.frontends.grpc.engine_service import EngineService
from kestrel_grpc.frontends.grpc.hang_up import hang_up
from kestrel_grpc.frontends.grpc.health import Health
from kestrel_grpc.frontends.grpc.http2 import server_options
from kestrel_grpc.frontends.grpc.idle_connections import IdleConnections
from kestrel_grpc.frontends.grpc.interceptors import CallScope, Observer
from kestrel_grpc.frontends.grpc.own_sockets import OwnSockets
from kestrel_grpc.frontends.grpc.receiving import MessageGate
from kestrel_grpc.frontends.grpc.reflection import add_reflection
from kestrel_grpc.frontends.grpc.vision_service import VisionService
from kestrel_grpc.images.image_uris import ImageSource, NoRemoteImages, RemoteImagesUnavailable
from kestrel_grpc.listeners import (
    PortUnavailable,
    address_of,
    open_port,
    open_unix_socket,
    require_free_port,
    require_free_socket,
)
from kestrel_grpc.maintenance import Maintenance
from kestrel_grpc.telemetry.logs import announce, log_call
from kestrel_grpc.telemetry.telemetry import Telemetry
from kestrel_grpc.wire.limits import MAX_SHORT_CALLS, MAX_WATCHES, max_calls, request_gate, short_gate
from kestrel_grpc.wire.open_calls import OpenCalls
from kestrel_grpc.wire.shares import Shares
from kestrel_runtime.api.engine import Engine, EngineStatus

_VISION: Any = vision_service_pb2.DESCRIPTOR
_ENGINE: Any = engine_service_pb2.DESCRIPTOR
# After the last request has ended its last message may still be on its way out.
_LAST_WORDS_S = 2.0
# gRPC may work for seconds on what a flood has left on a connection, and cannot be told to stop.
_CLOSING_S = 1.0

_log = logging.getLogger(__name__)


class Server:
    """Serves an engine that has been started. `stop` closes the engine too.

    `async with` starts and stops it, as tests do; `serve` runs until a signal, as the command does. Belongs to the
    event loop that it was made on. Images that are named by address come from `images`, or where that is None, from
    where the configuration says. `at_rest` is done in a thread of its own when calls have ended and none runs.
    Raises `TokenFileError` or `CertificateError` where their files cannot be used.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        *,
        images: ImageSource | None = None,
        at_rest: Callable[[], object] | None = None,
    ) -> None:
        self.instance_id = secrets.token_hex(8)
        self.port: int | None = None
        """The port that is listened on; None before `start`."""
        self.admin_port: int | None = None
        """The port for operators; None where there is none, and before `start`."""
        self._engine = engine
        self._config = config
        self._health = Health(
            engine,
            [service.full_name for file in (_VISION, _ENGINE) for service in file.services_by_name.values()],
        )
        self._telemetry = Telemetry(
            engine, config, instance_id=self.instance_id, is_ready=lambda: self._health.is_serving
        )
        self._maintenance = None if at_rest is None else Maintenance(engine, at_rest)
        self._access = _access(config)
        self._background: list[asyncio.Task[None]] = []
        self._credentials = _credentials(config)
        self._images = images or _images(config)
        self._request_gate = MessageGate(request_gate(config))
        self._short_gate = MessageGate(short_gate(config))
        self._open_calls, self._open_watches = OpenCalls(), OpenCalls()
        self._sockets: OwnSockets | None = None
        self._servers = self._build()
        self._closing: asyncio.Task[None] | None = None
        self._has_closed = False

    @property
    def metrics_port(self) -> int | None:
        """The port of metrics and probes; None where there is none, and before `start`."""
        return self._telemetry.port

    @property
    def has_closed(self) -> bool:
        """Whether gRPC has let go of every connection, which after `stop` it may still be about to."""
        return self._has_closed

    async def start(self) -> None:
        """Open the doors. Raises `PortUnavailable`."""
        config = self._config
        public, operators = self._servers[0], self._servers[-1]
        self.port = open_port(public, config.host, config.port, self._credentials)
        if config.unix_socket is not None:
            open_unix_socket(public, Path(config.unix_socket))
        if config.admin_port is not None:
            self.admin_port = open_port(operators, config.admin_host, config.admin_port)
        for server in self._servers:
            await server.start()
        paths = () if config.unix_socket is None else (config.unix_socket,)
        self._sockets = OwnSockets([port for port in (self.port, self.admin_port) if port is not None], paths)
        # Who watches health holds a connection for nothing, and is told the health again on the next one.
        idle = IdleConnections(self._sockets, self._open_calls.peer_ports)
        self._background += [asyncio.create_task(task) for task in (self._access.watch(), idle.watch())]
        try:
            self._telemetry.open()
        except OSError as error:
            address = address_of(config.metrics_host, config.metrics_port or 0)
            raise PortUnavailable(f"cannot listen on {address}: {error.strerror}") from error
        info = self._engine.info
        address = address_of(config.host, self.port)
        announce(f"kestrel-grpc serves {info.model} on {address} ({info.device}, {info.dtype})")
        if config.unix_socket is not None:
            _log.info("listening on the socket %s", config.unix_socket)
        if self.admin_port is not None:
            _log.info("operators are served on %s", address_of(config.admin_host, self.admin_port))

    async def serve(self) -> bool:
        """Start, run until a signal or the engine's death, withdraw, drain, stop. A second signal stops at once.

        True after a signal, False where the engine died, before or while it drained.
        """
        with _signals() as signals:
            died = self._death()
            await self.start()
            await asyncio.wait((signals.first, died), return_when=asyncio.FIRST_COMPLETED)
            if signals.first.done():
                # Who stops the server by hand has no balancer that needs time to turn away.
                delay_s = self._config.withdrawal_delay if signals.first.result() is signal.SIGTERM else 0.0
                leaving = asyncio.ensure_future(self._leave(died, delay_s))
                await asyncio.wait((leaving, signals.second), return_when=asyncio.FIRST_COMPLETED)
                if not leaving.done():
                    _log.warning("stopping at once")
                    leaving.cancel()
            is_alive = not died.done()  # from here on it is the server that ends it
            await self.stop()
        return is_alive

    def withdraw(self) -> None:
        """Say on every way of asking for health that no calls should come any more; still take those that do."""
        self._health.refuse()

    async def drain(self) -> None:
        """Refuse new requests, and return when every call has ended or the drain timeout has passed."""
        timeout_s = self._config.drain_timeout
        _log.info("draining, for at most %g s", timeout_s)
        self.withdraw()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                draining = asyncio.ensure_future(self._engine.drain())
                # Calls whose message has not come yet would be refused once it has.
                self._request_gate.close()
                await draining
                # What the engine has said may still be on its way to a slow reader.
                self._health.close()
                await self._end_of_calls()
                await self._close_doors()
                return
        _log.warning("the drain timeout has passed; what still runs is ended")

    async def stop(self) -> None:
        """Close port and engine. Requests that still run fail with UNAVAILABLE."""
        self._health.close()
        await asyncio.to_thread(self._engine.close)
        self._request_gate.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._end_of_calls()
        await self._close_doors()
        await self._images.close()
        for task in self._background:
            task.cancel()
        if self._sockets is not None:
            self._sockets.close()
        if self._maintenance is not None:
            self._maintenance.close()
        await asyncio.to_thread(self._telemetry.close)

    async def _leave(self, died: asyncio.Future[None], delay_s: float) -> None:
        """Withdraw, and after the delay drain. A dead engine waits for nothing."""
        _log.info("withdrawing: calls are taken for another %g s", delay_s)
        self.withdraw()
        await asyncio.wait((died,), timeout=delay_s)
        await self.drain()

    async def _end_of_calls(self) -> None:
        await self._open_calls.end()
        await self._open_watches.end()

    async def _close_doors(self) -> None:
        """Take no connection and no call any more; those that still run are cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._end_connections())
        # Whoever waits may be out of time; the closing goes on.
        await asyncio.shield(self._closing)

    async def _end_connections(self) -> None:
        if self._sockets is not None:
            hang_up(self._sockets)
        # They are waited for, and not cancelled: gRPC does not survive a `stop` that is cancelled.
        stops = [asyncio.create_task(server.stop(None)) for server in self._servers]
        done, late = await asyncio.wait(stops, timeout=_CLOSING_S)
        self._has_closed = not late
        if late:
            _log.info("gRPC still works on connections that are closed; they are not waited for")
        for stop in done:
            stop.result()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    def _build(self) -> tuple[grpc.aio.Server, ...]:
        """The server for everybody, and the one for operators where they have a port of their own."""
        if self._config.admin_port is None:
            return (self._serving(_VISION, _ENGINE),)
        return self._serving(_VISION), self._serving(_ENGINE)

    def _serving(self, *files: Any) -> grpc.aio.Server:
        """A server of the services in `files`, of health and of reflection."""
        server = grpc.aio.server(options=server_options(self._config.max_message_bytes))
        # Health is asked by machines that bear no token and would fill the log.
        check = self._scope(server, OpenAccess(), self._short_gate, MAX_SHORT_CALLS)
        watch = self._scope(server, OpenAccess(), self._short_gate, MAX_WATCHES, open_calls=self._open_watches)
        if _VISION in files:
            scope = self._scope(
                server, self._access, self._request_gate, max_calls(self._engine.info), self._observers()
            )
            vision_service_pb2_grpc.add_VisionServiceServicer_to_server(
                VisionService(self._engine, self._images), scope
            )
        if _ENGINE in files:
            scope = self._scope(server, self._access, self._short_gate, MAX_SHORT_CALLS, self._observers())
            engine_service_pb2_grpc.add_EngineServiceServicer_to_server(
                EngineService(
                    self._engine,
                    instance_id=self.instance_id,
                    max_message_bytes=self._config.max_message_bytes,
                ),
                scope,
            )
        handlers = self._health.handlers()
        check.add_registered_method_handlers(SERVICE_NAME, {"Check": handlers["Check"]})
        watch.add_registered_method_handlers(SERVICE_NAME, {"Watch": handlers["Watch"]})
        reflection = self._config.reflection
        if reflection != "off":
            # With the error details clients that learn the schema by reflection can show what was wrong.
            described = (*files, health_pb2.DESCRIPTOR, error_details_pb2.DESCRIPTOR)
            access = self._access if reflection == "token" else OpenAccess()
            add_reflection(self._scope(server, access, self._short_gate, MAX_SHORT_CALLS), described)
        return server

    def _scope(
        self,
        server: grpc.aio.Server,
        access: Access,
        gate: MessageGate,
        max_calls: int,
        observers: Sequence[Observer] = (),
        open_calls: OpenCalls | None = None,
    ) -> CallScope:
        return CallScope(
            server,
            self._engine,
            access,
            gate,
            Shares(max_calls),
            open_calls or self._open_calls,
            observers,
            stream_idle_timeout_s=self._config.stream_idle_timeout,
        )

    def _observers(self) -> Sequence[Observer]:
        """Who is told of each call that has ended."""
        at_rest = () if self._maintenance is None else (self._maintenance.note,)
        return (*self._telemetry.observers, *at_rest, log_call)

    def _death(self) -> asyncio.Future[None]:
        """Done when the engine dies."""
        loop = asyncio.get_running_loop()
        died: asyncio.Future[None] = loop.create_future()

        def follow(status: EngineStatus) -> None:
            if status is EngineStatus.DEAD and not loop.is_closed():
                loop.call_soon_threadsafe(lambda: died.done() or died.set_result(None))

        self._engine.on_status_change(follow)
        if self._engine.status is EngineStatus.DEAD:
            follow(EngineStatus.DEAD)
        return died


def _access(config: ServerConfig) -> Access:
    return OpenAccess() if config.tokens is None else TokenAccess(Path(config.tokens))


def _images(config: ServerConfig) -> ImageSource:
    if config.image_hosts is None:
        return NoRemoteImages()
    try:
        # Only here, since most servers do without it.
        from kestrel_grpc.images.remote_images import RemoteImages
    except ImportError as error:
        raise RemoteImagesUnavailable("--image-hosts needs `pip install 'kestrel-grpc[remote]'`") from error
    return RemoteImages(config.image_hosts, max_bytes=config.max_image_bytes, timeout_s=config.image_fetch_timeout)


def _credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    if config.tls_certificate is None or config.tls_key is None:
        return None
    client_ca = None if config.tls_client_ca is None else Path(config.tls_client_ca)
    return server_credentials(Path(config.tls_certificate), Path(config.tls_key), client_ca)


def require_usable(config: ServerConfig) -> None:
    """Raise what a `Server` would, as far as it shows before a model is loaded."""
    _access(config)
    _credentials(config)
    _images(config)
    require_free_port(config.host, config.port)
    if config.unix_socket is not None:
        require_free_socket(Path(config.unix_socket))
    for host, port in ((config.admin_host, config.admin_port), (config.metrics_host, config.metrics_port)):
        if port is not None:
            require_free_port(host, port)


class _Signals:
    """Futures for the first and the second request to stop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[signal.Signals] = loop.create_future()
        self.second: asyncio.Future[signal.Signals] = loop.create_future()

    def note(self, number: signal.Signals) -> None:
        """A signal has come."""
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(number)
                return


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    loop = asyncio.get_running_loop()
    signals = _Signals()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.note, number)
    try:
        yield signals
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
