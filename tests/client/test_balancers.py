"""What both clients send with a call, so that a balancer takes all calls about one image to one server."""

import hashlib
from collections.abc import AsyncIterator, Iterator

import pytest

from kestrel_client import AsyncClient, Client, RawImage
from tests.client.canned import CannedVision, ask_with_every_call

PICTURE = bytes(range(250))
LARGE = b"kestrel" * 1000
DIGEST, STORED = "x-image-sha256", "x-image-stored"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sent(vision: CannedVision) -> list[tuple[str | bytes | None, str | bytes | None]]:
    """The digest of each request, and whether it names a stored image; empties the list."""
    found = [(metadata.get(DIGEST), metadata.get(STORED)) for metadata in vision.metadata]
    vision.metadata.clear()
    return found


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, store_from_bytes=len(LARGE)) as client:
        yield client


@pytest.fixture
async def async_client(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address, store_from_bytes=len(LARGE)) as client:
        yield client


def test_every_call_about_an_image_tells_its_digest(client: Client, vision: CannedVision):
    num_calls = ask_with_every_call(client, PICTURE)
    assert sent(vision) == [(digest(PICTURE), None)] * num_calls


def test_pixels_are_told_by_their_bytes(client: Client, vision: CannedVision):
    client.point(RawImage(bytes(24), 3, 2, "rgba8"), "kite")
    assert sent(vision) == [(digest(bytes(24)), None)]


def test_calls_without_an_image_or_with_an_address_tell_none(client: Client, vision: CannedVision):
    client.complete_query(None, "q")
    client.point("https://example.com/kite.png", "kite")
    assert sent(vision) == [(None, None)] * 2


def test_a_stored_image_has_the_digest_that_it_had_when_it_was_stored(client: Client, vision: CannedVision):
    image = client.upload_image(PICTURE)
    client.get_image(image)
    client.point(image, "kite")
    client.point(image.image_id, "kite")
    client.delete_image(image)
    assert sent(vision) == [(digest(PICTURE), "1")] * 2
    found = [(metadata.get(DIGEST), metadata.get(STORED)) for metadata in vision.images.metadata]
    assert found == [(digest(PICTURE), None), (digest(PICTURE), "1"), (digest(PICTURE), "1")]


def test_what_is_no_name_of_a_stored_image_tells_nothing(client: Client, vision: CannedVision):
    for name in ("sha256:", "sha256:" + "A" * 64, "sha256:" + "é" * 64, "sha256:" + "a" * 65):
        with pytest.raises(Exception, match="no such image"):
            client.point(name, "kite")
    assert sent(vision) == [(None, None)] * 4


def test_an_image_that_the_client_stores_by_itself_keeps_its_digest(client: Client, vision: CannedVision):
    client.point(LARGE, "kite")
    client.point(LARGE, "kite")
    vision.images.stored.clear()
    client.point(LARGE, "kite")
    key = digest(LARGE)
    # The first is sent, the second named; the third is named, not found, stored again and named.
    assert sent(vision) == [(key, None), (key, "1"), (key, "1"), (key, "1")]
    assert [(data.get(DIGEST), data.get(STORED)) for data in vision.images.metadata] == [(key, None)] * 2


async def test_the_awaiting_client_tells_the_same(async_client: AsyncClient, vision: CannedVision):
    await async_client.query(PICTURE, "q").result()
    await async_client.point(RawImage(bytes(24), 3, 2, "rgba8"), "kite")
    await async_client.complete_query(None, "q")
    image = await async_client.upload_image(PICTURE)
    await async_client.point(image, "kite")
    assert sent(vision) == [
        (digest(PICTURE), None),
        (digest(bytes(24)), None),
        (None, None),
        (digest(PICTURE), "1"),
    ]
    assert vision.images.metadata[0][DIGEST] == digest(PICTURE)
