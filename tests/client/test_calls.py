"""Every failure of a call, in both clients, is an error of this package with the id that the server was sent."""

import socket
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

from kestrel_client import (
    AsyncClient,
    Cancelled,
    Client,
    ClientClosed,
    DeadlineExceeded,
    InvalidRequest,
    KestrelClientError,
    ServerError,
    Unavailable,
)
from tests.client import canned
from tests.client.canned import CannedVision

PICTURE = b"picture"


def test_a_deadline_names_the_request_that_was_sent(client: Client, vision: CannedVision):
    vision.endless = True
    stream = client.query(PICTURE, "q", timeout_s=0.2)
    with pytest.raises(DeadlineExceeded) as caught:
        stream.result()
    assert caught.value.request_id == stream.request_id == vision.metadata[0]["x-request-id"]
    assert (caught.value.reason, str(caught.value)) == ("DEADLINE_EXCEEDED", "no answer within 0.2 s")


def test_a_cancelled_stream_names_its_request(client: Client, vision: CannedVision):
    vision.endless = True
    with client.query(PICTURE, "q") as stream:
        next(stream)
    with pytest.raises(Cancelled) as caught:
        stream.result()
    assert caught.value.request_id == vision.metadata[0]["x-request-id"]
    assert caught.value.reason == "CANCELLED"


async def test_the_asyncio_client_names_requests_too(address: str, vision: CannedVision):
    vision.endless = True
    async with AsyncClient(address) as client:
        stream = client.query(PICTURE, "q", timeout_s=0.2, request_id="mine")
        with pytest.raises(DeadlineExceeded) as caught:
            await stream.result()
        assert caught.value.request_id == stream.request_id == vision.metadata[0]["x-request-id"] == "mine"
        stream = client.query(PICTURE, "q")
        stream.cancel()
        with pytest.raises(Cancelled) as cancelled:
            await stream.result()
        assert (cancelled.value.request_id, cancelled.value.reason) == (stream.request_id, "CANCELLED")


def test_the_id_of_the_server_wins(client: Client, vision: CannedVision):
    info = canned.error_info("INTERNAL", requestId="r-7")
    vision.failures = [canned.status(code_pb2.INTERNAL, "internal error", info)]
    with pytest.raises(ServerError) as caught:
        client.point(PICTURE, "kite", request_id="mine")
    assert caught.value.request_id == "r-7"


def test_without_a_server_the_error_has_a_request_id():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with Client(f"127.0.0.1:{unused.getsockname()[1]}", max_retries=0) as client:
            with pytest.raises(Unavailable, match="no server listens at ") as caught:
                client.load()
            assert (caught.value.reason, bool(caught.value.request_id)) == ("SERVER_UNREACHABLE", True)


def test_a_closed_client_says_so(address: str):
    client = Client(address)
    client.close()
    client.close()
    calls = (
        lambda: client.point(PICTURE, "kite", request_id="mine"),
        lambda: client.query(PICTURE, "q", request_id="mine"),
    )
    for call in calls:
        with pytest.raises(ClientClosed, match="the client is closed") as caught:
            call()
        assert (caught.value.request_id, caught.value.code) == ("mine", grpc.StatusCode.FAILED_PRECONDITION)
        assert caught.value.reason == "CLIENT_CLOSED"
    with pytest.raises(ClientClosed):
        client.server_info()


async def test_a_closed_asyncio_client_says_so(address: str):
    client = AsyncClient(address)
    await client.close()
    with pytest.raises(ClientClosed) as caught:
        await client.point(PICTURE, "kite", request_id="mine")
    assert caught.value.request_id == "mine"
    with pytest.raises(ClientClosed):
        await client.query(PICTURE, "q").result()


def test_mistakes_that_the_client_finds_name_the_request_too(client: Client, vision: CannedVision):
    wrong: Any = 7
    calls = (
        lambda: client.caption(PICTURE, length=wrong, request_id="mine"),
        lambda: client.query(wrong, "q", request_id="mine"),
        lambda: client.point("data:;base64,!", "kite", request_id="mine"),
        lambda: client.point(PICTURE, wrong, request_id="mine"),
        lambda: client.point(PICTURE, "kite", timeout_s=wrong * [1], request_id="mine"),
    )
    for call in calls:
        with pytest.raises(InvalidRequest) as caught:
            call()
        assert (caught.value.request_id, caught.value.reason) == ("mine", "INVALID_REQUEST")
    with pytest.raises(InvalidRequest) as caught:
        client.upload_image(wrong)
    assert caught.value.request_id
    assert vision.requests == []


async def test_mistakes_that_the_asyncio_client_finds_name_the_request_too(address: str):
    wrong: Any = 7
    async with AsyncClient(address) as client:
        for call in (
            lambda: client.point(PICTURE, wrong, request_id="mine"),
            lambda: client.point(wrong, "kite", request_id="mine"),
            lambda: client.query(wrong, "q", request_id="mine").result(),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await call()
            assert caught.value.request_id == "mine"
        with pytest.raises(InvalidRequest):
            await client.upload_image(wrong)


@pytest.mark.parametrize("retries", [0, 1, 4])
def test_a_call_that_no_server_takes_is_retried_as_often_as_the_client_says(
    retries: int, address: str, vision: CannedVision
):
    draining = canned.status(code_pb2.UNAVAILABLE, "draining", canned.error_info("DRAINING"))
    vision.failures = [draining] * 6
    with Client(address, max_retries=retries) as client, pytest.raises(KestrelClientError):
        client.point(PICTURE, "kite")
    assert len(vision.requests) == 1 + retries
    assert len({metadata["x-request-id"] for metadata in vision.metadata}) == 1


@pytest.mark.parametrize("retries", [-1, 5])
def test_a_number_of_retries_that_grpc_cannot_make_is_refused(retries: int):
    with pytest.raises(ValueError, match="between 0 and 4"):
        Client(max_retries=retries)


def test_address_and_token_may_come_from_the_environment(
    address: str, vision: CannedVision, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KESTREL_GRPC_ADDRESS", address)
    monkeypatch.setenv("KESTREL_GRPC_TOKEN", "secret\n")
    with Client() as client:
        client.point(PICTURE, "kite")
    with Client(token="other") as client:
        client.point(PICTURE, "kite")
    with Client(token="") as client:
        client.point(PICTURE, "kite")
    assert [metadata.get("authorization") for metadata in vision.metadata] == [
        "Bearer secret",
        "Bearer other",
        None,
    ]


async def test_the_asyncio_client_reads_the_environment_too(
    address: str, vision: CannedVision, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KESTREL_GRPC_ADDRESS", address)
    monkeypatch.setenv("KESTREL_GRPC_TOKEN", "secret")
    async with AsyncClient() as client:
        await client.point(PICTURE, "kite")
    assert vision.metadata[0]["authorization"] == "Bearer secret"


@pytest.mark.parametrize("token", ["schlüssel", "a\nb"])
def test_a_token_that_no_call_can_carry_is_refused_and_not_printed(token: str):
    with pytest.raises(ValueError, match="token") as caught:
        Client(token=token)
    assert token not in str(caught.value)
