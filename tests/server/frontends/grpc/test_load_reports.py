"""Load reports in the trailing metadata of answers, as balancers get them.

They are read from the wire: gRPC's own library keeps this metadata for its balancers, and shows it to no program.
"""

from __future__ import annotations

import base64

import pytest
from google.protobuf.message import Message

from kestrel_client.v1 import engine_service_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.frontends.grpc.load_reports import LOAD_REPORT_KEY
from kestrel_grpc.frontends.grpc.orca.orca_load_report_pb2 import OrcaLoadReport
from tests.journey.http2 import COMPLETE_QUERY, QUERY, Http2Client
from tests.server.serving import Serving, serving
from tests.server.triton_calls import infer

UNARY = COMPLETE_QUERY, wire.CompleteQueryRequest(question="?")
STREAM = QUERY, wire.QueryRequest(question="?")
TRITON = "/inference.GRPCInferenceService/ModelInfer", infer(SKILL="query", QUESTION="?")


async def ended(rig: Serving, method: str, message: Message) -> tuple[str, OrcaLoadReport | None]:
    """The status of a call, and the report in its trailing metadata."""
    async with Http2Client.connected(rig.address) as client:
        _, trailers = await client.read(await client.ask(method, message))
    told = trailers.get(LOAD_REPORT_KEY)
    return trailers["grpc-status"], None if told is None else OrcaLoadReport.FromString(
        base64.b64decode(told + "==")
    )


async def report_of(rig: Serving, method: str, message: Message) -> OrcaLoadReport:
    status, report = await ended(rig, method, message)
    assert status == "0"
    assert report is not None
    return report


@pytest.mark.parametrize("call", [UNARY, STREAM, TRITON], ids=("unary", "stream", "triton"))
async def test_an_answer_tells_the_load_that_get_load_tells(call: tuple[str, Message]) -> None:
    async with serving(load_reports=True) as rig:
        report = await report_of(rig, *call)
        told = (await rig.engine_service.GetLoad(engine_service_pb2.GetLoadRequest())).load
    assert report.rps_fractional == told.requests_per_second == 7.5
    assert report.named_metrics["kv_cache_utilization"] == told.used_page_count / told.page_count == 0.08
    for name in ("waiting_request_count", "preprocessing_request_count", "output_tokens_per_second"):
        assert report.named_metrics[name] == getattr(told, name) > 0
    assert report.cpu_utilization >= 0


async def test_an_answer_counts_its_own_request_beside_those_of_the_engine() -> None:
    async with serving(load_reports=True) as rig:
        report = await report_of(rig, *UNARY)
    kinds = ("running", "waiting", "preprocessing")
    num_requests = sum(report.named_metrics[f"{kind}_request_count"] for kind in kinds)
    assert num_requests >= 2 + 3
    assert report.application_utilization == pytest.approx((num_requests + 1) / rig.engine.info.max_batch_size)


@pytest.mark.parametrize("call", [UNARY, STREAM], ids=("unary", "stream"))
async def test_without_the_option_no_answer_tells_the_load(call: tuple[str, Message]) -> None:
    async with serving() as rig:
        assert await ended(rig, *call) == ("0", None)


async def test_neither_a_failure_nor_another_service_tells_the_load() -> None:
    async with serving(load_reports=True) as rig:
        status, report = await ended(rig, COMPLETE_QUERY, wire.CompleteQueryRequest())
        assert (status, report) == ("3", None)  # INVALID_ARGUMENT
        models = "/kestrel.v1.EngineService/ListModels", engine_service_pb2.ListModelsRequest()
        assert await ended(rig, *models) == ("0", None)


async def test_the_fields_have_the_numbers_of_the_published_definition() -> None:
    numbers = {field.name: field.number for field in OrcaLoadReport.DESCRIPTOR.fields}
    # cncf/xds, xds/data/orca/v3/orca_load_report.proto
    published = {"cpu_utilization": 1, "rps_fractional": 6, "named_metrics": 8, "application_utilization": 9}
    assert numbers == published
