"""The index of stored images: bounds, quotas, times to live, pins, and namespaces."""

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel_grpc.images.image_index import BOOKKEEPING_BYTES, ImageIndex, StoreLimits
from kestrel_grpc.images.stored_images import (
    ImageHandle,
    ImageNotFound,
    ImageQuotaExceeded,
    ImageStoreFull,
    Retention,
)
from kestrel_runtime.api.engine import CacheLoad, ImageInfo

INFO = ImageInfo("image/png", 2, 1)
KIB = 1024
COST = KIB + BOOKKEEPING_BYTES
"""Of one image of these tests."""


class Rig:
    """A store that holds four images of 1 KiB, of which one namespace may have three."""

    def __init__(self, **limits: float) -> None:
        self.now = 1000.0
        self.forgotten: list[tuple[str, str]] = []
        values: dict[str, Any] = {
            "max_bytes": 4 * COST,
            "quota_bytes": 3 * COST,
            "default_ttl_s": 60.0,
            "max_ttl_s": 600.0,
            **limits,
        }
        self.files: set[tuple[str, ImageHandle]] = set()
        self.store = ImageIndex(
            StoreLimits(**values),
            lambda namespace, sha256: self.forgotten.append((namespace, sha256)),
            lambda namespace, handle: self.files.remove((namespace, handle)),
            clock=lambda: self.now,
        )

    def put(self, name: str, namespace: str = "a", **retention: Any) -> ImageHandle:
        handle = handle_of(name)
        how = Retention(**retention)
        if self.store.renew(namespace, handle, how) is None:
            self.store.add(namespace, handle, KIB, INFO, how)
            self.files.add((namespace, handle))
        return handle

    def names(self, *names: str, namespace: str = "a") -> list[str]:
        """Those of the images that are stored."""
        return [name for name in names if self.store.holds(namespace, handle_of(name))]


def handle_of(name: str) -> ImageHandle:
    return ImageHandle(hashlib.sha256(name.encode()).hexdigest())


def test_an_image_is_found_in_its_namespace_and_in_no_other():
    rig = Rig()
    handle = rig.put("cat")
    assert rig.store.get("a", handle).handle == handle
    for namespace in ("b", ""):
        with pytest.raises(ImageNotFound):
            rig.store.get(namespace, handle)
    assert (rig.store.usage.num_lookups, rig.store.usage.num_hits) == (3, 1)


def test_storing_an_image_again_takes_no_more_memory():
    rig = Rig()
    rig.put("cat")
    rig.put("cat")
    assert (rig.store.usage.num_images, rig.store.usage.num_bytes) == (1, COST)


def test_storing_an_image_again_never_shortens_its_time_nor_unpins_it():
    rig = Rig()
    handle = rig.put("cat", ttl_s=100.0, is_pinned=True)
    rig.put("cat", ttl_s=10.0)
    image = rig.store.get("a", handle)
    assert (image.expires_at, image.is_pinned) == (1100.0, True)
    rig.put("cat", ttl_s=200.0)
    assert image.expires_at == 1200.0


def test_an_image_is_dropped_and_forgotten_when_its_time_is_over():
    rig = Rig()
    handle = rig.put("cat")
    rig.put("dog", ttl_s=5.0)
    rig.now += 5.0
    assert rig.names("cat", "dog") == ["cat"]
    rig.store.expire()
    assert rig.forgotten == [("a", handle_of("dog").sha256)]
    assert rig.store.usage.num_bytes == COST
    rig.now += 55.0
    with pytest.raises(ImageNotFound):
        rig.store.get("a", handle)


def test_a_renewed_image_lives_on():
    rig = Rig()
    rig.put("cat", ttl_s=5.0)
    rig.put("cat", ttl_s=50.0)
    rig.now += 5.0
    rig.store.expire()
    assert rig.names("cat") == ["cat"]
    rig.now += 45.0
    rig.store.expire()
    assert rig.store.usage.num_images == 0


def test_a_time_to_live_is_bounded():
    rig = Rig()
    rig.put("cat", ttl_s=1e9)
    rig.now += 600.0
    assert rig.names("cat") == []


def test_a_namespace_that_is_full_loses_what_it_used_least_recently():
    rig = Rig()
    for name in ("one", "two", "three"):
        rig.put(name)
    rig.store.get("a", handle_of("one"))
    rig.put("four")
    assert rig.names("one", "two", "three", "four") == ["one", "three", "four"]
    assert rig.store.usage.num_evictions == 1
    assert rig.forgotten == []  # it may come back soon


def test_a_full_store_drops_images_of_the_namespace_that_holds_most():
    rig = Rig()
    rig.put("other", "b")
    for name in ("one", "two", "three"):
        rig.put(name)
    rig.put("new", "c")
    assert rig.names("one", "two", "three") == ["two", "three"]
    assert rig.names("other", namespace="b") == ["other"]


def test_pinned_images_stay_and_fill_the_quota():
    rig = Rig()
    rig.put("pinned", is_pinned=True)
    for name in ("one", "two", "three", "four"):
        rig.put(name)
    assert rig.names("pinned", "three", "four") == ["pinned", "three", "four"]
    rig.put("three", is_pinned=True)
    rig.put("four", is_pinned=True)
    with pytest.raises(ImageQuotaExceeded):
        rig.put("five")
    assert rig.names("pinned", "three", "four") == ["pinned", "three", "four"]


def test_pinning_what_is_stored_counts_against_the_quota():
    rig = Rig(quota_bytes=2 * COST)
    rig.put("one", is_pinned=True)
    rig.put("two")
    rig.put("two", is_pinned=True)
    rig.store.delete("a", handle_of("one"))
    rig.put("three")
    rig.put("three", is_pinned=True)
    assert rig.names("two", "three") == ["two", "three"]


def test_a_store_of_pinned_images_takes_no_other():
    rig = Rig()
    for name in ("one", "two"):
        rig.put(name, is_pinned=True)
        rig.put(name, "b", is_pinned=True)
    with pytest.raises(ImageStoreFull):
        rig.put("three", "c")
    assert rig.store.usage.num_bytes == 4 * COST


def test_an_image_above_the_quota_is_refused_and_nothing_leaves_for_it():
    rig = Rig()
    rig.put("small")
    with pytest.raises(ImageQuotaExceeded):
        rig.store.add("a", handle_of("large"), 3 * COST, INFO, Retention())
    assert rig.names("small") == ["small"]


def test_a_deleted_image_is_gone_though_it_was_pinned():
    rig = Rig()
    handle = rig.put("cat", is_pinned=True)
    rig.store.delete("a", handle)
    with pytest.raises(ImageNotFound):
        rig.store.delete("a", handle)
    assert rig.forgotten == []
    assert rig.store.usage.num_bytes == 0


def test_a_namespace_is_dropped_whole():
    rig = Rig()
    rig.put("one")
    rig.put("two", is_pinned=True)
    rig.put("one", "b")
    rig.store.drop_namespace("a")
    rig.store.drop_namespace("never seen")
    assert rig.names("one", "two") == []
    assert rig.names("one", namespace="b") == ["one"]
    assert rig.store.usage.num_bytes == COST


def test_the_oldest_image_is_known():
    rig = Rig()
    assert rig.store.usage.oldest_stored_at is None
    rig.put("one")
    rig.now += 1.0
    rig.put("two")
    rig.store.get("a", handle_of("one"))
    assert rig.store.usage.oldest_stored_at == 1000.0
    rig.now += 1.5
    assert rig.store.load() == CacheLoad(1, 1, 0, 2 * COST, 4 * COST, 2.5)
    rig.store.delete("a", handle_of("one"))
    assert rig.store.usage.oldest_stored_at == 1001.0


OPERATIONS = st.tuples(
    st.sampled_from(("put", "put", "get", "delete", "drop", "wait")),
    st.sampled_from("ab"),
    st.sampled_from(("one", "two", "three", "four", "five")),
    st.booleans(),
    st.sampled_from((1.0, 30.0, 900.0)),
)


@given(st.lists(OPERATIONS, max_size=60))
def test_whatever_is_done_the_books_are_right(operations: list[tuple[str, str, str, bool, float]]):
    rig = Rig()
    for kind, namespace, name, is_pinned, ttl_s in operations:
        try:
            if kind == "put":
                rig.put(name, namespace, is_pinned=is_pinned, ttl_s=ttl_s)
            elif kind == "get":
                rig.store.get(namespace, handle_of(name))
            elif kind == "delete":
                rig.store.delete(namespace, handle_of(name))
            elif kind == "drop":
                rig.store.drop_namespace(namespace)
            else:
                rig.now += ttl_s
        except (ImageNotFound, ImageQuotaExceeded, ImageStoreFull):
            pass
        rig.store.expire()
        counts = {space: len(rig.names(*NAMES, namespace=space)) for space in "ab"}
        assert rig.store.usage.num_images == sum(counts.values())
        assert rig.store.usage.num_bytes == sum(counts.values()) * COST <= 4 * COST
        assert max(counts.values()) <= 3
        assert len(rig.files) == sum(counts.values())
    rig.now += 1e6
    rig.store.expire()
    assert (rig.store.usage.num_images, rig.store.usage.num_bytes) == (0, 0)


NAMES = ("one", "two", "three", "four", "five")
