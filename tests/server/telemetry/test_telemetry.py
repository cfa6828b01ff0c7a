"""A whole server, watched from outside: over its HTTP port and at a receiver of traces."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from http.client import HTTPConnection

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.__main__ import main
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.errors import Overloaded
from tests.fakes import HOLD, FakeEngine, answers, fails
from tests.reference_fixtures import MD3_SMALL
from tests.server.otlp import Receiver, attributes, receiving
from tests.server.serving import server_deadline

QUERY = "kestrel.v1.VisionService/Query"
COMPLETE_QUERY = "kestrel.v1.VisionService/CompleteQuery"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WATCHED = ServerConfig(port=0, metrics_port=0)


class Rig:
    """A server under watch, and a stub to ask it."""

    def __init__(self, server: Server, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.stub = VisionServiceStub(channel)

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(self._get, path)

    async def counted(self, name: str, **labels: str) -> float:
        """The value of a sample; 0 where there is none yet."""
        text = (await self.get("/metrics"))[1]
        samples = [item for family in text_string_to_metric_families(text) for item in family.samples]
        found = [item.value for item in samples if item.name == name and labels.items() <= item.labels.items()]
        return sum(found)

    async def ended(self, method: str, code: str) -> float:
        """How many calls of a method ended with a status."""
        labels = {"rpc_method": method, "rpc_response_status_code": code}
        return await self.counted("rpc_server_call_duration_seconds_count", **labels)

    def _get(self, path: str) -> tuple[int, str]:
        assert self.server.metrics_port is not None
        connection = HTTPConnection("127.0.0.1", self.server.metrics_port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def rig(engine) -> AsyncIterator[Rig]:
    async with Server(engine, WATCHED) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield Rig(server, channel)


@pytest.fixture
def receiver(monkeypatch) -> Iterator[Receiver]:
    with receiving() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.endpoint)
        yield found


async def test_streams_and_single_answers_are_counted_alike(rig):
    _ = [message async for message in rig.stub.Query(wire.QueryRequest(question="?"))]
    await rig.stub.CompleteQuery(wire.CompleteQueryRequest(question="?"))
    assert (await rig.ended(QUERY, "OK"), await rig.ended(COMPLETE_QUERY, "OK")) == (1, 1)
    tokens = {"gen_ai_operation_name": "query", "gen_ai_token_type": "output"}
    assert await rig.counted("gen_ai_client_token_usage_sum", **tokens) == 6


@pytest.fixture
def ended_calls(caplog) -> Iterator[asyncio.Semaphore]:
    """Acquired once per call that has ended: waits until one has been counted."""
    ended = asyncio.Semaphore(0)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            ended.release()

    log, handler = logging.getLogger("kestrel_grpc.calls"), Handler()
    caplog.set_level(logging.INFO, log.name)
    log.addHandler(handler)
    yield ended
    log.removeHandler(handler)


async def test_a_caller_who_hangs_up_is_counted_as_such(ended_calls):
    engine = FakeEngine(lambda request: [*answers(request)[:2], HOLD])
    async with Server(engine, WATCHED) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        rig = Rig(server, channel)
        call = rig.stub.Query(wire.QueryRequest(question="?"))
        await call.read()
        call.cancel()
        await ended_calls.acquire()
        assert await rig.ended(QUERY, "CANCELLED") == 1


async def test_a_deadline_that_passes_is_told_from_hanging_up(ended_calls):
    engine = FakeEngine(lambda request: [HOLD])
    async with Server(engine, WATCHED) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        rig = Rig(server, channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.CompleteQuery(wire.CompleteQueryRequest(question="?"), metadata=server_deadline(200))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await ended_calls.acquire()
        assert await rig.ended(COMPLETE_QUERY, "DEADLINE_EXCEEDED") == 1


async def test_a_refusal_is_counted_by_its_reason():
    engine = FakeEngine(fails(Overloaded(1, retry_after_s=1.0)))
    async with Server(engine, WATCHED) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        rig = Rig(server, channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.stub.CompleteQuery(wire.CompleteQueryRequest(question="?"))
        assert await rig.counted("kestrel_requests_failed_total", reason="QUEUE_FULL") == 1


async def test_probes_follow_the_engine(rig, engine):
    assert [(await rig.get(path))[0] for path in ("/readyz", "/healthz")] == [200, 200]
    engine.become(EngineStatus.DRAINING)
    await asyncio.to_thread(int)  # the news comes through the event loop
    assert [(await rig.get(path))[0] for path in ("/readyz", "/healthz")] == [503, 200]
    engine.become(EngineStatus.DEAD)
    assert (await rig.get("/healthz"))[0] == 503


async def test_a_server_that_drains_is_no_longer_ready(rig):
    await rig.server.drain()
    assert [(await rig.get(path))[0] for path in ("/readyz", "/healthz")] == [503, 200]


async def test_a_call_from_afar_is_traced_to_the_receiver(receiver, engine):
    config = ServerConfig(port=0, tracing=True)
    async with Server(engine, config) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = VisionServiceStub(channel).Query(
            wire.QueryRequest(question="secret"), metadata=(("traceparent", PARENT), ("x-request-id", "abc"))
        )
        _ = [message async for message in call]
    root = receiver.span(QUERY)
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert attributes(root.attributes)["kestrel.request_id"] == "abc"
    assert attributes(root.attributes)["gen_ai.usage.output_tokens"] == 3
    assert {span.name for span in receiver.spans} == {QUERY, "queue", "preprocess", "prefill", "decode"}
    assert receiver.resource["service.instance.id"] == server.instance_id


async def test_metrics_that_fail_fail_no_call(engine, monkeypatch, caplog):
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("kestrel_grpc.telemetry.metrics.ServerMetrics.record", broken)
    async with Server(engine, WATCHED) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        answer = await VisionServiceStub(channel).CompleteQuery(wire.CompleteQueryRequest(question="?"))
    assert answer.result.answer == "a kestrel"
    assert "cannot record the end of a call" in caplog.text


def test_a_port_for_metrics_in_use_is_refused_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(MD3_SMALL), "--port", "0", "--metrics-port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_tracing_that_cannot_be_is_refused_before_the_model_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr("kestrel_grpc.telemetry.tracing.find_spec", lambda name: None)
    assert main(["serve", "--model", str(MD3_SMALL), "--port", "0", "--tracing", "on"]) == 1
    assert "pip install 'kestrel-grpc[otel]'" in capsys.readouterr().err
