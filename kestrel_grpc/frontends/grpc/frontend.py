"""Sets up the gRPC frontend: its servers, their services, their ports and their connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2

from kestrel_client.v1 import (
    engine_service_pb2,
    engine_service_pb2_grpc,
    image_service_pb2,
    image_service_pb2_grpc,
    vision_service_pb2,
    vision_service_pb2_grpc,
)
from kestrel_grpc.access.access import Access
from kestrel_grpc.access.tls import CertificateFiles
from kestrel_grpc.adapter_folder import AdapterFolder
from kestrel_grpc.calls.call_admission import CallAdmission
from kestrel_grpc.calls.call_groups import CallGroups
from kestrel_grpc.calls.errors import CallFailure
from kestrel_grpc.calls.peers import Peers
from kestrel_grpc.calls.readiness import Readiness
from kestrel_grpc.calls.submission import Submission
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.frontends.grpc.adapter_uploads import AdapterUploads
from kestrel_grpc.frontends.grpc.connections import Connections
from kestrel_grpc.frontends.grpc.engine_service import EngineService
from kestrel_grpc.frontends.grpc.frame_streams import FRAME_METHODS, FrameStreams
from kestrel_grpc.frontends.grpc.health import Health
from kestrel_grpc.frontends.grpc.image_service import ImageService
from kestrel_grpc.frontends.grpc.load_reports import LoadReports
from kestrel_grpc.frontends.grpc.method_handlers import AdmittedServices, FailureTranslator
from kestrel_grpc.frontends.grpc.ports import open_port, open_unix_socket, server_options
from kestrel_grpc.frontends.grpc.reflection import add_reflection
from kestrel_grpc.frontends.grpc.vision_service import VisionService
from kestrel_grpc.images.image_store import ImageStore
from kestrel_runtime.api.engine import Engine
from kestrel_runtime.api.requests import Chat, Detect, Point, Segment

_VISION: Any = vision_service_pb2.DESCRIPTOR
_IMAGES: Any = image_service_pb2.DESCRIPTOR
_ENGINE: Any = engine_service_pb2.DESCRIPTOR
# After a flood of calls, gRPC may work for seconds on their remains. It offers no way to stop that work.
_CLOSING_S = 1.0

_log = logging.getLogger(__name__)


class ForeignService(Protocol):
    """Describes a service that another frontend adds to the gRPC servers, with a contract of others."""

    name: str
    """The full name, as `package.Service`."""
    file: Any
    """The descriptor of the file that defines the service."""

    def handlers(self, groups: CallGroups) -> Iterable[tuple[CallAdmission, Mapping[str, grpc.RpcMethodHandler]]]:
        """Returns groups of methods by name, each with its admission. Methods take a `CallContext`, not gRPC's
        context."""
        ...

    def translate_failure(self, failure: CallFailure) -> CallFailure:
        """Returns the failure in the form that clients of this service expect."""
        ...


class GrpcFrontend:
    """Serves `VisionService`, `ImageService`, `EngineService`, health and reflection, and the services `foreign`.

    Belongs to the event loop of its calls. Without a `store` there is no `ImageService`.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        access: Access,
        groups: CallGroups,
        peers: Peers,
        readiness: Readiness,
        submission: Submission,
        store: ImageStore | None,
        certificate: CertificateFiles | None,
        foreign: Sequence[ForeignService] = (),
        *,
        instance_id: str,
        num_processors: float,
        shares_ports: bool = False,
    ) -> None:
        """If `shares_ports` is True, other processes of this server listen on the same ports. `num_processors` is
        the processor time that this process may use, in seconds per second."""
        self.port: int | None = None
        """The port of gRPC; None before `start`."""
        self.triton_port: int | None = None
        """The second port for the same services; None if there is none, and before `start`."""
        self.admin_port: int | None = None
        """The port for operators; None if there is none, and before `start`."""
        self.has_closed = False
        """True once gRPC has ended every connection; `close` may return first."""
        self._config = config
        self._shares_ports = shares_ports
        self._groups = groups
        self._certificate = certificate
        self._load_reports = LoadReports(engine, num_processors) if config.load_reports else None
        self._vision = VisionService(submission, engine.info.model)
        self._frames = FrameStreams(
            engine,
            submission,
            groups.inference,
            groups.frames_seen,
            engine.info.model,
            max_streams=config.max_frame_streams,
            max_age_s=config.max_frame_stream_age,
            max_waiting_bytes=config.max_receiving_bytes,
        )
        self._vision.add({name: getattr(self._frames, name) for name in FRAME_METHODS})
        has_objects = engine.info.skills.keys() & {Point.skill, Detect.skill}
        self._images = None if store is None else ImageService(engine, store)
        served = engine.info.config
        self._adapter_folder = AdapterFolder(served.adapters, served.adapter_repositories, config.max_adapter_bytes)
        self._operations = EngineService(
            engine,
            access,
            groups.inference,
            groups.cancel,
            groups.usage,
            peers,
            AdapterUploads(engine, self._adapter_folder, config.receive_timeout),
            instance_id=instance_id,
            max_message_bytes=config.max_message_bytes,
            capabilities=[
                *(("chat",) if Chat.skill in engine.info.skills else ()),
                *(() if store is None else ("images",)),
                *(("objects", "scores") if has_objects else ()),
                *(("masks",) if Segment.skill in engine.info.skills else ()),
                *(("frames",) if has_objects and config.max_frame_streams else ()),
            ],
        )
        public = (_VISION,) if store is None else (_VISION, _IMAGES)
        self._foreign = foreign
        names = [service.full_name for file in (*public, _ENGINE) for service in file.services_by_name.values()]
        self._health = Health(readiness, (*names, *(service.name for service in foreign)))
        self._connections = Connections(config.stream_idle_timeout, groups.busy_ports)
        self._servers = (
            (self._server(*public, _ENGINE),)
            if config.admin_port is None
            else (self._server(*public), self._server(_ENGINE))
        )
        self._watch: asyncio.Task[None] | None = None
        self._cleaning: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens and serves. Raises `PortUnavailable`."""
        config = self._config
        public, operators = self._servers[0], self._servers[-1]
        open_one = partial(open_port, is_shared=self._shares_ports)
        self.port = open_one(public, config.host, config.port, self._certificate)
        if config.triton_port is not None:
            self.triton_port = open_one(public, config.host, config.triton_port, self._certificate)
        if config.unix_socket is not None:
            open_unix_socket(public, Path(config.unix_socket))
        if config.admin_port is not None:
            self.admin_port = open_one(operators, config.admin_host, config.admin_port)
        for server in self._servers:
            await server.start()
        ports = [port for port in (self.port, self.triton_port, self.admin_port) if port is not None]
        self._connections.open(ports, () if config.unix_socket is None else (config.unix_socket,))
        self._watch = asyncio.create_task(self._connections.watch_descriptors())
        # Not waited for: the folder may be on a mount that does not answer.
        self._cleaning = asyncio.create_task(asyncio.to_thread(self._adapter_folder.remove_left_behind))

    async def close(self) -> None:
        """Accepts no further connection or call, and cancels calls that still run. May be repeated."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._end_connections())
        # The closing continues if the caller's time runs out.
        await asyncio.shield(self._closing)

    async def _end_connections(self) -> None:
        self._connections.close_all()
        # Waited for and not cancelled: gRPC fails after a cancelled `stop`.
        stops = [asyncio.create_task(server.stop(None)) for server in self._servers]
        done, late = await asyncio.wait(stops, timeout=_CLOSING_S)
        self.has_closed = not late
        if late:
            _log.info("gRPC still works on closed connections; the server does not wait for them")
        if self._watch is not None:
            self._watch.cancel()
        self._connections.release()
        for stop in done:
            stop.result()

    def _server(self, *files: Any) -> grpc.aio.Server:
        """Makes a server of the services in `files`, of health and of reflection.

        The server of `VisionService` has the foreign services, too.
        """
        options = server_options(self._config.max_message_bytes, shares_ports=self._shares_ports)
        server, groups = grpc.aio.server(options=options), self._groups

        def with_admission(
            admission: CallAdmission,
            translate: FailureTranslator | None = None,
            takes: Callable[[str], bool] = lambda method: True,
        ) -> AdmittedServices:
            reports = self._load_reports if admission is groups.inference else None
            return AdmittedServices(
                server,
                admission,
                self._connections,
                self._config.max_message_bytes,
                translate,
                reports,
                takes,
                parses=admission is not groups.frames,
            )

        if _VISION in files:
            for admission in (groups.inference, groups.frames):
                takes = partial(_is_of_frames, expected=admission is groups.frames)
                vision_service_pb2_grpc.add_VisionServiceServicer_to_server(
                    self._vision, with_admission(admission, takes=takes)
                )
            for service in self._foreign:
                for admission, handlers in service.handlers(groups):
                    wrapping = with_admission(admission, service.translate_failure)
                    wrapping.add_registered_method_handlers(service.name, handlers)
                files = (*files, service.file)
        if _IMAGES in files:
            image_service_pb2_grpc.add_ImageServiceServicer_to_server(self._images, with_admission(groups.images))
        if _ENGINE in files:
            for admission in (groups.operations, groups.uploads):
                takes = partial(_has_group, is_upload=admission is groups.uploads)
                engine_service_pb2_grpc.add_EngineServiceServicer_to_server(
                    self._operations, with_admission(admission, takes=takes)
                )
        self._health.add_to(with_admission(groups.health_checks()), with_admission(groups.health_watches()))
        reflection = self._config.reflection
        if reflection != "off":
            # With the error details, clients that learn the schema by reflection can show what was wrong.
            described = (*files, health_pb2.DESCRIPTOR, error_details_pb2.DESCRIPTOR)
            add_reflection(with_admission(groups.unrecorded(needs_token=reflection == "token")), described)
        return server


def _is_of_frames(method: str, *, expected: bool) -> bool:
    """Returns True if a method of `VisionService` is one of frames, or with `expected` False if it is another."""
    return (method in FRAME_METHODS) is expected


def _has_group(method: str, *, is_upload: bool) -> bool:
    """Returns True if a method of `EngineService` is one of uploads, or with `is_upload` False if it is another."""
    return (method == "UploadAdapter") is is_upload
