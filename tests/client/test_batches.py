"""Many calls at a time, in both clients."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2

from kestrel_client import AsyncClient, Client, InvalidRequest, Job, PointResult, Progress, QueryResult
from tests.client import canned
from tests.client.canned import CannedVision

PICTURE = b"picture"


def test_outcomes_come_in_the_order_of_the_jobs(client: Client, vision: CannedVision):
    jobs = [Job("point", PICTURE, f"kite {number}") for number in range(40)]
    outcomes = list(client.map(jobs, concurrency=8))
    assert [outcome.job for outcome in outcomes] == jobs
    results = [outcome.result for outcome in outcomes]
    assert [result.object for result in results if isinstance(result, PointResult)] == [
        f"kite {number}" for number in range(40)
    ]
    assert {request.object for request in vision.requests} == {f"kite {number}" for number in range(40)}


def test_every_skill_may_be_a_job(client: Client):
    jobs = [
        Job("query", PICTURE, "what?", temperature=0),
        Job("query", None, "what?"),
        Job("caption", PICTURE, length="short"),
        Job("detect", PICTURE, "kite", max_objects=3),
        Job("segment", PICTURE, "kite"),
        Job("query", PICTURE, "what?", is_streamed=True),
        Job("caption", PICTURE, is_streamed=True),
    ]
    assert [outcome.error for outcome in client.map(jobs)] == [None] * len(jobs)


def test_a_failed_job_does_not_stop_the_others(client: Client, vision: CannedVision, tmp_path: Path):
    vision.failures = [canned.status(code_pb2.INVALID_ARGUMENT, "no", canned.error_info("INVALID_REQUEST"))]
    jobs = [Job("query", PICTURE, "a"), Job("query", tmp_path / "none.png", "b"), Job("query", PICTURE, "c")]
    seen: list[Progress] = []
    first, second, third = client.map(jobs, concurrency=1, on_progress=seen.append)
    assert isinstance(first.error, InvalidRequest)
    assert first.result is None
    assert isinstance(second.error, FileNotFoundError)
    assert isinstance(third.result, QueryResult)
    assert seen == [Progress(1, 1, 3), Progress(2, 2, 3), Progress(3, 2, 3)]


def test_a_job_waits_for_a_place_in_the_queue(address: str, vision: CannedVision):
    vision.failures = [canned.queue_full()] * 3
    with Client(address, max_retry_s=0) as client:
        assert [outcome.error for outcome in client.map([Job("caption", PICTURE)] * 4)] == [None] * 4
    assert len(vision.requests) == 7


async def test_a_streamed_job_waits_as_well_and_has_the_result_of_its_stream(address: str, vision: CannedVision):
    vision.failures = [canned.queue_full()]
    job = Job("query", PICTURE, "what?", is_streamed=True)
    async with AsyncClient(address, max_retry_s=0) as client:
        (outcome,) = [outcome async for outcome in client.map([job])]
    assert isinstance(outcome.result, QueryResult)
    assert [type(request).__name__ for request in vision.requests] == ["QueryRequest"] * 2


def test_jobs_are_taken_from_a_generator_as_far_as_needed(client: Client):
    taken: list[int] = []

    def jobs() -> Iterator[Job]:
        for number in range(1000):
            taken.append(number)
            yield Job("caption", PICTURE)

    seen: list[Progress] = []
    outcomes = client.map(jobs(), concurrency=2, on_progress=seen.append)
    assert next(outcomes).error is None
    outcomes.close()
    assert len(taken) < 10
    assert seen[0].total_count is None


def test_mistakes_in_jobs_are_raised(client: Client):
    wrong: Any = "qery"
    with pytest.raises(ValueError, match="one of query, caption, point"):
        Job(wrong, PICTURE)
    with pytest.raises(ValueError, match="not of detect"):
        Job("detect", PICTURE, "kite", is_streamed=True)
    with pytest.raises(ValueError, match="at least 1"):
        client.map([], concurrency=0)
    with pytest.raises(TypeError, match="did you mean max_tokens"):
        list(client.map([Job("caption", PICTURE, max_token=1)]))
    assert list(client.map([])) == []


async def test_the_asyncio_client_does_the_same(address: str, vision: CannedVision):
    vision.failures = [canned.status(code_pb2.INVALID_ARGUMENT, "no", canned.error_info("INVALID_REQUEST"))]
    jobs = [Job("point", PICTURE, f"kite {number}") for number in range(20)]
    seen: list[Progress] = []
    async with AsyncClient(address) as client:
        outcomes = [outcome async for outcome in client.map(jobs, concurrency=4, on_progress=seen.append)]
        assert [outcome async for outcome in client.map([])] == []
    assert [outcome.job for outcome in outcomes] == jobs
    assert sum(outcome.error is not None for outcome in outcomes) == 1
    assert seen[-1] == Progress(20, 1, 20)


async def test_calls_of_an_asyncio_batch_that_is_left_are_cancelled(vision: CannedVision):
    has_begun, may_answer = threading.Event(), threading.Event()
    answer = vision.Point

    def slow(request: Any, context: Any) -> Any:
        if request.object == "slow":
            context.add_callback(vision.cancelled.set)
            has_begun.set()
            may_answer.wait(canned.MAX_WAIT_S)
        return answer(request, context)

    vision.Point = slow
    with canned.serving(vision) as address:
        async with AsyncClient(address) as client:
            outcomes = client.map([Job("point", PICTURE, "kite"), Job("point", PICTURE, "slow")], concurrency=2)
            async for _ in outcomes:
                break
            assert await asyncio.to_thread(has_begun.wait, canned.MAX_WAIT_S)
            await outcomes.aclose()
            assert await asyncio.to_thread(vision.cancelled.wait, canned.MAX_WAIT_S)
            may_answer.set()
