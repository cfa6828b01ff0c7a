"""Shared pages: what is found, what is copied, what may be reused when. `test_scheduler_on_a_device` has the random
schedules."""

import hashlib

import pytest

from kestrel_runtime.scheduling.page_manager import (
    CacheScope,
    Digest,
    PageCopy,
    PageManager,
    PrefixKeys,
    PrefixMatch,
    SequenceId,
    StepId,
)
from tests.runtime.scheduling.schedules import check_books

A, B, C = SequenceId(1), SequenceId(2), SequenceId(3)
ONE, TWO, THREE = StepId(101), StepId(102), StepId(103)
NOTHING = PrefixMatch()


def digest(*parts: object) -> Digest:
    return Digest(hashlib.sha256(repr(parts).encode()).digest())


def keys_of(tokens: list[int], page_size: int, span_end: int = 0, root: str = "root") -> PrefixKeys:
    """The keys of tokens of which the first `span_end` see each other both ways."""
    keys = PrefixKeys(digest(root))
    previous = keys.root
    for place in range(len(tokens) // page_size):
        page = tokens[place * page_size : (place + 1) * page_size]
        boundary = span_end % page_size and place == span_end // page_size
        if boundary:
            keys.boundaries[span_end] = digest(previous, tokens[place * page_size : span_end])
        previous = digest(previous, page)
        keys.pages.append(previous)
    if span_end % page_size and span_end // page_size == len(keys.pages):
        keys.boundaries[span_end] = digest(previous, tokens[len(keys.pages) * page_size : span_end])
    keys.spans = ((0, span_end),) if span_end else ()
    return keys


def published(manager: PageManager, owner: SequenceId, keys: PrefixKeys, num_positions: int) -> tuple[int, ...]:
    """The pages of a new owner that has published so many positions."""
    pages = manager.allocate(owner, NOTHING, num_positions).pages
    manager.publish(owner, keys, num_positions)
    return pages


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("span_end", [8, 6, 32, 37, 40])
def test_what_sequences_that_share_an_image_would_free_is_what_they_free(span_end, starts):
    manager, keys = PageManager(30, 4), keys_of(list(range(40)), 4, span_end)
    published(manager, A, keys, span_end)
    manager.release(A)
    match = manager.match(keys, span_end)
    for owner, num_positions in ((A, 5), (B, 9), (C, 1)):
        manager.allocate(owner, match, span_end + num_positions)
    dropped = manager.dropped_with(match if starts else NOTHING)
    expected = [manager.num_freed(owner, dropped) for owner in (A, B, C)]
    if starts:
        manager.allocate(SequenceId(4), match, span_end + 2)
    freed = []
    for owner in (A, B, C):
        before = manager.num_available
        manager.release(owner)
        check_books(manager)
        freed.append(manager.num_available - before)
    assert freed == expected


def test_the_end_of_an_answer_before_an_image_is_found_where_the_image_is_not():
    """Positions [6, 14) see each other; those up to 6 are an earlier turn."""
    manager, keys = PageManager(8, 4), keys_of(list(range(20)), 4)
    keys.spans, keys.boundaries = ((6, 14),), {6: digest("answer"), 14: digest("image")}
    pages = published(manager, A, keys, 14)
    manager.release(A)
    assert manager.match(keys, 19) == PrefixMatch(pages[:4], 14, is_partial_last=True)
    manager.allocate(B, NOTHING, 20)  # evicts the end of the image
    manager.publish(B, keys_of(list(range(50, 70)), 4), 20)
    assert manager.match(keys, 19).num_positions in (4, 6)
    assert manager.match(keys, 19) == PrefixMatch(pages[:2], 6, is_partial_last=True)


def test_pages_are_found_only_after_they_are_published():
    manager, keys = PageManager(8, 4), keys_of(list(range(12)), 4)
    pages = manager.allocate(A, NOTHING, 12).pages
    assert manager.match(keys, 12) == NOTHING
    manager.publish(A, keys, 9)
    assert manager.match(keys, 12) == PrefixMatch(pages[:2], 8)


def test_a_match_never_exceeds_the_positions_that_are_asked_for():
    manager, keys = PageManager(8, 4), keys_of(list(range(12)), 4)
    published(manager, A, keys, 12)
    assert manager.match(keys, 11).num_positions == 8


def test_another_root_finds_nothing():
    manager = PageManager(8, 4)
    published(manager, A, keys_of(list(range(8)), 4), 8)
    assert manager.match(keys_of(list(range(8)), 4, root="another tenant"), 8) == NOTHING


def test_pages_are_shared_by_reference_and_freed_when_the_last_owner_leaves():
    manager, keys = PageManager(8, 4), keys_of(list(range(8)), 4)
    pages = published(manager, A, keys, 8)
    assert manager.allocate(B, manager.match(keys, 8), 10).pages[:2] == pages
    manager.release(A)
    assert manager.num_held == 3
    manager.release(B)
    assert manager.num_held == 0
    assert manager.match(keys, 8).pages == pages, "cached pages can still be found"


def test_a_partial_page_is_shared_by_a_copy_whose_source_is_held_until_the_step_is_complete():
    manager, tokens = PageManager(5, 4), list(range(7))
    keys = keys_of(tokens, 4, span_end=6)
    pages = published(manager, A, keys, 6)
    manager.release(A)
    match = manager.match(keys, 6)
    assert match == PrefixMatch(pages, 6, is_partial_last=True)
    assert manager.num_needed(match, 8) == 3, "a copy, and two cached pages that become held"
    allocation = manager.allocate(B, match, 8)
    assert allocation.copies == (PageCopy(pages[1], allocation.pages[1]),)
    assert allocation.pages[0] == pages[0] != allocation.pages[1]
    manager.commit_copies(B, ONE)
    manager.release(B, {ONE})
    assert manager.num_available == 3, "the source is held, the target quarantined; nothing writes the shared page"
    manager.complete(ONE)
    assert manager.num_available == 5


def test_a_copy_that_no_step_makes_gives_its_source_back_with_its_owner():
    manager, keys = PageManager(5, 4), keys_of(list(range(7)), 4, span_end=6)
    published(manager, A, keys, 6)
    manager.release(A)
    manager.allocate(B, manager.match(keys, 6), 8)
    manager.release(B)
    assert manager.num_held == 0


def test_a_span_is_shared_whole_or_not_at_all():
    manager, keys = PageManager(8, 4), keys_of(list(range(16)), 4, span_end=10)
    pages = published(manager, A, keys, 9)
    assert manager.match(keys, 16) == NOTHING
    manager.publish(A, keys, 10)
    assert manager.match(keys, 16) == PrefixMatch(pages, 10, is_partial_last=True)


def test_positions_before_a_span_are_shared_though_the_span_is_not():
    manager, keys = PageManager(8, 4), keys_of(list(range(16)), 4)
    keys.spans = ((5, 13),)
    pages = published(manager, A, keys, 12)
    assert manager.match(keys, 16) == PrefixMatch(pages[:1], 4)


def test_pages_that_a_prefill_writes_are_quarantined_until_it_is_complete():
    manager = PageManager(2, 4)
    manager.allocate(A, NOTHING, 8)
    manager.release(A, {ONE, TWO})
    manager.complete(ONE)
    assert manager.num_available == 0
    manager.complete(TWO)
    assert manager.num_available == 2


def test_the_least_recently_used_chain_is_evicted_first_and_its_end_before_its_start():
    manager = PageManager(5, 4)
    old, new = keys_of(list(range(8)), 4), keys_of(list(range(100, 108)), 4)
    published(manager, A, old, 8)
    published(manager, B, new, 8)
    manager.release(A)
    manager.release(B)
    manager.allocate(C, NOTHING, 8)  # the free page, and one that is evicted
    assert manager.match(old, 8).num_positions == 4
    assert manager.match(new, 8).num_positions == 8


def test_a_page_in_use_is_never_evicted():
    manager, keys = PageManager(3, 4), keys_of(list(range(8)), 4)
    published(manager, A, keys, 8)
    manager.allocate(B, NOTHING, 4)
    assert manager.num_available == 0
    with pytest.raises(AssertionError, match="num_available"):
        manager.append(B, 5)


def test_after_a_failure_nothing_is_found():
    manager, keys = PageManager(4, 4), keys_of(list(range(8)), 4)
    published(manager, A, keys, 8)
    manager.release(A)
    manager.forget_cached()
    assert manager.match(keys, 8) == NOTHING
    assert manager.num_available == 4


def test_what_belongs_to_one_namespace_or_one_image_of_it_can_be_forgotten():
    manager = PageManager(8, 4)
    scopes = [
        CacheScope("mine", frozenset({b"cat"})),
        CacheScope("mine", frozenset({b"dog"})),
        CacheScope("yours", frozenset({b"cat"})),
    ]
    all_keys = [keys_of([place] * 8, 4) for place in range(3)]
    for owner, keys, scope in zip((A, B, C), all_keys, scopes, strict=True):
        keys.scope = scope
        published(manager, owner, keys, 8)
    manager.release(A)

    def found() -> list[bool]:
        check_books(manager)
        return [manager.match(keys, 8) != NOTHING for keys in all_keys]

    assert (manager.forget_cached("mine", b"cat"), found()) == (2, [False, True, True])
    assert (manager.forget_cached("mine"), found()) == (2, [False, False, True])
    assert (manager.forget_cached(), found()) == (2, [False, False, False])
    assert manager.num_available == 4, "the pages that have owners stay theirs"


# Random schedules


def test_the_oldest_page_is_that_which_was_published_first_and_not_replaced():
    manager = PageManager(3, 2)
    for now, owner, tokens in ((100.0, A, [1, 2]), (101.0, B, [3, 4]), (102.0, C, [1, 2])):
        manager.allocate(owner, NOTHING, 2)
        manager.publish(owner, keys_of(tokens, 2), 2, replaces=owner is C, now=now)
    assert manager.oldest_published_at() == 101.0, "that of 100.0 was replaced"


def test_transient_pages_are_evicted_before_all_others_their_end_first():
    manager, kept, passing = PageManager(8, 4), keys_of(list(range(10)), 4), keys_of(list(range(50, 70)), 4)
    published(manager, A, kept, 10)
    manager.release(A)
    pages = manager.allocate(B, NOTHING, 16).pages
    manager.publish(B, passing, 16, is_transient=True)
    manager.release(B)
    assert manager.match(passing, 16).pages == pages
    manager.allocate(C, NOTHING, 12)
    assert manager.match(passing, 16).pages == pages[:3]
    manager.append(C, 24)
    assert manager.match(passing, 16) == NOTHING
    assert manager.match(kept, 10).num_positions == 8
    assert manager.num_evictions == 0
    check_books(manager)


def test_transient_pages_in_quarantine_are_evicted_first_once_their_step_is_complete():
    manager, kept, passing = PageManager(5, 4), keys_of(list(range(8)), 4), keys_of(list(range(50, 58)), 4)
    manager.allocate(A, NOTHING, 8)
    manager.publish(A, passing, 8, is_transient=True)
    manager.release(A, writing=[ONE])
    published(manager, B, kept, 8)
    manager.release(B)
    manager.complete(ONE)
    manager.allocate(C, NOTHING, 12)
    assert manager.match(passing, 8) == NOTHING
    assert manager.match(kept, 8).num_positions == 8
    check_books(manager)


def test_pages_that_a_lasting_request_would_publish_too_stay():
    manager, keys = PageManager(8, 4), keys_of(list(range(8)), 4)
    manager.allocate(A, NOTHING, 8)
    manager.allocate(B, NOTHING, 8)
    manager.publish(A, keys, 8, is_transient=True)
    manager.publish(B, keys, 8)
    manager.release(A)
    manager.release(B)
    assert manager.match(keys, 8).num_positions == 8
    check_books(manager)
