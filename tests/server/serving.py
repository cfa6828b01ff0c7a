"""A true server over a fake engine, and the stubs to ask it, for the length of a `with`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_status import rpc_status

from kestrel_client.v1 import media_pb2
from kestrel_client.v1.engine_service_pb2_grpc import EngineServiceStub
from kestrel_client.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from tests.fakes import FakeEngine
from tests.over_sockets import as_chosen

EOF: Any = vars(grpc.aio)["EOF"]
"""What `read` returns at the end of a stream; the type stubs do not list it."""
IMAGE = media_pb2.Image(data=b"an encoded image")


@dataclass(frozen=True)
class Serving:
    server: Server
    engine: FakeEngine
    channel: grpc.aio.Channel

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def vision(self) -> Any:
        return VisionServiceStub(self.channel)

    @property
    def images(self) -> Any:
        return ImageServiceStub(self.channel)

    @property
    def engine_service(self) -> Any:
        return EngineServiceStub(self.channel)

    @property
    def health(self) -> Any:
        return HealthStub(self.channel)


def open_channel(server: Server) -> grpc.aio.Channel:
    """A connection of its own.

    Its window does not grow: on a busy machine it would hold all that a reader does not take, and no write would
    wait.
    """
    options = (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", -1),
        ("grpc.http2.bdp_probe", 0),
    )
    return grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options)


@asynccontextmanager
async def serving(engine: FakeEngine | None = None, **options: Any) -> AsyncIterator[Serving]:
    engine = engine or FakeEngine()
    async with (
        as_chosen(engine) as asked,
        Server(asked, ServerConfig(port=0, **options)) as server,
        open_channel(server) as channel,
    ):
        yield Serving(server, engine, channel)


def server_deadline(milliseconds: int) -> tuple[tuple[str, str], ...]:
    """Metadata that sets a deadline as `timeout` does, but for the server alone.

    The caller's own clock could run out before the call arrives.
    """
    return (("grpc-timeout", f"{milliseconds}m"),)


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Message]:
    """The details of a failed call, by the name of their message."""
    call: Any = error
    status: status_pb2.Status | None = rpc_status.from_call(call)
    assert status is not None, f"{error.code()} has no details"
    found: dict[str, Message] = {}
    for packed in status.details:
        name = packed.TypeName().removeprefix("google.rpc.")
        found[name] = getattr(error_details_pb2, name).FromString(packed.value)
    return found


def reason_of(error: grpc.aio.AioRpcError) -> str:
    info: Any = details_of(error)["ErrorInfo"]
    assert info.domain == "kestrel.dev"
    return info.reason
