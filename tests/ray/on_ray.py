"""Two replicas of the application on a cluster of this machine: calls, errors, adapters, updates, health, drain.

`python -m tests.ray` runs it; it is no `test_…` file, since it needs Ray.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

# Ray is installed in an environment of its own.
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.schema import ServeDeploySchema

from bench.harness.ray_cluster import (
    DEPLOYMENT,
    OPTIONS,
    SERVICERS,
    cluster,
    deploy,
    handle,
    num_running,
    wait_until,
)
from deploy.ray.app import OPTIONS as REPLICA_OPTIONS
from deploy.ray.app import Replica, build
from kestrel_client import AdapterNotFound, AsyncClient, Client, InvalidRequest, KestrelClientError, ModelNotFound
from kestrel_client.v1 import generation_pb2, media_pb2, vision_service_pb2
from kestrel_client.v1.engine_service_pb2 import GetServerInfoRequest
from kestrel_client.v1.engine_service_pb2_grpc import EngineServiceStub
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.config.options import ConfigurationError
from tests.ray.probed import LOG, PROBED, calls_in
from tests.reference_fixtures import CHECKOUT
from tests.server.serving import details_of, reason_of

PICTURE = (CHECKOUT / "kestrel_grpc" / "demo_picture.png").read_bytes()
QUESTION = "What color is the star?"
TWO: dict[str, Any] = {"autoscaling_config": {"min_replicas": 2, "max_replicas": 2}}
LONG: dict[str, Any] = {"temperature": 5.0, "max_tokens": 3000, "logit_bias": {0: -100.0}}
"""With these the answer has so many tokens, whatever is drawn: the token that ends it cannot be."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    file = tmp_path_factory.mktemp("ray") / "calls.log"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(LOG, str(file))
        yield file


@pytest.fixture(scope="module")
def address(log: Path) -> Iterator[str]:
    with cluster() as address:
        deploy(PROBED, **TWO)
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    """Sends every call once: what is sent again, Ray sends."""
    with Client(address, max_retries=0, max_retry_s=0, timeout_s=600) as client:
        yield client


@pytest.fixture
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as channel:
        yield channel


def instance(address: str) -> str:
    """The replica that answers a call."""
    with grpc.insecure_channel(address) as channel:
        return EngineServiceStub(channel).GetServerInfo(GetServerInfoRequest(), timeout=600).instance_id


def instances(address: str, count: int = 2) -> set[str]:
    """So many different replicas, found by asking."""
    found: set[str] = set()

    def all_seen() -> bool:
        found.add(instance(address))
        return len(found) >= count

    wait_until(all_seen)
    return found


def test_two_replicas_answer(address):
    assert num_running() == 2
    assert len(instances(address)) == 2


def test_answers_come_as_a_stream_and_at_once(client):
    pieces = list(client.query(PICTURE, QUESTION, temperature=0))
    assert "".join(pieces).strip() == "yellow"
    assert client.complete_query(PICTURE, QUESTION, temperature=0).answer.strip() == "yellow"
    streamed = client.caption(PICTURE, length="short", temperature=0)
    assert len(list(streamed)) > 1
    assert streamed.result().caption


def test_objects_are_found(client):
    assert client.detect(PICTURE, "star").objects
    assert client.point(PICTURE, "star").points
    assert client.segment(PICTURE, "star").segments


def test_what_is_served_is_listed(client):
    assert [model.name for model in client.list_models()] == [client.server_info().model]


def test_a_request_that_breaks_rules_is_told_all_of_them(client):
    with pytest.raises(InvalidRequest) as error:
        client.detect(PICTURE, "", temperature=-1)
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert {violation.field for violation in error.value.violations} == {"object", "sampling.temperature"}


def test_an_error_has_its_status_and_details(client):
    with pytest.raises(ModelNotFound) as error:
        client.detect(PICTURE, "star", model="other")
    assert (error.value.code, error.value.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert error.value.metadata["requestId"]


def test_an_error_of_a_stream_has_its_status_and_details(client):
    with pytest.raises(ModelNotFound) as error:
        list(client.query(PICTURE, QUESTION, model="other"))
    assert (error.value.code, error.value.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


def test_a_message_of_many_megabytes_reaches_a_replica(client):
    with pytest.raises(InvalidRequest) as error:
        client.complete_query(bytes(8 * 2**20), QUESTION)
    assert error.value.reason == "IMAGE_DECODE_FAILED"


def test_the_services_are_found_by_reflection(channel):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub: Any = ServerReflectionStub(channel)
    (response,) = stub.ServerReflectionInfo(iter((request,)), timeout=600)
    names = {service.name for service in response.list_services_response.service}
    assert names >= {"kestrel.v1.VisionService", "kestrel.v1.EngineService"}


def test_a_call_that_would_change_one_replica_is_refused(client):
    with pytest.raises(KestrelClientError) as error:
        client.clear_cache()
    assert (error.value.code, error.value.reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED")


def query_with(channel: grpc.Channel, adapter: str, options: generation_pb2.RequestOptions | None = None) -> str:
    """The answer about the star with an adapter that metadata name."""
    request = vision_service_pb2.CompleteQueryRequest(
        question=QUESTION, image=media_pb2.Image(data=PICTURE), options=options
    )
    request.sampling.temperature = 0
    metadata = (("multiplexed_model_id", adapter),)
    response = VisionServiceStub(channel).CompleteQuery(request, metadata=metadata, timeout=600)
    return response.result.answer.strip()


def test_metadata_select_an_adapter(channel, client):
    assert query_with(channel, "gold") == "gold"
    assert client.complete_query(PICTURE, QUESTION, temperature=0, adapter="gold").answer.strip() == "gold"
    assert client.complete_query(PICTURE, QUESTION, temperature=0).answer.strip() == "yellow"


def test_an_adapter_that_nobody_has_is_refused_with_its_name(channel, client):
    with pytest.raises(grpc.RpcError) as error:
        query_with(channel, "silver")
    failed: Any = error.value
    assert (failed.code(), reason_of(failed)) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")
    missing: Any = details_of(failed)["ResourceInfo"]
    assert (missing.resource_type, missing.resource_name) == ("adapter", "silver")
    with pytest.raises(AdapterNotFound):
        client.complete_query(PICTURE, QUESTION, adapter="silver")


def test_metadata_and_message_name_the_same_adapter(channel):
    with pytest.raises(grpc.RpcError) as error:
        query_with(channel, "gold", generation_pb2.RequestOptions(adapter="silver"))
    failed: Any = error.value
    violations: Any = details_of(failed)["BadRequest"]
    assert [item.field for item in violations.field_violations] == ["options.adapter"]
    assert query_with(channel, "gold", generation_pb2.RequestOptions(adapter="gold")) == "gold"


async def test_a_cancelled_stream_ends_in_the_replica(address, log):
    async with AsyncClient(address, max_retries=0, timeout_s=600) as client:
        stream = client.query(None, "hello", request_id="hung-up", **LONG)
        await anext(aiter(stream))
        stream.cancel()
    wait_until(lambda: calls_in(log, "hung-up"))
    (line,) = calls_in(log, "hung-up")
    assert "outcome=CANCELLED" in line


def test_a_replica_whose_engine_has_stopped_is_replaced(address, client):
    before = instances(address)
    handle().stop_engine.remote().result()
    wait_until(lambda: instances(address) & before != before and num_running() == 2)
    assert client.complete_query(PICTURE, QUESTION, temperature=0).answer.strip() == "yellow"


def test_an_update_under_load_loses_no_call(address):
    before = instances(address)
    ended = threading.Event()
    outcomes: Counter[str] = Counter()

    async def call_until_ended(number: int) -> None:
        async with AsyncClient(address, max_retries=0, max_retry_s=0, timeout_s=600) as client:
            while not ended.is_set():
                try:
                    if number % 2:
                        answer = (await client.complete_query(PICTURE, QUESTION, temperature=0)).answer
                    else:
                        answer = "".join([piece async for piece in client.query(PICTURE, QUESTION, temperature=0)])
                    outcomes[answer.strip()] += 1
                except KestrelClientError as error:
                    outcomes[f"{error.code.name}: {error.message}"] += 1

    async def call_all() -> None:
        await asyncio.gather(*(call_until_ended(number) for number in range(4)))

    callers = threading.Thread(target=asyncio.run, args=(call_all(),))
    callers.start()
    try:
        wait_until(lambda: outcomes.total() > 10)
        deploy(PROBED, {**OPTIONS, "max_batch_size": "8"}, **TWO)
        num_before = outcomes.total()
        wait_until(lambda: outcomes.total() > num_before + 10)
    finally:
        ended.set()
        callers.join()
    assert set(outcomes) == {"yellow"}
    assert not instances(address) & before


class GrpcContext:
    """As much of gRPC's context as Ray copies."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def __getattr__(self, name: str) -> Any:
        return lambda: {} if name == "auth_context" else ()


@pytest.fixture
async def replica() -> AsyncIterator[Any]:
    """A replica in this process, without Ray around it."""
    replica: Any = Replica.__new__(Replica)
    await replica.__init__({"device": "cpu", "log_level": "warning", "drain_timeout": "600"})
    yield replica
    await replica.__del__()


async def test_a_replica_finishes_its_calls_before_it_ends(replica):
    await replica.check_health()
    request = vision_service_pb2.QueryRequest(question="hello")
    no_end = generation_pb2.LogitBias(token_id=0, bias=-100.0)
    request.sampling.MergeFrom(generation_pb2.SamplingParams(temperature=5.0, max_tokens=50, logit_bias=[no_end]))
    has_started = asyncio.Event()

    async def call() -> Any:
        responses: list[Any] = []
        async for response in replica.Query(request.SerializeToString(), RayServegRPCContext(GrpcContext())):
            responses.append(response)
            has_started.set()
        return responses[-1]

    calling = asyncio.create_task(call())
    await has_started.wait()
    await replica.__del__()
    assert calling.done()
    assert calling.result().completed.info.usage.output_token_count == 50


async def test_a_replica_that_ends_refuses_calls_with_the_documented_status(replica):
    await replica.__del__()
    context = RayServegRPCContext(GrpcContext(("x-request-id", "late")))
    request = vision_service_pb2.CompleteQueryRequest(question="hello")
    await replica.CompleteQuery(request.SerializeToString(), context)
    assert context.code() is grpc.StatusCode.UNAVAILABLE
    assert ("x-request-id", "late") in context.trailing_metadata()
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        await replica.check_health()


def test_options_about_ports_are_refused_before_anything_starts():
    with pytest.raises(ConfigurationError) as error:
        build({"port": 1, "http_port": 2, "model": "moondream2"})
    assert error.value.problems == tuple(f"{name}: is no option of a replica" for name in ("http_port", "port"))


def test_the_file_for_serve_deploys_this_application():
    file = yaml.safe_load((CHECKOUT / "deploy" / "ray" / "serve.yaml").read_text(encoding="utf-8"))
    schema = ServeDeploySchema.model_validate(file)
    assert tuple(schema.grpc_options.grpc_servicer_functions) == SERVICERS
    assert schema.grpc_options.enable_reflection
    (application,) = schema.applications
    module, _, name = application.import_path.partition(":")
    assert (module, name) == (build.__module__, build.__name__)
    assert application.args.keys() <= REPLICA_OPTIONS | {"num_gpus"}
    assert build(application.args)._bound_deployment.name == DEPLOYMENT


@pytest.mark.parametrize(("args", "num_gpus"), [({}, 1), ({"device": "cpu"}, 0), ({"num_gpus": 0.5}, 0.5)])
def test_a_replica_takes_a_gpu_unless_it_is_told_otherwise(args, num_gpus):
    deployment = build(args)._bound_deployment
    assert deployment.ray_actor_options["num_gpus"] == num_gpus
