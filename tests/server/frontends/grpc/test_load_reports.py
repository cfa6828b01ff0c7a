"""Load reports in the trailing metadata of answers, as balancers get them.

They are read from the wire: gRPC's own library keeps this metadata for its balancers, and shows it to no program.
"""

import base64
from pathlib import Path

import pytest
from google.protobuf.message import Message

from kestrel_client.v1 import engine_service_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.frontends.grpc import load_reports
from kestrel_grpc.frontends.grpc.load_reports import LOAD_REPORT_KEY
from kestrel_grpc.frontends.grpc.orca.orca_load_report_pb2 import OrcaLoadReport
from kestrel_grpc.server import Server
from kestrel_runtime.memory.host_limits import processor_quota
from tests.fakes import FakeEngine
from tests.journey.http2 import COMPLETE_QUERY, QUERY, Http2Client
from tests.runtime.memory.test_host_limits import Host
from tests.server.serving import Serving, serving
from tests.server.triton_calls import infer

UNARY = COMPLETE_QUERY, wire.CompleteQueryRequest(question="?")
STREAM = QUERY, wire.QueryRequest(question="?")
TRITON = "/inference.GRPCInferenceService/ModelInfer", infer(SKILL="query", QUESTION="?")


async def ended(address: str, method: str, message: Message) -> tuple[str, OrcaLoadReport | None]:
    """The status of a call, and the report in its trailing metadata."""
    async with Http2Client.connected(address) as client:
        _, trailers = await client.read(await client.ask(method, message))
    told = trailers.get(LOAD_REPORT_KEY)
    return trailers["grpc-status"], None if told is None else OrcaLoadReport.FromString(
        base64.b64decode(told + "==")
    )


async def report_of(rig: Serving, method: str, message: Message) -> OrcaLoadReport:
    status, report = await ended(rig.address, method, message)
    assert status == "0"
    assert report is not None
    return report


@pytest.mark.parametrize("call", [UNARY, STREAM, TRITON], ids=("unary", "stream", "triton"))
async def test_an_answer_tells_the_load_that_get_load_tells(call: tuple[str, Message]):
    async with serving(load_reports=True) as rig:
        report = await report_of(rig, *call)
        told = (await rig.engine_service.GetLoad(engine_service_pb2.GetLoadRequest())).load
    assert report.rps_fractional == told.requests_per_second == 7.5
    assert report.named_metrics["kv_cache_utilization"] == told.used_page_count / told.page_count == 0.08
    for name in ("waiting_request_count", "preprocessing_request_count", "output_tokens_per_second"):
        assert report.named_metrics[name] == getattr(told, name) > 0
    assert report.cpu_utilization >= 0


async def test_an_answer_counts_its_own_request_beside_those_of_the_engine():
    async with serving(load_reports=True) as rig:
        report = await report_of(rig, *UNARY)
    kinds = ("running", "waiting", "preprocessing")
    num_requests = sum(report.named_metrics[f"{kind}_request_count"] for kind in kinds)
    assert num_requests >= 2 + 3
    assert report.application_utilization == pytest.approx((num_requests + 1) / rig.engine.info.max_batch_size)


class Clock:
    """The times that the reports read."""

    def __init__(self) -> None:
        self.now_s = self.used_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.used_s


async def test_processor_time_is_told_as_a_share_of_the_containers_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    host = Host(tmp_path)
    host.mount("cgroup2")
    host.belongs_to("0::/container")
    host.group("container", cpu_max="40000 100000")
    clock = Clock()
    monkeypatch.setattr(load_reports, "time", clock)
    config = ServerConfig(port=0, load_reports=True)
    async with Server(FakeEngine(), config, num_processors=processor_quota(host.proc)) as server:
        clock.now_s += 10.0
        clock.used_s += 3.0
        _, report = await ended(f"127.0.0.1:{server.port}", *UNARY)
    assert report is not None
    assert report.cpu_utilization == pytest.approx(0.75)


@pytest.mark.parametrize("call", [UNARY, STREAM], ids=("unary", "stream"))
async def test_without_the_option_no_answer_tells_the_load(call: tuple[str, Message]):
    async with serving() as rig:
        assert await ended(rig.address, *call) == ("0", None)


async def test_neither_a_failure_nor_another_service_tells_the_load():
    async with serving(load_reports=True) as rig:
        status, report = await ended(rig.address, COMPLETE_QUERY, wire.CompleteQueryRequest())
        assert (status, report) == ("3", None)  # INVALID_ARGUMENT
        models = "/kestrel.v1.EngineService/ListModels", engine_service_pb2.ListModelsRequest()
        assert await ended(rig.address, *models) == ("0", None)


async def test_the_fields_have_the_numbers_of_the_published_definition():
    numbers = {field.name: field.number for field in OrcaLoadReport.DESCRIPTOR.fields}
    # cncf/xds, xds/data/orca/v3/orca_load_report.proto
    published = {"cpu_utilization": 1, "rps_fractional": 6, "named_metrics": 8, "application_utilization": 9}
    assert numbers == published
