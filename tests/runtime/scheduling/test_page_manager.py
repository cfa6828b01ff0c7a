"""Shared pages: what is found, what is copied, what may be reused when, and random schedules against a device.

The random schedules check the books after each turn (`page_books`), and the device what a step reads. The mutations
at the end are found: a wrong reference count, an early publication, a release without quarantine or without waits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from random import Random

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
from tests.runtime.scheduling.page_books import check_books
from tests.runtime.scheduling.simulated_device import Access, DeviceStep, SimulatedDevice

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


def test_pages_are_found_only_after_they_are_published():
    manager, keys = PageManager(8, 4), keys_of(list(range(12)), 4)
    manager.allocate(A, NOTHING, 12)
    assert manager.match(keys, 12) == NOTHING
    manager.publish(A, keys, 9)
    assert manager.match(keys, 12) == PrefixMatch(manager.pages_of(A)[:2], 8)


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
    published(manager, A, keys, 9)
    assert manager.match(keys, 16) == NOTHING
    manager.publish(A, keys, 10)
    assert manager.match(keys, 16) == PrefixMatch(manager.pages_of(A), 10, is_partial_last=True)


def test_positions_before_a_span_are_shared_though_the_span_is_not():
    manager, keys = PageManager(8, 4), keys_of(list(range(16)), 4)
    keys.spans = ((5, 13),)
    published(manager, A, keys, 12)
    assert manager.match(keys, 16) == PrefixMatch(manager.pages_of(A)[:1], 4)


def test_pages_that_a_prefill_writes_are_quarantined_until_it_is_complete():
    manager = PageManager(2, 4)
    manager.allocate(A, NOTHING, 8)
    manager.release(A, {ONE, TWO})
    manager.complete(ONE)
    assert manager.num_available == 0
    manager.complete(TWO)
    assert manager.num_available == 2


def test_pages_that_only_a_decode_step_writes_go_at_once_to_steps_that_wait_for_it():
    manager = PageManager(2, 4)
    manager.allocate(A, NOTHING, 8)
    manager.release(A, (), TWO)
    assert manager.allocate(B, NOTHING, 4).after == {TWO}
    manager.complete(TWO)
    assert manager.allocate(C, NOTHING, 4).after == frozenset()


def test_a_wait_outlives_a_quarantine():
    manager = PageManager(2, 4)
    manager.allocate(A, NOTHING, 8)
    manager.release(A, {ONE}, TWO)
    manager.complete(ONE)
    assert manager.allocate(B, NOTHING, 8).after == {TWO}


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


def test_children_share_full_pages_and_copy_the_last():
    manager = PageManager(6, 4)
    pages = manager.allocate(A, NOTHING, 6).pages
    allocation = manager.fork(A, (B, C), 6)
    assert [copy.source for copy in allocation.copies] == [pages[1], pages[1]]
    assert manager.pages_of(B)[0] == manager.pages_of(C)[0] == pages[0]
    assert len({manager.pages_of(owner)[1] for owner in (A, B, C)}) == 3
    for owner in (B, C):
        manager.commit_copies(owner, ONE)
    for owner in (A, B, C):
        manager.release(owner)
    assert manager.num_held == 1, "the source of the copies"
    manager.complete(ONE)
    assert manager.num_held == 0


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


@dataclass(eq=False)
class Request:
    """A prompt, what it generates, and how far it has come."""

    id: SequenceId
    tokens: list[int]
    num_prompt: int
    keys: PrefixKeys
    span_end: int
    num_computed: int = 0
    num_complete: int = 0
    """Positions that completed steps have written."""
    copies: tuple[PageCopy, ...] = ()
    after: frozenset[StepId] = frozenset()
    writing: set[StepId] = field(default_factory=set)
    last_decode: StepId | None = None
    is_active: bool = False
    has_left: bool = False

    def content(self, position: int) -> object:
        """What the position must hold: it depends on all tokens that it sees."""
        seen = max(position + 1, self.span_end if position < self.span_end else 0)
        return (seen, hash(tuple(self.tokens[:seen])), position)


class Schedule:
    """Requests that share prefixes, come, go, fail and are cancelled at random, on a simulated device."""

    def __init__(self, seed: int, manager_class: type[PageManager] = PageManager) -> None:
        self.random = Random(seed)
        self.page_size = self.random.choice((1, 2, 3, 4))
        num_pages = self.random.randrange(6, 20)
        self.manager = manager_class(num_pages, self.page_size)
        self.device = SimulatedDevice(num_pages, self.page_size, self.random)
        self.requests: list[Request] = []
        self.in_flight: dict[str, list[DeviceStep]] = {"prefill": [], "decode": []}
        self.num_ids = 0
        self.num_shared = 0

    def run(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.turn()
        while any(self.in_flight.values()):
            self.complete(self.random.choice([name for name, steps in self.in_flight.items() if steps]))
        for request in list(self.requests):
            self.leave(request)
        assert self.manager.num_held == 0, "pages are left"

    def turn(self) -> None:
        if self.random.random() < 0.4 and len(self.requests) < 6:
            self.arrive()
        if self.random.random() < 0.1 and self.requests:
            self.leave(self.random.choice(self.requests))
        if self.random.random() < 0.015:
            self.fail()
        self.device.run_some()
        for name, steps in self.in_flight.items():
            if steps and (len(steps) >= 3 or self.random.random() < 0.5):
                self.complete(name)
        actions = [self.launch_decode, self.admit, self.launch_prefill]
        self.random.shuffle(actions)
        for action in actions:
            action()
        check_books(self.manager)

    def arrive(self) -> None:
        self.num_ids += 1
        family = self.random.randrange(3)  # an image, or none, that many requests are about
        length = self.random.choice((5, 9)) if family else 0
        prefix = [1000 + 10 * family + length] * length  # image positions name the image
        prompt = prefix + [self.random.randrange(2) for _ in range(self.random.randrange(1, 9))]
        span_end = len(prefix)
        tokens = prompt + [self.random.randrange(2) for _ in range(self.random.randrange(1, 16))]
        keys = keys_of(tokens, self.page_size, span_end)
        self.requests.append(Request(SequenceId(self.num_ids), tokens, len(prompt), keys, span_end))

    def admit(self) -> None:
        for request in self.requests:
            if request.is_active:
                continue
            match = self.manager.match(request.keys, request.num_prompt - 1)
            if self.manager.num_needed(match, request.num_prompt) > self.manager.num_available:
                return
            allocation = self.manager.allocate(request.id, match, request.num_prompt)
            request.is_active = True
            request.copies, request.after = allocation.copies, allocation.after
            request.num_computed = request.num_complete = match.num_positions
            self.num_shared += match.num_positions

    def launch_prefill(self) -> None:
        if len(self.in_flight["prefill"]) == 2:
            return
        accesses: list[Access] = []
        copies: list[tuple[int, int]] = []
        after: set[StepId] = set()
        members: list[tuple[Request, int]] = []
        step = self.next_step()
        for request in self.requests:
            if not request.is_active or request.num_computed >= request.num_prompt:
                continue
            end = request.num_prompt if self.random.random() < 0.6 else request.num_computed + 1
            end = max(end, request.span_end)
            accesses.append(self.access(request, request.num_computed, end))
            copies += [(copy.source, copy.target) for copy in request.copies]
            after |= request.after
            self.manager.commit_copies(request.id, step)
            request.copies, request.after = (), frozenset()
            request.num_computed = end
            request.writing.add(step)
            members.append((request, end))
        if members:
            self.launch(DeviceStep(step, "prefill", accesses, copies, frozenset(after), members))

    def launch_decode(self) -> None:
        if len(self.in_flight["decode"]) == 3:
            return
        accesses: list[Access] = []
        after: set[StepId] = set()
        members: list[tuple[Request, int]] = []
        step = self.next_step()
        for request in self.requests:
            is_promoted = bool(request.writing) and self.random.random() < 0.5
            if (
                request.num_computed < request.num_prompt
                or request.num_computed >= len(request.tokens)
                or not (is_promoted or not request.writing)
            ):
                continue
            if len(self.manager.pages_of(request.id)) * self.page_size <= request.num_computed:
                if not self.manager.num_available:
                    continue
                after |= self.manager.append(request.id, request.num_computed + 1).after
            after |= request.writing
            accesses.append(self.access(request, request.num_computed, request.num_computed + 1))
            request.num_computed += 1
            request.last_decode = step
            members.append((request, request.num_computed))
        if members:
            self.launch(DeviceStep(step, "decode", accesses, [], frozenset(after), members))

    def access(self, request: Request, start: int, end: int) -> Access:
        content = [request.content(position) for position in range(len(request.tokens))]
        return Access(self.manager.pages_of(request.id), content, start, end)

    def next_step(self) -> StepId:
        self.num_ids += 1
        return StepId(self.num_ids)

    def launch(self, step: DeviceStep) -> None:
        self.device.launch(step)
        self.in_flight[step.stream].append(step)

    def complete(self, name: str) -> None:
        step = self.in_flight[name].pop(0)
        self.device.run_until(step.id)
        self.manager.complete(StepId(step.id))
        for request, end in step.sequences:
            request.writing.discard(step.id)
            if request.has_left:
                continue
            request.num_complete = max(request.num_complete, end)
            self.manager.publish(request.id, request.keys, request.num_complete)
            if request.last_decode == step.id:
                request.last_decode = None
            # The end is known when its step is complete: later steps in flight still contain the sequence.
            if end >= len(request.tokens) or (end > request.num_prompt and self.random.random() < 0.1):
                self.leave(request)

    def leave(self, request: Request) -> None:
        self.requests.remove(request)
        request.has_left = True
        for steps in self.in_flight.values():  # whose output for it is dropped from now on
            for step in steps:
                for (member, _), access in zip(step.sequences, step.accesses, strict=True):
                    access.counts = access.counts and member is not request
        in_flight = {step.id for step in self.in_flight["decode"]}
        last = request.last_decode if request.last_decode in in_flight else None
        self.manager.release(request.id, set(request.writing), last)

    def fail(self) -> None:
        """A step failed: the steps in flight are dropped, and all requests start over."""
        while self.device.run_one():
            pass
        for steps in self.in_flight.values():
            for step in steps:
                self.manager.complete(StepId(step.id))
            steps.clear()
        for request in self.requests:
            self.manager.release(request.id)
            request.num_computed = request.num_complete = 0
            request.writing.clear()
            request.last_decode, request.is_active = None, False
            request.copies, request.after = (), frozenset()
        self.manager.forget_cached()


NUM_SCHEDULES, NUM_TURNS = 150, 120


def run_schedules(manager_class: type[PageManager]) -> int:
    """Run many schedules; how many positions were shared."""
    schedules = [Schedule(seed, manager_class) for seed in range(NUM_SCHEDULES)]
    for schedule in schedules:
        schedule.run(NUM_TURNS)
    return sum(schedule.num_shared for schedule in schedules)


def test_no_schedule_reads_what_another_sequence_wrote():
    assert run_schedules(PageManager) > 1000, "the schedules share prefixes"


class ForgetsAReference(PageManager):
    def _take(self, page):
        super()._take(page)
        if self._pages[page].references == 2:
            self._pages[page].references = 1


class PublishesUnwrittenPositions(PageManager):
    def publish(self, owner, keys, num_positions, *, replaces=False, now=0.0):
        capacity = len(self.pages_of(owner)) * self.page_size
        super().publish(owner, keys, min(num_positions + self.page_size - 1, capacity), replaces=replaces, now=now)


class ReleasesWithoutQuarantine(PageManager):
    def release(self, owner, writing=(), last_decode=None):
        super().release(owner, (), last_decode)


class ReleasesWithoutWaits(PageManager):
    def release(self, owner, writing=(), last_decode=None):
        super().release(owner, writing, None)


class CopiesNothing(PageManager):
    def allocate(self, owner, match, num_positions):
        return super().allocate(owner, match, num_positions)._replace(copies=())


class EndsWaitsWithTheQuarantine(PageManager):
    def complete(self, step):
        pages = [page for page in self._steps.get(step, ()) if step in self._pages[page].writing]
        super().complete(step)
        for page in pages:
            self._pages[page].after.clear()


@pytest.mark.parametrize(
    "mutation",
    [
        ForgetsAReference,
        PublishesUnwrittenPositions,
        ReleasesWithoutQuarantine,
        ReleasesWithoutWaits,
        CopiesNothing,
        EndsWaitsWithTheQuarantine,
    ],
)
def test_the_random_schedules_find_each_mutation(mutation):
    with pytest.raises(AssertionError):
        run_schedules(mutation)
