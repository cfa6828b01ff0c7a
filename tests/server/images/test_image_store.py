"""Images in the memory of a process, and removals from the engine's caches."""

import hashlib

import pytest

from kestrel_grpc.images.image_index import BOOKKEEPING_BYTES, StoreLimits
from kestrel_grpc.images.image_store import CachePurges, MemoryImages
from kestrel_grpc.images.stored_images import ImageHandle, ImageNotFound, ImageQuotaExceeded, Retention
from kestrel_runtime.api.engine import ClearedCache, ImageInfo
from kestrel_runtime.api.errors import EngineUnavailable
from tests.fakes import FakeEngine

INFO = ImageInfo("image/png", 2, 1)
SHA256 = "ab" * 32
DATA = b"a file"
HANDLE = ImageHandle(hashlib.sha256(DATA).hexdigest())
LIMITS = StoreLimits(2**20, 2**20, default_ttl_s=60.0, max_ttl_s=600.0)


def forget_nothing(namespace: str, sha256: str) -> None:
    """No cache is part of these tests."""


async def test_the_file_of_an_image_is_read_with_its_digest():
    store = MemoryImages(LIMITS, forget_nothing)
    await store.put("a", HANDLE, DATA, INFO, Retention())
    file = await store.read("a", await store.find("a", HANDLE))
    assert (file, file.sha256.hex()) == (DATA, HANDLE.sha256)
    with pytest.raises(ImageNotFound):
        await store.find("b", HANDLE)


async def test_an_image_that_leaves_after_it_was_found_is_not_found():
    store = MemoryImages(LIMITS, forget_nothing)
    image = await store.put("a", HANDLE, DATA, INFO, Retention())
    await store.delete("a", HANDLE)
    with pytest.raises(ImageNotFound):
        await store.read("a", image)
    assert (store.load().used_bytes, store.load().num_evictions) == (0, 0)


async def test_an_image_that_is_stored_again_is_one_image():
    store = MemoryImages(LIMITS, forget_nothing)
    await store.put("a", HANDLE, DATA, INFO, Retention())
    renewed = await store.put("a", HANDLE, DATA, INFO, Retention(is_pinned=True))
    assert renewed.is_pinned
    assert store.load().used_bytes == len(DATA) + BOOKKEEPING_BYTES


async def test_an_image_without_room_is_not_kept():
    store = MemoryImages(StoreLimits(2**20, 100, 60.0, 600.0), forget_nothing)
    for store_image in (store.require_room("a", len(DATA)), store.put("a", HANDLE, DATA, INFO, Retention())):
        with pytest.raises(ImageQuotaExceeded):
            await store_image
    assert await store.renew("a", HANDLE, Retention()) is None


async def test_removals_are_done_in_order():
    engine = FakeEngine()
    purges = CachePurges(engine)
    await purges.done()
    purges.forget_image("a", SHA256)
    purges.clear("b")
    await purges.done()
    purges.forget_image("c", SHA256)
    await purges.done()
    assert engine.cleared == [("a", bytes.fromhex(SHA256)), ("b", None), ("c", bytes.fromhex(SHA256))]


async def test_a_removal_that_fails_keeps_no_other_from_being_done():
    class Failing(FakeEngine):
        async def forget_image(self, digest: bytes, namespace: str = "") -> ClearedCache:
            raise RuntimeError("a bug")

    engine = Failing()
    purges = CachePurges(engine)
    purges.forget_image("a", SHA256)
    purges.clear("b")
    await purges.done()
    assert engine.cleared == [("b", None)]


async def test_an_engine_that_ends_keeps_no_other_from_removing_more():
    class OneOfTwoEnds(FakeEngine):
        """Two engines, of which one ends while the first removal is under way."""

        async def clear_cache(self, namespace: str | None = None) -> ClearedCache:
            raise EngineUnavailable("closed")

    engine = OneOfTwoEnds()
    purges = CachePurges(engine)
    purges.clear("a")
    purges.forget_image("b", SHA256)
    await purges.done()
    assert engine.cleared == [("b", bytes.fromhex(SHA256))]
