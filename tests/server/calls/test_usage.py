"""What callers ask is counted by the names of their tokens, and operators read it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from kestrel_client.v1 import engine_service_pb2 as wire
from kestrel_client.v1 import vision_service_pb2
from kestrel_grpc.__main__ import main
from kestrel_grpc.access.token_file import Scope
from kestrel_grpc.calls.usage import CallerUsage
from kestrel_grpc.telemetry.metrics import ServerMetrics
from tests.fakes import HOLD, FakeEngine
from tests.server.access.test_access import SECRETS, bearing, write_tokens
from tests.server.serving import Serving, serving

QUERY = vision_service_pb2.CompleteQueryRequest(question="?")


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    write_tokens(tmp_path / "tokens.toml")
    return str(tmp_path / "tokens.toml")


async def asked(rig: Serving, name: str | None, **fields: Any) -> str:
    """The code that a query of a caller ends with."""
    metadata = () if name is None else bearing(name)
    try:
        await rig.vision.CompleteQuery(
            vision_service_pb2.CompleteQueryRequest(question="?", **fields), metadata=metadata
        )
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def usage(rig: Serving) -> dict[str, wire.CallerUsage]:
    answer = await rig.engine_service.GetUsage(wire.GetUsageRequest(), metadata=bearing("operator"))
    return {caller.token: caller for caller in answer.callers}


async def test_requests_and_tokens_are_counted_by_caller(tokens: str):
    async with serving(tokens=tokens) as rig:
        assert [await asked(rig, "alice"), await asked(rig, "alice"), await asked(rig, "bob")] == ["OK"] * 3
        assert await asked(rig, "bob", options={"model": "unknown"}) == "NOT_FOUND"
        assert await asked(rig, "operator") == "PERMISSION_DENIED"
        assert await asked(rig, None) == "UNAUTHENTICATED"
        counted = await usage(rig)
    one = {"input_token_count": 735, "output_token_count": 3}
    assert counted["alice"] == wire.CallerUsage(
        token="alice", answered_request_count=2, **{name: 2 * count for name, count in one.items()}
    )
    assert counted["bob"] == wire.CallerUsage(token="bob", answered_request_count=1, failed_request_count=1, **one)
    assert counted["operator"] == wire.CallerUsage(token="operator", refused_request_count=1)
    assert counted[""] == wire.CallerUsage(refused_request_count=1)
    assert list(counted) == ["", "alice", "bob", "operator"]


async def test_a_request_that_is_cancelled_has_failed_and_its_tokens_do_not_count(tokens: str):
    async with serving(FakeEngine(lambda request: [HOLD]), tokens=tokens) as rig:
        call = rig.vision.CompleteQuery(QUERY, metadata=bearing("alice"))
        await rig.engine.num_submitted.acquire()
        request = wire.CancelRequestsRequest(token="alice")
        await rig.engine_service.CancelRequests(request, metadata=bearing("operator"))
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert await usage(rig) == {"alice": wire.CallerUsage(token="alice", failed_request_count=1)}


async def test_usage_needs_the_scope_of_operators(tokens: str):
    async with serving(tokens=tokens) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.engine_service.GetUsage(wire.GetUsageRequest(), metadata=bearing("alice"))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("is_on", [False, True])
async def test_metrics_have_callers_only_if_they_are_asked_for(tokens: str, is_on: bool):
    async with serving(tokens=tokens, metrics_port=0, caller_metrics=is_on) as rig:
        await asked(rig, "alice")
        await asked(rig, None)
        text = rig.server.metrics_text().decode()
    assert ('kestrel_caller_requests_total{caller="alice",outcome="answered"} 1.0' in text) is is_on
    assert ('kestrel_caller_requests_total{caller="(none)",outcome="refused"} 1.0' in text) is is_on
    assert ('kestrel_caller_tokens_total{caller="alice",type="input"} 735.0' in text) is is_on
    assert ("alice" in text) is is_on


def test_callers_beyond_the_64th_share_their_series():
    counts = {f"t{number}": CallerUsage(num_answered=number) for number in range(100)}
    text = generate_latest(ServerMetrics(FakeEngine(), usage=lambda: counts).registry).decode()
    lines = [line for line in text.splitlines() if line.startswith("kestrel_caller_requests_total")]
    assert len(lines) == 3 * 65
    assert 'kestrel_caller_requests_total{caller="t63",outcome="answered"} 63.0' in lines
    assert (
        f'kestrel_caller_requests_total{{caller="(other)",outcome="answered"}} {sum(range(64, 100)):.1f}' in lines
    )


async def printed(rig: Serving, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    arguments = [*words, "--address", rig.address, "--token", SECRETS["operator"]]
    assert await asyncio.to_thread(main, arguments) == 0
    return capsys.readouterr().out


async def test_commands_print_usage_clear_caches_and_cancel(tokens: str, capsys: Any):
    write_tokens(Path(tokens), scope=Scope.INFER)
    async with serving(tokens=tokens) as rig:
        await asked(rig, "alice")
        await asked(rig, None)
        table = (await printed(rig, capsys, "usage")).splitlines()
        assert " ".join(table[0].split()) == "caller answered failed refused tokens in of these cached tokens out"
        assert [line.split() for line in table[1:]] == [
            ["(no", "token)", "0", "0", "1", "0", "0", "0"],
            ["alice", "1", "0", "0", "735", "0", "3"],
        ]
        assert json.loads(await printed(rig, capsys, "usage", "--json"))[1]["token"] == "alice"
        assert (await printed(rig, capsys, "clear-cache")).startswith("removed ")
        assert "page_count" in json.loads(await printed(rig, capsys, "clear-cache", "--caller", "alice", "--json"))
        assert await printed(rig, capsys, "cancel", "--request", "mine") == "cancelled 0 requests\n"
        assert (
            await printed(rig, capsys, "cancel", "--caller", "alice", "--json")
            == '{"cancelled_request_count": 0}\n'
        )
