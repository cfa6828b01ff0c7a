"""Entries belong to one image each, and only what a completed step has encoded is found."""

import itertools
from random import Random

import pytest

from kestrel_runtime.scheduling.cache_keys import EmbeddingKey, PrefixKeyMaker
from kestrel_runtime.scheduling.embedding_cache import EmbeddingCache
from kestrel_runtime.scheduling.page_manager import StepId

MAKER = PrefixKeyMaker({}, 4)
CAT, DOG, COW = (MAKER.embedding_key(name * 32, "mine") for name in (b"c", b"d", b"w"))


def encode(cache: EmbeddingCache, owner: int, key: EmbeddingKey | None, **how: bool) -> int:
    """Have a sequence encode its image, in a step that completes."""
    lease = cache.lease(owner, key, **how)
    assert not lease.is_complete
    cache.fill(owner, StepId(owner))
    cache.complete(StepId(owner))
    return lease.entry


def test_an_image_is_found_from_the_completion_of_its_last_crop_on():
    cache = EmbeddingCache(2, 1)
    lease = cache.lease(1, CAT)
    assert not lease.is_complete
    cache.fill(1, StepId(7))
    assert CAT not in cache
    cache.complete(StepId(7))
    assert CAT in cache
    assert cache.lease(2, CAT) == (lease.entry, True)
    assert (cache.num_lookups, cache.num_hits, cache.num_published) == (2, 1, 1)
    assert DOG not in cache
    assert None not in cache


def test_a_sequence_that_leaves_before_the_step_is_complete_publishes_nothing():
    cache = EmbeddingCache(1, 1)
    first = cache.lease(1, CAT).entry
    cache.fill(1, StepId(1))
    cache.release(1)
    cache.release(1)  # without effect
    assert not cache.lease(2, DOG).is_complete
    cache.fill(2, StepId(2))
    cache.complete(StepId(1))
    assert cache.num_published == 0
    cache.complete(StepId(2))
    assert CAT not in cache
    assert DOG in cache
    assert first in range(cache.num_entries)


def test_what_was_left_first_is_evicted_first_and_never_what_is_leased():
    cache = EmbeddingCache(3, 1)
    encode(cache, 1, CAT)
    encode(cache, 2, DOG)
    assert cache.lease(3, CAT).is_complete
    cache.release(1)
    assert cache.num_evictions == 0, "the third sequence uses it"
    cache.release(2)
    assert DOG in cache
    cache.release(3)
    assert (CAT in cache, DOG in cache, cache.num_evictions) == (True, False, 1)


def test_the_second_entry_of_an_image_stays_private_unless_it_replaces_the_first():
    cache = EmbeddingCache(4, 2)
    leases = [cache.lease(owner, CAT) for owner in (1, 2)]
    for owner in (1, 2):
        cache.fill(owner, StepId(owner))
        cache.complete(StepId(owner))
    assert cache.lease(3, CAT).entry == leases[0].entry
    anew = encode(cache, 4, CAT, computes_anew=True)
    cache.release(2)
    assert cache.lease(2, CAT) == (anew, True)
    assert cache.num_published == 1


def test_without_a_key_or_entries_to_keep_nothing_is_published():
    cache = EmbeddingCache(1, 1)
    encode(cache, 1, None)
    assert cache.num_published == cache.num_lookups == 0
    off = EmbeddingCache(1)
    encode(off, 1, CAT)
    assert CAT not in off
    assert off.num_lookups == 0


def test_what_is_removed_is_found_no_more_and_not_published_by_who_encodes_it():
    other = MAKER.embedding_key(b"c" * 32, "yours")
    cache = EmbeddingCache(5, 5)
    for owner, key in enumerate((CAT, DOG, other)):
        encode(cache, owner, key)
    cache.lease(10, COW)
    cache.fill(10, StepId(10))
    assert cache.forget("mine", b"c" * 32) == 1
    assert [key in cache for key in (CAT, DOG, other)] == [False, True, True]
    assert cache.forget("mine") == 1
    cache.complete(StepId(10))
    assert [key in cache for key in (DOG, COW, other)] == [False, False, True]
    assert cache.forget() == 1
    assert cache.num_published == 0


def test_after_a_failed_step_every_entry_is_free():
    cache = EmbeddingCache(2, 1)
    encode(cache, 1, CAT)
    cache.lease(2, DOG)
    cache.fill(2, StepId(5))
    cache.reset()
    cache.complete(StepId(5))
    assert cache.num_published == 0
    assert [cache.lease(owner, None).entry for owner in (1, 2)] != []
    cache.release(1)
    cache.release(2)


@pytest.mark.parametrize("seed", range(40))
def test_random_operations_keep_the_books(seed: int):
    """Each entry holds what was written last; who leases a complete entry reads its own image."""
    random = Random(seed)
    num_leases, num_cached = random.randrange(1, 6), random.randrange(4)
    cache = EmbeddingCache(num_leases, num_cached)
    keys = [MAKER.embedding_key(bytes([number]) * 32, name) for number in range(4) for name in ("a", "b")]
    memory: dict[int, object] = {}
    leases: dict[int, tuple[int, EmbeddingKey]] = {}  # by owner
    in_flight: dict[int, tuple[int, int]] = {}  # step: owner, entry
    owners, steps = itertools.count(), itertools.count()
    for _ in range(400):
        choice = random.random()
        if choice < 0.4 and len(leases) < num_leases:
            owner, key = next(owners), random.choice(keys)
            lease = cache.lease(owner, key, computes_anew=random.random() < 0.1)
            leases[owner] = (lease.entry, key)
            if lease.is_complete:
                assert memory[lease.entry] == key
            else:
                step = next(steps)
                cache.fill(owner, StepId(step))
                memory[lease.entry] = key  # steps write in the order of their launches
                in_flight[step] = (owner, lease.entry)
        elif choice < 0.6 and in_flight:
            step = min(in_flight)
            del in_flight[step]
            cache.complete(StepId(step))
        elif choice < 0.9 and leases:
            owner = random.choice(list(leases))
            del leases[owner]
            cache.release(owner)
        elif choice < 0.93:
            cache.forget(random.choice((None, "a", "b")), random.choice((None, bytes([1]) * 32)))
        elif choice < 0.95:
            cache.reset()
            leases.clear()
            in_flight.clear()
            memory.clear()
        for owner, (entry, key) in leases.items():
            assert memory[entry] == key, f"the entry of {owner} was written by another one"
        books = vars(cache)
        published = set(books["_index"].values())
        used = {entry for entry, _ in leases.values()}
        free, unused = books["_free"], set(books["_unused"])
        assert sorted([*free, *(used | published)]) == list(range(cache.num_entries)), "each entry is in one state"
        assert unused == published - used
        assert len(unused) <= num_cached


def test_the_oldest_image_is_that_which_was_published_first():
    cache = EmbeddingCache(2, 2)
    assert cache.oldest_published_at() is None
    for now, (owner, key) in enumerate(((1, CAT), (2, DOG)), start=100):
        cache.lease(owner, key)
        cache.fill(owner, StepId(owner))
        cache.complete(StepId(owner), float(now))
        cache.release(owner)
    assert cache.oldest_published_at() == 100.0
    cache.lease(3, CAT, computes_anew=True)
    cache.fill(3, StepId(3))
    cache.complete(StepId(3), 102.0)
    assert cache.oldest_published_at() == 101.0, "the first one was replaced"
    cache.forget()
    assert cache.oldest_published_at() is None


def test_held_entries_leave_one_to_write_for_each_sequence():
    cache = EmbeddingCache(2, 2)
    for owner, key in enumerate((CAT, DOG)):
        encode(cache, owner, key)
        cache.release(owner)
    assert cache.num_holds_left == 2
    held = [cache.hold(("reader", key.digest), key) for key in (CAT, DOG)]
    assert len({*held}) == 2
    assert None not in held
    assert (cache.num_holds_left, cache.num_leases_left) == (0, 2)
    assert cache.hold("another reader", CAT) == held[0], "an entry that is held already takes no further place"
    entries = [encode(cache, owner, None) for owner in (3, 4)]
    assert not {*entries} & {*held}
    assert cache.hold("a third reader", COW) is None, "it is not published"
    for name in (*[("reader", key.digest) for key in (CAT, DOG)], "another reader"):
        cache.release(name)
    assert cache.num_holds_left == 2


def test_no_further_entry_is_held_than_the_cache_has_in_addition_to_those_to_write():
    cache = EmbeddingCache(2, 1)
    encode(cache, 1, CAT)
    encode(cache, 2, DOG)
    assert cache.hold("reader", CAT) is not None
    assert cache.hold("another reader", DOG) is None


def test_what_nobody_uses_makes_room_for_what_must_be_encoded():
    cache = EmbeddingCache(2, 2)
    for owner, key in enumerate((CAT, DOG, COW)):
        encode(cache, owner, key)
        cache.release(owner)
    assert cache.hold("reader", COW) is not None
    encode(cache, 3, CAT)
    cache.release(3)
    encode(cache, 4, None)
    encode(cache, 5, None)
    assert DOG not in cache
    assert COW in cache


def test_a_transient_entry_is_found_while_it_is_leased_and_takes_the_place_of_no_other():
    cache = EmbeddingCache(2, 1)
    encode(cache, 1, CAT)
    cache.release(1)
    for owner in range(2, 7):
        entry = encode(cache, owner, DOG, is_transient=True)
        assert cache.lease(owner + 10, DOG, is_transient=True) == (entry, True)
        cache.release(owner)
        assert DOG in cache
        cache.release(owner + 10)
        assert DOG not in cache
    assert CAT in cache
    assert (cache.num_published, cache.num_evictions, cache.num_leases_left) == (1, 0, 2)


def test_an_entry_that_a_lasting_request_would_publish_too_stays():
    cache = EmbeddingCache(2, 1)
    first, second = cache.lease(1, CAT, is_transient=True), cache.lease(2, CAT)
    assert first.entry != second.entry
    for owner in (1, 2):
        cache.fill(owner, StepId(owner))
        cache.complete(StepId(owner))
        cache.release(owner)
    assert CAT in cache
