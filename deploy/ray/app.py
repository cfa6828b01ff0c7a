"""A Ray Serve application: each replica holds an engine, and Ray's gRPC proxy passes calls to its servicers.

    serve run deploy/ray/serve.yaml

docs/ray.md describes how to set it up, what the proxy lets through, and what it costs.

Ray calls the method of a replica that has the name of the RPC, with the bytes of the message (`ingress.py`) and a
copy of gRPC's context. The replica runs the call through the admission, the servicers and the table of errors of
the server's own gRPC frontend. Receiving and writing messages is Ray's, and so are ports, processes and scaling.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext

from kestrel_client.v1 import engine_service_pb2, vision_service_pb2
from kestrel_grpc.access.access import OpenAccess, TokenAccess
from kestrel_grpc.adapter_folder import AdapterFolder
from kestrel_grpc.calls.call_admission import CallAdmission
from kestrel_grpc.calls.call_context import REQUEST_ID_KEY, CallContext
from kestrel_grpc.calls.call_groups import CallGroups
from kestrel_grpc.calls.errors import MessageTooLarge, Unsupported
from kestrel_grpc.calls.peers import NoPeers
from kestrel_grpc.calls.submission import Submission
from kestrel_grpc.config.options import ConfigurationError, ServerConfig
from kestrel_grpc.frontends.grpc.adapter_uploads import AdapterUploads
from kestrel_grpc.frontends.grpc.engine_service import EngineService
from kestrel_grpc.frontends.grpc.message_shape import check_shape, shape_of
from kestrel_grpc.frontends.grpc.status import status_code, trailing_metadata
from kestrel_grpc.frontends.grpc.vision_service import VisionService
from kestrel_grpc.images.image_store import CachePurges
from kestrel_grpc.process.resources import SWITCH_INTERVAL_S, freeze_existing_objects
from kestrel_grpc.server import image_source
from kestrel_grpc.telemetry.logs import set_up_logging
from kestrel_grpc.telemetry.telemetry import Telemetry
from kestrel_runtime.api.adapters import AdapterInfo
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.errors import InvalidRequest, Violation
from kestrel_runtime.api.options import options_of
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.engine.warm_up import warm_up

OPTIONS = frozenset(
    (
        *(item.name for _, item in options_of(EngineConfig)),
        "precision",
        "served_model_name",
        "tokens",
        "max_message_bytes",
        "image_hosts",
        "image_fetch_timeout",
        "drain_timeout",
        "log_level",
        "log_format",
        "tracing",
        "trace_content",
    )
)
"""The options of `kestrel-grpc serve` that a replica has: those of the engine, and of the work on a call. The
others are about ports, processes and received messages, which are Ray's."""
READING = ("GetServerInfo", "ListModels", "GetLoad", "ListAdapters")
"""The RPCs of `EngineService` that are answered: they describe the replica that answers, and change none."""

_VISION: Any = vision_service_pb2.DESCRIPTOR.services_by_name["VisionService"]
_ENGINE: Any = engine_service_pb2.DESCRIPTOR.services_by_name["EngineService"]
_MULTIPLEXED = "multiplexed_model_id"
"""The metadata by which Ray selects a replica that has an adapter."""


class Replica:
    """Serves each RPC by the attribute of its name. Belongs to the event loop that Ray gives it."""

    async def __init__(self, options: Mapping[str, str]) -> None:
        """`options`: texts by name, as `configuration` takes them. Returns when the engine takes requests."""
        config = configuration(options)
        set_up_logging(config.log_level, line_format=config.log_format)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._drain_timeout_s = config.drain_timeout
        self._max_message_bytes = config.max_message_bytes
        self._engine = engine = await asyncio.to_thread(LocalEngine.start, config.engine_config())
        await warm_up(engine)
        freeze_existing_objects()
        instance_id = secrets.token_hex(8)
        access = OpenAccess() if config.tokens is None else TokenAccess(Path(config.tokens))
        self._purges = CachePurges(engine)
        access.on_namespace_gone(self._purges.clear)
        self._watch = asyncio.create_task(access.watch())
        self._telemetry = Telemetry(engine, config, instance_id=instance_id)
        self._groups = groups = CallGroups(engine, config, access, self._telemetry.observers)
        self._images = image_source(config)
        submission = Submission(engine, self._images, model_names=config.served_model_name or ())
        self._load_adapter = serve.multiplexed(max_num_models_per_replica=engine.info.config.num_adapter_slots)(
            _loading(engine)
        )
        self._serve(_VISION, VisionService(submission, engine.info.model), groups.inference)
        operations = EngineService(
            engine,
            access,
            groups.inference,
            NoPeers(),
            AdapterUploads(engine, AdapterFolder(None, (), 0), config.receive_timeout),
            instance_id=instance_id,
            max_message_bytes=config.max_message_bytes,
        )
        self._serve(_ENGINE, operations, groups.operations)

    async def check_health(self) -> None:
        """Called by Ray, which replaces a replica of which this fails several times. Raises `RuntimeError`.

        An engine that recovers from a failed step refuses calls for a moment; replacing it would take longer.
        """
        if self._engine.status is EngineStatus.DEAD:
            raise RuntimeError("the engine has stopped")

    async def __del__(self) -> None:
        """Called and awaited by Ray once it sends no further calls: requests that run end, then the engine does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout_s):
                await self._engine.drain()
                await self._groups.ended()
        self._watch.cancel()
        await asyncio.to_thread(self._engine.close)
        await self._images.close()
        await self._telemetry.close()

    def _serve(self, service: Any, servicer: object, admission: CallAdmission) -> None:
        """Add a method for each RPC of a service. Ray passes gRPC's context to a parameter named `grpc_context`."""
        for rpc in service.methods:
            method = f"{service.full_name}/{rpc.name}"
            is_offered = service is _VISION or rpc.name in READING
            function: Any = getattr(servicer, rpc.name) if is_offered else _refuse
            parse = self._parser(GetMessageClass(rpc.input_type))
            wrap = self._streamed if rpc.server_streaming else self._answered
            answer: Any = wrap(method, parse, function, admission, GetMessageClass(rpc.output_type))
            answer.__name__ = rpc.name  # Ray's logs and metrics have it
            setattr(self, rpc.name, answer)

    def _answered(
        self,
        method: str,
        parse: Callable[[bytes], Any],
        function: Callable[[Any, CallContext], Awaitable[Message]],
        admission: CallAdmission,
        response_class: type[Message],
    ) -> Callable[[bytes, RayServegRPCContext], Awaitable[Message]]:
        async def answer(data: bytes, grpc_context: RayServegRPCContext) -> Message:
            call = _begin(method, admission, grpc_context)
            try:
                async with admission.admit(call):
                    message = parse(data)
                    await self._select_adapter(message)
                    response = await function(message, call)
            except BaseException as error:
                await _fail(call, admission, grpc_context, error)
                return response_class()  # gRPC discards it, since the status is not OK
            admission.succeed(call)
            return response

        return answer

    def _streamed(
        self,
        method: str,
        parse: Callable[[bytes], Any],
        function: Callable[[Any, CallContext], AsyncGenerator[Message, None]],
        admission: CallAdmission,
        response_class: type[Message],
    ) -> Callable[[bytes, RayServegRPCContext], AsyncGenerator[Message, None]]:
        async def answer(data: bytes, grpc_context: RayServegRPCContext) -> AsyncGenerator[Message, None]:
            call = _begin(method, admission, grpc_context)
            try:
                async with admission.admit(call):
                    message = parse(data)
                    await self._select_adapter(message)
                    async with aclosing(function(message, call)) as responses:
                        async for response in responses:
                            yield response
            except BaseException as error:
                await _fail(call, admission, grpc_context, error)
            else:
                admission.succeed(call)
                return
            # The proxy takes status and details from what comes with a message only: an exception has no details.
            yield response_class()

        return answer

    def _parser(self, message_class: type[Message]) -> Callable[[bytes], Any]:
        """Parses messages as the gRPC frontend does. Raises `MessageTooLarge` and `InvalidRequest`."""
        shape, limit_bytes = shape_of(message_class.DESCRIPTOR), self._max_message_bytes
        max_image_bytes = self._engine.info.config.max_image_bytes

        def parse(data: bytes) -> Any:
            if len(data) > limit_bytes:
                raise MessageTooLarge(limit_bytes)
            try:
                check_shape(data, shape, max_image_bytes)
                return message_class.FromString(data)
            except DecodeError:
                raise InvalidRequest((Violation("", "the message cannot be parsed"),)) from None

        return parse

    async def _select_adapter(self, message: Any) -> None:
        """Have the request use the adapter that its metadata names. Raises what loading it raises.

        Ray counts an adapter that was loaded here as one of this replica. The engine loads it again if it had to
        give up its slot.
        """
        name = serve.get_multiplexed_model_id()
        if not name or message.DESCRIPTOR.file.name != _VISION.file.name:
            return
        if message.options.adapter not in ("", name):
            raise InvalidRequest((Violation("options.adapter", f"differs from the metadata {_MULTIPLEXED}"),))
        await self._load_adapter(name)
        message.options.adapter = name


def configuration(options: Mapping[str, str]) -> ServerConfig:
    """The options of a replica by name, such as `{"model": "moondream2"}`. Raises `ConfigurationError`.

    Variables of the environment are not read: replicas would differ where those of their nodes do.
    """
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise ConfigurationError(tuple(f"{name}: is no option of a replica" for name in unknown))
    return ServerConfig.parse(options, {})


Kestrel = serve.deployment(
    name="Kestrel",
    # Requests that run or wait in one replica. Further ones wait in the proxies.
    max_ongoing_requests=128,
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 48},
    health_check_period_s=5,
    # Longer than --drain-timeout: Ray first waits for its own calls, then for the drain.
    graceful_shutdown_timeout_s=60,
    graceful_shutdown_wait_loop_s=1,
)(Replica)
"""The deployment. `Kestrel.options(…)` changes its settings, as the deployments of a Serve config file do."""


def build(args: dict[str, Any]) -> serve.Application:
    """The application for `serve run` and for a Serve config file.

    `args` has the options of a replica (`OPTIONS`), and `num_gpus`: GPUs of each replica, 1 by default and 0 with
    `device: cpu`. Raises `ConfigurationError`.
    """
    options = {name: _text(value) for name, value in args.items() if name != "num_gpus"}
    configuration(options)
    num_gpus = float(args.get("num_gpus", 0 if options.get("device") == "cpu" else 1))
    return Kestrel.options(ray_actor_options={"num_gpus": num_gpus}).bind(options)


def _text(value: object) -> str:
    """A value of YAML as an option takes it."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _loading(engine: LocalEngine) -> Callable[[str], Awaitable[AdapterInfo]]:
    async def load(name: str) -> AdapterInfo:
        return await engine.load_adapter(name)

    return load


async def _refuse(message: Any, call: CallContext) -> Message:
    raise Unsupported("calls that change a server would reach one replica only")


def _begin(method: str, admission: CallAdmission, context: RayServegRPCContext) -> CallContext:
    """A call has arrived. Ray does not pass on its deadline: the proxy cancels it when that has passed."""
    call = admission.begin(context.invocation_metadata(), None, method, context.peer)
    context.set_trailing_metadata([(REQUEST_ID_KEY, call.request_id)])
    return call


async def _fail(
    call: CallContext, admission: CallAdmission, context: RayServegRPCContext, error: BaseException
) -> None:
    """End a call with the status and the details of an error. Raises the error if the caller needs no answer."""
    failure = admission.fail(call, error)
    await admission.hold(call, error)
    if failure is None:
        raise error
    context.set_code(status_code(failure))
    context.set_details(failure.message)
    metadata: list[Any] = list(trailing_metadata(failure, call.request_id))
    context.set_trailing_metadata(metadata)
