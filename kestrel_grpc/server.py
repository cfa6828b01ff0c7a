"""Runs the lifecycle of the server: bind, serve, drain, stop. Connects engine, frontends and telemetry."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kestrel_grpc.access.tls import CertificateFiles
from kestrel_grpc.calls.call_admission import Observer
from kestrel_grpc.calls.call_groups import CallGroups
from kestrel_grpc.calls.readiness import Readiness, death_of
from kestrel_grpc.calls.submission import Submission
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.frontends.grpc.frontend import GrpcFrontend
from kestrel_grpc.frontends.http.probes import ProbePort, Probes
from kestrel_grpc.images.image_store import CachePurges, ImageIntake, ImageStore
from kestrel_grpc.images.image_uris import ImageSource
from kestrel_grpc.maintenance import Maintenance
from kestrel_grpc.process.free_ports import address_of
from kestrel_grpc.process.signals import stop_signals
from kestrel_grpc.requirements import access_of, certificate_of, image_source
from kestrel_grpc.shared_state import OwnState, SharedState
from kestrel_grpc.telemetry.logs import announce, log_end
from kestrel_grpc.telemetry.telemetry import Telemetry
from kestrel_runtime.api.engine import Engine, EngineStatus

if TYPE_CHECKING:
    from kestrel_grpc.frontends.http.frontend import HttpFrontend
    from kestrel_grpc.frontends.triton.service import TritonService
    from kestrel_grpc.frontends.web_ui.web_ui import WebUi

# After a request has ended, its last message may still be on its way to the client.
_LAST_MESSAGES_S = 2.0

_log = logging.getLogger(__name__)


class Server:
    """Serves an engine that has been started. `stop` closes the engine too.

    `async with` starts and stops it, as tests do; `serve` runs until a signal, as the command does. Belongs to the
    event loop that it was made on. `images` fetches images that requests name by a URI; by default the
    configuration decides. `at_rest` runs in a thread of its own while no call runs. `shared` is the state that all
    processes of the server share; by default this process is the whole server. `num_processors` is the processor
    time that this process may use, in seconds per second; by default that of the machine. Raises `TokenFileError`
    or `CertificateError` if their files cannot be used.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        *,
        images: ImageSource | None = None,
        at_rest: Callable[[], object] | None = None,
        shared: SharedState | None = None,
        num_processors: float | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._readiness = Readiness(engine)
        self._purges = CachePurges(engine)
        self._shared: SharedState = shared or OwnState(config.store_limits(), self._purges.forget_image)
        self.instance_id = self._shared.instance_id
        self._access = access_of(config, self._shared.limits)
        self._access.on_namespace_gone(self._purges.clear)
        self._store: ImageStore | None = None
        if config.max_stored_image_bytes:
            self._store = self._shared.images
            self._access.on_namespace_gone(self._store.drop_namespace)
        self._telemetry = Telemetry(
            engine,
            config,
            self._shared.image_load,
            lambda: self._groups.usage.by_caller,
            lambda: self._groups.frames_seen,
            instance_id=self.instance_id,
            reads_engine=self._shared.is_whole_server,
        )
        self._probes = Probes(
            lambda: engine.status is not EngineStatus.DEAD, lambda: self._readiness.is_ready, self._scrape
        )
        has_probe_port = config.metrics_port is not None and self._shared.is_whole_server
        self._probe_port = ProbePort(self._probes, config.metrics_names) if has_probe_port else None
        self._maintenance = None if at_rest is None else Maintenance(engine, at_rest)
        self._images = images or image_source(config)
        self._submission = Submission(engine, self._images, self._store, model_names=config.served_model_name or ())
        self._triton = self._triton_service() if config.triton else None
        self._groups = CallGroups(engine, config, self._access, self._observers())
        self._certificate = certificate = certificate_of(config)
        self._frontend = GrpcFrontend(
            engine,
            config,
            self._access,
            self._groups,
            self._shared.peers,
            self._readiness,
            self._submission,
            self._store,
            certificate,
            () if self._triton is None else (self._triton,),
            instance_id=self.instance_id,
            num_processors=num_processors or os.cpu_count() or 1,
            shares_ports=not self._shared.is_whole_server,
        )
        self._http = None if config.http_port is None else self._http_frontend(certificate)
        self._watches: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int | None:
        """The port of gRPC; None before `start`."""
        return self._frontend.port

    @property
    def triton_port(self) -> int | None:
        """The second port of gRPC; None if there is none, and before `start`."""
        return self._frontend.triton_port

    @property
    def admin_port(self) -> int | None:
        """The port for operators; None if there is none, and before `start`."""
        return self._frontend.admin_port

    @property
    def http_port(self) -> int | None:
        """The port of the HTTP frontends; None if there is none, and before `start`."""
        return None if self._http is None else self._http.port

    @property
    def metrics_port(self) -> int | None:
        """The port of metrics and probes; None if there is none, and before `start`."""
        return None if self._probe_port is None else self._probe_port.port

    @property
    def has_closed(self) -> bool:
        """True once every connection has ended; `stop` may return first."""
        return self._frontend.has_closed

    async def start(self) -> None:
        """Listens on all ports. Raises `PortUnavailable`."""
        config = self._config
        self._shared.peers.take_part()
        await self._frontend.start()
        if self._http is not None:
            await self._http.start()
        for followed in (self._access, self._certificate, self._shared):
            if followed is not None:
                self._watches.append(asyncio.create_task(followed.watch()))
        if self._probe_port is not None:
            await self._probe_port.start(config.metrics_host, config.metrics_port or 0)
            address = address_of(config.metrics_host, self.metrics_port or 0)
            _log.info("metrics and probes on http://%s", address)
        if self._shared.is_whole_server:
            self.announce()

    def announce(self) -> None:
        """Prints the model and the addresses, for people and programs that wait for the server."""
        config, info = self._config, self._engine.info
        address = address_of(config.host, self.port or 0)
        announce(f"kestrel-grpc serves {info.model} on {address} ({info.device}, {info.dtype})")
        if self.triton_port is not None:
            _log.info("gRPC is served on %s as well", address_of(config.host, self.triton_port))
        if config.unix_socket is not None:
            _log.info("listening on the socket %s", config.unix_socket)
        if self.http_port is not None:
            announce(f"HTTP is served on {address_of(config.host, self.http_port)}")
        if self.admin_port is not None:
            _log.info("operators are served on %s", address_of(config.admin_host, self.admin_port))

    def metrics_text(self) -> bytes:
        """Returns the metrics of this process as Prometheus text. May be called from any thread."""
        return self._telemetry.metrics_text()

    async def serve(self) -> bool:
        """Starts, runs until a signal or the engine's death, then shuts down. A second signal stops at once.

        Returns True after a signal, and False if the engine died, even while the server drained.
        """
        began, end = time.monotonic(), "the engine has failed"
        with stop_signals(self.read_again) as signals:
            died = death_of(self._engine)
            await self.start()
            await asyncio.wait((signals.first, died), return_when=asyncio.FIRST_COMPLETED)
            if signals.first.done():
                end = f"{signals.first.result().name}, and all calls have ended"
                # Other signals are sent by a terminal: there no load balancer needs time to react.
                delay_s = self._config.withdrawal_delay if signals.first.result() is signal.SIGTERM else 0.0
                leaving = asyncio.ensure_future(self._leave(died, delay_s))
                await asyncio.wait((leaving, signals.second), return_when=asyncio.FIRST_COMPLETED)
                if not leaving.done():
                    _log.warning("stopping at once")
                    leaving.cancel()
                    end = f"{signals.second.result().name} while calls were ending"
                elif not leaving.result():
                    end = f"{signals.first.result().name}, and calls that still ran were ended"
            is_alive = not died.done()  # `stop` closes the engine, which then is dead too
            await self.stop()
        if self._shared.is_whole_server:
            log_end(end if is_alive else "the engine has failed", began=began)
        return is_alive

    def read_again(self) -> None:
        """Reads tokens and certificates again, within a second; if files are wrong, the former content stays in
        force."""
        _log.info("tokens and certificates are read again")
        self._access.read_again()
        if self._certificate is not None:
            self._certificate.read_again()

    def withdraw(self) -> None:
        """Begins the lame-duck period: health reports NOT_SERVING, but calls are still accepted."""
        self._readiness.refuse()

    async def drain(self) -> bool:
        """Refuses new requests, and returns when every call has ended or the drain timeout has passed.

        Returns False if calls still run.
        """
        timeout_s = self._config.drain_timeout
        _log.info("draining, for at most %g s", timeout_s)
        self.withdraw()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                draining = asyncio.ensure_future(self._engine.drain())
                # Calls whose message has not arrived yet would be refused once it has arrived.
                self._groups.close()
                await draining
                # Messages of finished requests may still be on their way to a slow reader.
                self._readiness.close()
                await self._groups.ended()
                await self._close_frontends()
                return True
        _log.warning("the drain timeout has passed; calls that still run are ended")
        return False

    async def stop(self) -> None:
        """Closes the engine and all ports. Requests that still run fail with UNAVAILABLE."""
        self._readiness.close()
        await asyncio.to_thread(self._engine.close)
        self._groups.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_MESSAGES_S):
                await self._groups.ended()
        await self._close_frontends()
        await self._images.close()
        if self._triton is not None:
            self._triton.close()
        for watch in self._watches:
            watch.cancel()
        if self._maintenance is not None:
            self._maintenance.close()
        if self._probe_port is not None:
            await self._probe_port.close()
        await self._telemetry.close()

    async def _leave(self, died: asyncio.Future[None], delay_s: float) -> bool:
        """Runs the lame-duck period of `delay_s` seconds, which ends early if the engine dies, and drains. Returns
        as `drain`."""
        _log.info("withdrawing: calls are taken for another %g s", delay_s)
        self.withdraw()
        await asyncio.wait((died,), timeout=delay_s)
        return await self.drain()

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

    async def _scrape(self) -> bytes:
        return await self._shared.metrics(self.metrics_text)

    async def _close_frontends(self) -> None:
        await asyncio.gather(self._frontend.close(), *(() if self._http is None else (self._http.close(),)))

    # Frontends that few servers have are imported when they are made: they are a third of the imports, and 13 MB.

    def _triton_service(self) -> TritonService:
        from kestrel_grpc.frontends.triton.service import TritonService
        from kestrel_grpc.frontends.triton.shared_memory import SharedMemory

        config, info = self._config, self._engine.info
        memory = SharedMemory(
            config.triton_shared_memory,
            info.config.max_image_bytes,
            None if config.tokens is None else self._access.namespaces,
        )
        return TritonService(self._submission, self._readiness, memory, self._shared.peers, info.model)

    def _http_frontend(self, certificate: CertificateFiles | None) -> HttpFrontend:
        from kestrel_grpc.frontends.http.frontend import HttpFrontend
        from kestrel_grpc.frontends.openai.service import OpenAiService
        from kestrel_grpc.frontends.rest.server_route import ServerRoute
        from kestrel_grpc.frontends.rest.service import RestService

        info = self._engine.info
        submission, names = self._submission, self._config.served_model_name or ()
        intake = None if self._store is None else ImageIntake(self._engine, self._store)
        max_image_bytes = info.config.max_image_bytes
        # With an admin port, EngineService is there alone.
        has_description = self._config.admin_port is None
        server = ServerRoute(self._engine, self._shared.peers.num_frontends) if has_description else None
        services = (
            RestService(submission, info.model, intake, server, max_image_bytes=max_image_bytes),
            OpenAiService(submission, self._engine, model_names=names, max_image_bytes=max_image_bytes),
        )
        return HttpFrontend(
            self._engine,
            self._config,
            self._groups,
            services,
            certificate,
            self._probes,
            self._web_ui() if self._config.page else None,
            shares_port=not self._shared.is_whole_server,
        )

    def _web_ui(self) -> WebUi:
        from kestrel_grpc.frontends.web_ui.web_ui import WebUi

        config = self._config
        return WebUi(
            self._engine,
            grpc_port=lambda: self._frontend.port,
            is_encrypted=config.tls_certificate is not None,
            asks_for_tokens=config.tokens is not None,
            stores_images=self._store is not None,
            fetches_images=config.image_hosts is not None,
        )

    def _observers(self) -> Sequence[Observer]:
        at_rest = () if self._maintenance is None else (self._maintenance.note,)
        return (*self._telemetry.observers, *at_rest)
