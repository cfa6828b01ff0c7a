"""Calls that the server refuses for now are sent again, in both clients."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from kestrel_client import AsyncClient, CallOptions, Cancelled, Client, KestrelClientError, Overloaded
from kestrel_client.sending import Retries
from tests.client import canned
from tests.client.canned import CannedVision

PICTURE = b"picture"


def test_a_call_waits_for_a_place_in_the_queue(client: Client, vision: CannedVision):
    vision.failures = [canned.queue_full(), canned.queue_full()]
    assert client.point(PICTURE, "kite").points
    assert len(vision.requests) == 3
    assert len({metadata["x-request-id"] for metadata in vision.metadata}) == 1


def test_a_stream_waits_for_a_place_in_the_queue(client: Client, vision: CannedVision):
    vision.failures = [canned.queue_full()]
    assert "".join(client.query(PICTURE, "q")) == "".join(canned.ANSWER_PIECES)
    assert len(vision.requests) == 2


async def test_the_asyncio_client_waits_too(address: str, vision: CannedVision):
    vision.failures = [canned.queue_full(), canned.queue_full()]
    async with AsyncClient(address) as client:
        assert (await client.point(PICTURE, "kite")).points
        vision.failures = [canned.queue_full()]
        assert (await client.query(PICTURE, "q").result()).answer == "".join(canned.ANSWER_PIECES)
    assert len(vision.requests) == 5


def test_a_server_that_restarts_for_longer_than_grpc_retries_is_asked_again(address: str, vision: CannedVision):
    again = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=1))
    vision.failures = [canned.status(code_pb2.UNAVAILABLE, "no", canned.error_info("RECOVERING"), again)]
    with Client(address, max_retries=0) as client:
        assert client.point(PICTURE, "kite").points
    assert len(vision.requests) == 2


@pytest.mark.parametrize("options", [{"max_retry_s": 0}, {"timeout_s": 5}, {"max_queue_s": 5}, {"max_retry_s": 5}])
def test_a_wait_beyond_what_the_caller_allows_is_not_begun(
    options: CallOptions, client: Client, vision: CannedVision
):
    vision.failures = [canned.queue_full(retry_after_s=20)]
    with pytest.raises(Overloaded):
        client.point(PICTURE, "kite", **options)
    assert len(vision.requests) == 1


def test_a_client_may_leave_retries_to_its_caller(address: str, vision: CannedVision):
    vision.failures = [canned.queue_full()]
    with Client(address, max_retry_s=0) as client, pytest.raises(Overloaded):
        client.point(PICTURE, "kite")


@pytest.mark.parametrize(
    "refusal",
    [
        canned.status(code_pb2.RESOURCE_EXHAUSTED, "no", canned.error_info("IMAGE_QUOTA_EXCEEDED")),
        canned.status(
            code_pb2.UNAVAILABLE,
            "no",
            canned.error_info("QUEUE_TIMEOUT"),
            error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=1)),
        ),
    ],
)
def test_what_waiting_does_not_mend_is_told_at_once(refusal: status_pb2.Status, address: str, vision: CannedVision):
    vision.failures = [refusal]
    with Client(address, max_retries=0) as client, pytest.raises(KestrelClientError):
        client.point(PICTURE, "kite")
    assert len(vision.requests) == 1


def test_all_attempts_together_take_no_longer_than_the_timeout(client: Client, vision: CannedVision):
    vision.failures = [canned.queue_full(retry_after_s=1)]
    client.point(PICTURE, "kite", timeout_s=9.0)  # gRPC rounds it up, by up to 0.1 s
    first, second = vision.time_left_s
    assert second < first - 0.5  # the wait is at least 1 s


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when a call waits to be sent again, for a minute."""
    is_waiting = threading.Event()

    def wait_s(retries: Retries, error: KestrelClientError) -> float:
        is_waiting.set()
        return 60.0

    monkeypatch.setattr(Retries, "wait_s", wait_s)
    return is_waiting


def test_a_stream_is_cancelled_while_it_waits(client: Client, vision: CannedVision, waits: threading.Event):
    vision.failures = [canned.queue_full()]
    stream = client.query(PICTURE, "q")
    with ThreadPoolExecutor(1) as reader:
        result = reader.submit(stream.result)
        assert waits.wait(canned.MAX_WAIT_S)
        stream.cancel()
        with pytest.raises(Cancelled):
            result.result(canned.MAX_WAIT_S)


async def test_a_stream_of_the_asyncio_client_is_cancelled_while_it_waits(
    address: str, vision: CannedVision, waits: threading.Event
):
    vision.failures = [canned.queue_full()]
    async with AsyncClient(address) as client:
        stream = client.query(PICTURE, "q")
        reader = asyncio.create_task(stream.result())
        assert await asyncio.to_thread(waits.wait, canned.MAX_WAIT_S)
        stream.cancel()
        with pytest.raises(Cancelled):
            await asyncio.wait_for(reader, canned.MAX_WAIT_S)
