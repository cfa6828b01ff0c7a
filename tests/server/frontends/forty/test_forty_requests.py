"""The same forty requests through every frontend: what the engine gets, and what caller and metrics are told."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kestrel_grpc.calls.errors import ERRORS, INTERNAL
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.requests import RequestOptions, parts_of
from tests.server.frontends.forty.cases import CASES, Case
from tests.server.frontends.forty.columns import REQUEST_ID, Column, Rig, Told, serving_all
from tests.server.frontends.forty.grpc_column import GrpcColumn
from tests.server.frontends.forty.http_columns import OpenAiColumn, RestColumn
from tests.server.frontends.forty.triton_column import TritonColumn

COLUMNS: tuple[Column, ...] = (GrpcColumn(), RestColumn(), OpenAiColumn(), TritonColumn())
ROWS = {row.reason: row for row in (*ERRORS, INTERNAL)}
WITH_DELAY = {"RATE_LIMITED", "QUEUE_FULL", "QUEUE_TIMEOUT", "DRAINING"}


def test_there_are_forty():
    assert len(CASES) == 40
    assert len({case.name for case in CASES}) == 40


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_request_ends_as_the_mapping_has_it(case: Case, column: Column, tmp_path: Path):
    if not column.expresses(case.ask):
        pytest.skip("this API has no such request")
    engine = case.engine()
    async with serving_all(engine, tmp_path) as rig:
        if case.status is not EngineStatus.SERVING:
            engine.become(case.status)
        if case.is_cancelled:
            await column.leave(rig, case.ask)
            await engine.is_idle.wait()
            assert engine.num_cancelled == 1
            await counted(rig, column, case, "CANCELLED", "CANCELLED")
            return
        for _ in range(case.num_before):
            assert (await column.call(rig, case.ask)).reason == "OK"
        told = await column.call(rig, case.ask)
        compare(told, case, column)
        if case.reason == "OK":
            asked = [replace(request, options=RequestOptions()) for request in engine.requests]
            assert asked == list(parts_of(case.ask.request()))
        code = "OK" if case.reason == "OK" else ROWS[case.reason].code.name
        await counted(rig, column, case, code, case.reason)


_IN_STREAMS = [case for case in CASES if case.fields and TritonColumn().expresses(case.ask)]


@pytest.mark.parametrize("case", _IN_STREAMS, ids=lambda case: case.name)
async def test_a_stream_of_triton_tells_a_failure_in_a_message_as_in_its_status(case: Case, tmp_path: Path):
    column = TritonColumn()
    async with serving_all(case.engine(), tmp_path) as rig:
        status, message = await column.error_texts(rig, case.ask)
    assert message == status
    for name in case.fields:
        assert (column.field_name(case.ask, name) or "") in message


def compare(told: Told, case: Case, column: Column) -> None:
    assert told.reason == case.reason
    assert told.request_id == REQUEST_ID
    if case.reason == "OK":
        assert told.status == (200 if column.has_http_statuses else "OK")
        assert told.answer == case.answer
        return
    row = ROWS[case.reason]
    assert told.status == (row.http_status if column.has_http_statuses else row.code.name)
    expected = tuple(column.field_name(case.ask, name) for name in case.fields)
    assert told.fields == expected[: len(told.fields)]
    assert bool(told.fields) is bool(expected)
    assert (told.retry_after_s is not None) is (case.reason in WITH_DELAY)


async def counted(rig: Rig, column: Column, case: Case, code: str, reason: str) -> None:
    """Wait until the metrics have the call: a stream's last message is sent before its call is recorded."""
    method = column.method(case.ask)
    expected = [
        f'rpc_server_call_duration_seconds_count{{rpc_method="{method}",rpc_response_status_code="{code}"}} 1'
    ]
    if reason != "OK":
        expected.append(f'kestrel_requests_failed_total{{reason="{reason}",rpc_method="{method}"}} 1')
    async with asyncio.timeout(60):
        while True:
            answer = await rig.http.ask("/metrics", headers={"Authorization": "Bearer operator"})
            if all(line in answer.body.decode() for line in expected):
                return
