"""W1 to W4 are the rules in the docstring of `kestrel_runtime.fairness.waiting_queue`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel_runtime.api.requests import Priority
from kestrel_runtime.fairness.waiting_queue import WaitingQueue
from kestrel_runtime.scheduling.sequence import TokenSequence
from tests.runtime.sequences import new_sequence

INTERACTIVE, NORMAL, BATCH = Priority


@pytest.fixture
def queue() -> WaitingQueue:
    return WaitingQueue(ageing_s=10.0)


def push(queue: WaitingQueue, *sequences: TokenSequence) -> None:
    for sequence in sequences:
        queue.push(sequence)


def start_all(queue: WaitingQueue, now: float = 0.0) -> list[TokenSequence]:
    """All entries, in the order in which they start."""
    started: list[TokenSequence] = []
    while (sequence := queue.first(now)) is not None:
        queue.start(sequence)
        started.append(sequence)
    return started


def test_an_empty_queue_returns_no_entry(queue: WaitingQueue):
    assert queue.first(0.0) is None
    assert len(queue) == 0


def test_w1_preempted_items_come_first_the_oldest_before_others(queue: WaitingQueue):
    oldest, youngest, urgent = new_sequence(), new_sequence(), new_sequence(priority=INTERACTIVE)
    push(queue, oldest, youngest)
    assert start_all(queue) == [oldest, youngest]
    push(queue, urgent)
    queue.push_returning(youngest, 2)
    queue.push_returning(oldest, 1)
    assert list(queue) == [oldest, youngest, urgent]
    assert start_all(queue) == [oldest, youngest, urgent]


def test_w1_a_second_start_is_not_counted_as_service(queue: WaitingQueue):
    returning = new_sequence(100, tenant="a")
    push(queue, returning)
    queue.start(returning)
    queue.push_returning(returning, 1)
    queue.start(returning)
    own, other = new_sequence(1, tenant="a"), new_sequence(101, tenant="b")
    push(queue, other, own)  # b has had nothing, a its prompt of 100 once
    assert start_all(queue) == [other, own]


def test_w2_the_more_urgent_start_first(queue: WaitingQueue):
    batch, normal, interactive = (new_sequence(priority=priority) for priority in (BATCH, NORMAL, INTERACTIVE))
    push(queue, batch, normal, interactive)
    assert start_all(queue) == [interactive, normal, batch]


@pytest.mark.parametrize(("age_s", "passes"), [(9.9, False), (10.1, False), (19.9, False), (20.1, True)])
def test_w2_waiting_raises_a_sequence_by_a_level_every_ten_seconds(queue: WaitingQueue, age_s: float, passes: bool):
    old, newest = new_sequence(priority=BATCH), new_sequence(priority=INTERACTIVE, submitted=age_s)
    push(queue, old, newest)
    assert queue.first(age_s) is (old if passes else newest)


def test_w2_an_endless_run_of_urgent_requests_starves_no_other_request(queue: WaitingQueue):
    patient = new_sequence(priority=BATCH)
    push(queue, patient)
    for second in range(1, 40):
        push(queue, *(new_sequence(priority=INTERACTIVE, submitted=float(second)) for _ in range(3)))
        for _ in range(2):  # more come than start
            first = queue.first(float(second))
            assert first is not None
            queue.start(first)
            if first is patient:
                assert second == 20
                return
    pytest.fail("the batch request never started")


def test_w3_tenants_take_turns_whatever_the_length_of_their_lines(queue: WaitingQueue):
    flood = [new_sequence(10, tenant="flood") for _ in range(20)]
    modest = [new_sequence(10, tenant="modest") for _ in range(3)]
    push(queue, *flood, *modest)
    assert [sequence.tenant for sequence in start_all(queue)[:6]].count("modest") == 3


def test_w3_old_backlog_does_not_come_before_another_tenants_newcomer(queue: WaitingQueue):
    push(queue, *(new_sequence(10, tenant="flood") for _ in range(50)))
    first = queue.first(0.0)
    assert first is not None
    queue.start(first)
    newest = new_sequence(10, tenant="modest", submitted=300.0)
    push(queue, newest)
    assert queue.first(300.0) is newest


@pytest.mark.parametrize("backlog", Priority)
@pytest.mark.parametrize("newest", Priority)
def test_w2_age_brings_no_tenant_before_another_that_is_as_urgent(
    queue: WaitingQueue, backlog: Priority, newest: Priority
):
    push(queue, *(new_sequence(10, tenant="flood", priority=backlog) for _ in range(50)))
    first = queue.first(0.0)
    assert first is not None
    queue.start(first)
    other = new_sequence(10, tenant="modest", submitted=5.0, priority=newest)
    push(queue, other)
    standing = max(newest, NORMAL)
    assert (queue.first(5.0) is other) is (standing <= max(backlog, NORMAL))
    assert (queue.first(24.9) is other) is (standing <= max(backlog, NORMAL) or standing is NORMAL)
    assert queue.first(25.1) is other


def test_w2_a_priority_counts_between_tenants_as_far_as_the_tenant_may(queue: WaitingQueue):
    urgent = [new_sequence(10, tenant="flood", priority=INTERACTIVE) for _ in range(20)]
    push(queue, *urgent, new_sequence(10, tenant="modest"), new_sequence(10, tenant="patient", priority=BATCH))
    preferred = [
        new_sequence(10, tenant="preferred", priority=INTERACTIVE, max_priority=INTERACTIVE) for _ in range(2)
    ]
    push(queue, new_sequence(10, tenant="preferred", max_priority=INTERACTIVE), *preferred)
    tenants = [sequence.tenant for sequence in start_all(queue)]
    assert tenants[:2] == ["preferred"] * 2
    assert set(tenants[2:4]) == {"flood", "modest"}
    assert tenants[-1] == "patient"


def test_w3_the_tenant_with_the_smallest_share_comes_first_however_much_it_was_served(queue: WaitingQueue):
    push(queue, new_sequence(1000, tenant="served"), new_sequence(10, tenant="other"))
    start_all(queue)
    small, large = new_sequence(tenant="served"), new_sequence(tenant="other")
    push(queue, large, small)
    assert queue.first(0.0) is large
    assert queue.first(0.0, lambda: {"served": 0.25, "other": 0.5}.__getitem__) is small


def test_w2_age_still_counts_within_a_tenant(queue: WaitingQueue):
    aged, urgent = new_sequence(tenant="a", priority=NORMAL), new_sequence(tenant="a", submitted=11.0)
    push(queue, new_sequence(tenant="b", priority=BATCH), aged, urgent)
    newest = new_sequence(tenant="a", submitted=12.0, priority=INTERACTIVE)
    push(queue, newest)
    assert [item for item in start_all(queue, now=12.0) if item.tenant == "a"] == [aged, newest, urgent]


def test_who_may_not_start_is_passed_over_and_keeps_its_place(queue: WaitingQueue):
    first, second, third = (new_sequence(10) for _ in range(3))
    push(queue, first, second, third)
    assert queue.first(0.0, may_start=lambda item: item is not first) is second
    queue.start(second)
    assert queue.first(0.0, may_start=lambda _: False) is None
    assert start_all(queue) == [first, third]
    queue.push_returning(third, 2)
    queue.push_returning(first, 1)
    assert queue.first(0.0, may_start=lambda item: item is third) is third


def test_w3_shares_are_even_in_positions_and_not_in_requests(queue: WaitingQueue):
    push(queue, *(new_sequence(100, tenant="long") for _ in range(50)))
    push(queue, *(new_sequence(10, tenant="short") for _ in range(50)))
    tenants = [sequence.tenant for sequence in start_all(queue)[:44]]
    assert tenants.count("short") == 40
    assert tenants.count("long") == 4


def test_w3_generated_tokens_count_as_service(queue: WaitingQueue):
    talker, listener = new_sequence(10, tenant="talks"), new_sequence(10, tenant="listens")
    push(queue, talker, listener)
    start_all(queue)
    for _ in range(5):
        queue.serve([talker])
    push(queue, new_sequence(10, tenant="talks"), new_sequence(10, tenant="listens"))
    assert [sequence.tenant for sequence in start_all(queue)] == ["listens", "talks"]


def test_w3_idleness_earns_no_credit(queue: WaitingQueue):
    push(queue, new_sequence(10, tenant="idle"), *(new_sequence(10, tenant="busy") for _ in range(100)))
    for _ in range(90):
        first = queue.first(0.0)
        assert first is not None
        queue.start(first)
    push(queue, *(new_sequence(10, tenant="idle") for _ in range(10)))
    tenants = [sequence.tenant for sequence in start_all(queue)[:10]]
    assert 4 <= tenants.count("idle") <= 6


def test_w3_a_tenant_that_asks_one_at_a_time_earns_no_credit_in_a_pause(queue: WaitingQueue):
    def start_next() -> str:
        first = queue.first(0.0)
        assert first is not None
        queue.start(first)
        return first.tenant

    push(queue, new_sequence(50, tenant="a"))
    assert start_next() == "a"
    push(queue, *(new_sequence(10, tenant="b") for _ in range(60)))
    assert {start_next() for _ in range(50)} == {"b"}
    push(queue, new_sequence(10, tenant="a"))
    order = ""
    while len(order) < 6:
        tenant = start_next()
        order += tenant
        if tenant == "a":
            push(queue, new_sequence(10, tenant="a"))
    assert order.count("a") == 3


def test_w3_tenants_are_forgotten_once_they_no_longer_matter(queue: WaitingQueue):
    for number in range(1400):
        sequence = new_sequence(1, tenant=str(number))
        push(queue, sequence)
        queue.start(sequence)
    assert len(queue._tenants) < 1100  # memory shows in no other way


def test_w4_among_equals_the_first_submitted_starts_first(queue: WaitingQueue):
    late, early, tied = new_sequence(submitted=2.0), new_sequence(submitted=1.0), new_sequence(submitted=2.0)
    push(queue, late, early, tied)
    assert start_all(queue, now=2.0) == [early, late, tied]


ARRIVALS = st.lists(
    st.tuples(st.sampled_from(Priority), st.sampled_from("abc"), st.integers(0, 60), st.integers(1, 50)),
    max_size=30,
)


@given(ARRIVALS, st.data())
def test_each_entry_is_counted_listed_and_removed_exactly_once(
    arrivals: list[tuple[Priority, str, int, int]], data: st.DataObject
):
    queue = WaitingQueue(ageing_s=10.0)
    here: list[TokenSequence] = []
    for priority, tenant, submitted, length in arrivals:
        here.append(new_sequence(length, priority=priority, tenant=tenant, submitted=float(submitted)))
        push(queue, here[-1])
    started: list[TokenSequence] = []
    while here:
        assert len(queue) == len(here)
        assert set(queue) == set(here)
        first = queue.first(60.0)
        assert first in here
        match data.draw(st.sampled_from(["start", "remove", "preempt"])):
            case "start":
                queue.start(first)
                here.remove(first)
                started.append(first)
            case "remove":
                leaver = data.draw(st.sampled_from(here))
                queue.remove(leaver)
                here.remove(leaver)
            case _ if started:
                here.append(started.pop())
                queue.push_returning(here[-1], len(started))
            case _:
                pass
    assert queue.first(60.0) is None
    assert len(queue) == 0
