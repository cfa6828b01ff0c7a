"""Crops are found by their namespace and pixels, places are reused, and nothing waits for the pool."""

from kestrel_runtime.scheduling.crop_cache import CropCache, CropKey, LateKey
from kestrel_runtime.scheduling.page_manager import StepId

SKY, SEA, SAND = (CropKey("mine", name * 32) for name in (b"s", b"w", b"d"))
FIRST, SECOND = "first image", "second image"


def encode(cache: CropCache, key: CropKey | LateKey, step: int = 1) -> int | None:
    """Have a step encode the crop, and complete it."""
    place = cache.reserve(key)
    cache.fill([place], StepId(step))
    cache.complete(StepId(step), now=float(step))
    return place


def late(key: CropKey) -> LateKey:
    return LateKey(key.namespace, lambda: [key.digest], 0)


def test_a_crop_is_found_from_the_plan_of_its_step_on():
    cache = CropCache(2)
    place = cache.reserve(SKY)
    assert cache.find(FIRST, SKY) == place
    assert cache.find(FIRST, SEA) is None
    assert cache.find(FIRST, SKY._replace(namespace="yours")) is None
    assert (cache.num_lookups, cache.num_hits, cache.num_published) == (2, 1, 1)


def test_a_place_that_is_read_or_written_is_not_given_away():
    cache = CropCache(2)
    encode(cache, SKY)
    cache.find(FIRST, SKY)
    being_written = cache.reserve(SEA)
    assert cache.reserve(SAND) is None, "the pool delays nothing"
    cache.fill([being_written], StepId(2))
    cache.complete(StepId(2))
    assert cache.reserve(SAND) == being_written
    assert (cache.num_evictions, cache.find(SECOND, SEA)) == (1, None)
    cache.release(FIRST)
    cache.release(FIRST)  # without effect
    assert cache.find(SECOND, SKY) is not None


def test_the_crop_that_was_left_first_is_evicted_first():
    cache = CropCache(2)
    encode(cache, SKY)
    encode(cache, SEA, 2)
    cache.find(FIRST, SKY)
    cache.release(FIRST)
    encode(cache, SAND, 3)
    assert cache.find(SECOND, SEA) is None
    assert cache.find(SECOND, SKY) is not None


def test_a_crop_whose_digest_comes_late_is_found_when_its_step_is_complete():
    cache = CropCache(2)
    place = cache.reserve(late(SKY))
    assert cache.find(FIRST, SKY) is None
    cache.fill([place], StepId(1))
    cache.complete(StepId(1), now=5.0)
    assert cache.find(FIRST, SKY) == place
    assert cache.oldest_published_at() == 5.0


def test_a_late_crop_that_is_known_makes_the_next_ones_wait_and_frees_its_place():
    cache = CropCache(2)
    known = encode(cache, SKY)
    assert not cache.has_recent_hits("mine", 2.0)
    encode(cache, late(SKY), 2)
    assert cache.has_recent_hits("mine", 3.0)
    assert not cache.has_recent_hits("mine", 30.0), "long ago"
    assert not cache.has_recent_hits("yours", 3.0)
    assert cache.find(FIRST, SKY) == known
    assert cache.num_published == 1
    assert cache.reserve(SEA) is not None


def test_late_crops_whose_digests_cannot_be_computed_are_not_kept():
    cache = CropCache(1)
    place = encode(cache, LateKey("mine", lambda: (), 0))
    assert cache.num_published == 0
    assert cache.reserve(SKY) == place


def test_a_crop_that_is_encoded_anew_replaces_the_known_one():
    cache = CropCache(3)
    known = encode(cache, SKY)
    assert cache.find(SECOND, SKY) == known
    anew = cache.reserve(SKY, replaces=True)
    assert anew != known, "it is still read"
    assert cache.find(FIRST, SKY) == anew
    assert cache.num_lookups == 3, "it was not looked for"


def test_what_is_removed_is_not_found_and_not_published_later():
    cache = CropCache(4)
    encode(cache, SKY)
    encode(cache, other := SKY._replace(namespace="yours"), 2)
    places = [cache.reserve(SEA), cache.reserve(late(SAND))]
    assert cache.forget("mine") == 2, "the key of the late one is not known yet"
    cache.fill(places, StepId(3))
    cache.complete(StepId(3))
    assert [cache.find(FIRST, key) for key in (SKY, SEA, SAND)] == [None] * 3
    assert cache.find(FIRST, other) is not None
    cache.forget()
    assert cache.find(FIRST, other) is None


def test_after_a_failed_step_the_pool_is_empty():
    cache = CropCache(2)
    encode(cache, SKY)
    cache.find(FIRST, SKY)
    cache.fill([cache.reserve(SEA)], StepId(2))
    cache.reset()
    assert cache.num_published == 0
    assert len({cache.reserve(SKY), cache.reserve(SEA)} - {None}) == 2


def test_a_cache_that_is_off_keeps_nothing():
    assert CropCache().reserve(SKY) is None
