"""Images that both clients store: on request, and by themselves when an image is sent again."""

import argparse
import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest

from kestrel_client import AsyncClient, Client, ImageNotFound, RawImage, StoredImage
from kestrel_grpc.cli.ask import add_client_commands
from tests.client.canned import ANSWER_PIECES, CannedVision

PICTURE = bytes(range(250))
LARGE = b"kestrel" * 1000
SMALLEST = len(LARGE)


def id_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def sources(vision: CannedVision) -> list[str]:
    """How the image of each request came."""
    return [request.image.WhichOneof("source") for request in vision.requests]


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, store_from_bytes=SMALLEST) as client:
        yield client


@pytest.fixture
async def async_client(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address, store_from_bytes=SMALLEST) as client:
        yield client


def test_an_image_is_stored_described_read_and_dropped(client: Client, tmp_path: Path, vision: CannedVision):
    path = tmp_path / "kite.png"
    path.write_bytes(PICTURE)
    image = client.upload_image(path, ttl_s=1.5, pin=True)
    expires = datetime.fromtimestamp(1_900_000_000, UTC)
    assert image == StoredImage(id_of(PICTURE), 250, "image/png", 4, 3, expires, True)
    (request,) = vision.images.requests
    assert (request.ttl.ToMilliseconds(), request.pin) == (1500, True)
    assert client.get_image(image.image_id).size_bytes == 250
    assert client.read_image(image) == PICTURE
    client.delete_image(image)
    for call in (client.get_image, client.read_image, client.delete_image):
        with pytest.raises(ImageNotFound):
            call(image)


async def test_the_awaiting_client_does_the_same(async_client: AsyncClient, vision: CannedVision):
    image = await async_client.upload_image(PICTURE)
    assert not vision.images.requests[0].HasField("ttl")
    assert (await async_client.get_image(image)).image_id == id_of(PICTURE)
    assert await async_client.read_image(image.image_id) == PICTURE
    assert (await async_client.detect(image, "kite")).objects
    await async_client.delete_image(image)
    with pytest.raises(ImageNotFound):
        await async_client.detect(image, "kite")


def test_a_stored_image_stands_for_the_image_everywhere(client: Client, vision: CannedVision):
    image = client.upload_image(PICTURE)
    for given in (image, image.image_id):
        client.query(given, "q").result()
        client.complete_query(given, "q")
        client.caption(given).result()
        client.complete_caption(given)
        client.point(given, "kite")
        client.detect(given, "kite")
        client.segment(given, "kite")
    assert [request.image.image_id for request in vision.requests] == [image.image_id] * 14


def test_a_name_that_the_server_does_not_know_is_the_callers_to_handle(client: Client):
    with pytest.raises(ImageNotFound):
        client.point(id_of(LARGE), "kite")
    with pytest.raises(ImageNotFound):
        client.query(id_of(LARGE), "q").result()


def test_pixels_are_sent_as_they_are(client: Client, vision: CannedVision):
    client.point(RawImage(memoryview(bytes(24)), 3, 2, "rgba8"), "kite")
    client.point(RawImage(bytes(20), 3, 2, "gray8", row_stride_bytes=10), "kite")
    packed, padded = (request.image.raw for request in vision.requests)
    assert (packed.width_px, packed.height_px, packed.format, packed.row_stride_bytes) == (3, 2, 3, 0)
    assert packed.pixels == bytes(24)
    assert (padded.format, padded.row_stride_bytes) == (4, 10)


def blocking_calls(client: Client) -> list[Callable[[bytes], object]]:
    return [lambda image: client.point(image, "kite"), lambda image: client.query(image, "q").result()]


@pytest.mark.parametrize("which", [0, 1])
def test_an_image_that_is_sent_again_is_stored_once_and_then_named(
    client: Client, vision: CannedVision, which: int
):
    call = blocking_calls(client)[which]
    for _ in range(4):
        call(LARGE)
    assert sources(vision) == ["data", "image_id", "image_id", "image_id"]
    assert len(vision.images.requests) == 1


async def test_the_awaiting_client_stores_it_once_too(async_client: AsyncClient, vision: CannedVision):
    for _ in range(2):
        await async_client.point(LARGE, "kite")
        assert (await async_client.query(LARGE, "q").result()).answer == "".join(ANSWER_PIECES)
    assert sources(vision) == ["data", "image_id", "image_id", "image_id"]
    assert len(vision.images.requests) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_an_image_that_the_server_has_dropped_is_stored_again(client: Client, vision: CannedVision, which: int):
    call = blocking_calls(client)[which]
    call(LARGE)
    call(LARGE)
    vision.images.stored.clear()
    call(LARGE)
    assert sources(vision) == ["data", "image_id", "image_id", "image_id"]
    assert len(vision.images.requests) == 2


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_awaiting_client_stores_a_dropped_image_again(
    async_client: AsyncClient, vision: CannedVision, streaming: bool
):
    async def call() -> Any:
        return await (async_client.query(LARGE, "q").result() if streaming else async_client.point(LARGE, "kite"))

    await call()
    await call()
    vision.images.stored.clear()
    await call()
    assert sources(vision) == ["data", "image_id", "image_id", "image_id"]
    assert len(vision.images.requests) == 2


@pytest.mark.parametrize("which", [0, 1])
def test_where_storing_does_not_help_the_image_is_sent(
    client: Client, vision: CannedVision, monkeypatch: pytest.MonkeyPatch, which: int
):
    # As behind a balancer, where each call may come to another server.
    monkeypatch.setattr(vision, "names_unknown", lambda request: request.image.HasField("image_id"))
    call = blocking_calls(client)[which]
    call(LARGE)
    call(LARGE)
    call(LARGE)
    assert sources(vision) == ["data", "image_id", "data", "image_id", "image_id", "data"]


@pytest.mark.parametrize(
    ("refusal", "num_tries"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, 1),
        (grpc.StatusCode.UNIMPLEMENTED, 1),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 2),
    ],
)
async def test_a_server_that_stores_nothing_gets_the_image_each_time(
    client: Client, async_client: AsyncClient, vision: CannedVision, refusal: grpc.StatusCode, num_tries: int
):
    vision.images.refusal = refusal
    for _ in range(3):
        await asyncio.to_thread(client.point, LARGE, "kite")
        await async_client.point(LARGE, "kite")
    assert sources(vision) == ["data"] * 6
    assert len(vision.images.requests) == 2 * num_tries


def test_small_images_are_sent_each_time(client: Client, vision: CannedVision):
    for _ in range(3):
        client.point(LARGE[1:], "kite")
    assert sources(vision) == ["data"] * 3


def test_storing_can_be_switched_off(address: str, vision: CannedVision):
    with Client(address, store_from_bytes=None) as client:
        for _ in range(3):
            client.point(bytes(2**20), "kite")
    assert sources(vision) == ["data"] * 3


def test_threads_that_send_one_image_all_get_answers(client: Client, vision: CannedVision):
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: client.point(LARGE, "kite").points, range(20)))
    assert found == [found[0]] * 20
    assert sources(vision).count("image_id") >= 12


def test_other_failures_are_not_retried(client: Client, vision: CannedVision):
    client.point(LARGE, "kite")
    vision.images.stored.clear()
    with pytest.raises(ImageNotFound):
        client.point(id_of(LARGE), "kite")
    assert sources(vision) == ["data", "image_id"]


def run_command(address: str, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_client_commands(parser.add_subparsers())
    parsed = parser.parse_args([*arguments, "--address", address])
    return parsed.run(parsed)


def test_the_commands_store_describe_and_drop(
    address: str, vision: CannedVision, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, copy = tmp_path / "kite.png", tmp_path / "copy.png"
    path.write_bytes(PICTURE)
    assert run_command(address, "image", "upload", str(path), "--ttl", "60", "--pin") == 0
    name = capsys.readouterr().out.strip()
    assert name == id_of(PICTURE)
    assert (vision.images.requests[0].ttl.seconds, vision.images.requests[0].pin) == (60, True)
    assert run_command(address, "image", "get", name, "--output", str(copy)) == 0
    assert capsys.readouterr().out == "image/png, 4x3, 250 bytes, until 2030-03-17T17:46:40Z\n"
    assert copy.read_bytes() == PICTURE
    assert run_command(address, "image", "get", name, "--json") == 0
    assert json.loads(capsys.readouterr().out)["image_id"] == name
    assert run_command(address, "detect", name, "kite") == 0
    assert vision.requests[-1].image.image_id == name
    assert run_command(address, "image", "delete", name) == 0
    assert run_command(address, "image", "get", name) == 1
    assert "no such image" in capsys.readouterr().err
    assert run_command(address, "detect", name, "kite", "--draw", str(copy)) == 1
