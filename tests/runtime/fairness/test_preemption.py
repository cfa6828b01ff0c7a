"""Y1 to Y3 are the rules in the docstring of `kestrel_runtime.fairness.preemption`."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from kestrel_runtime.api.requests import Priority
from kestrel_runtime.fairness.preemption import MIN_TOKENS
from kestrel_runtime.scheduling.sequence import SequenceState
from tests.runtime.world import World

WAITING, FINISHED = SequenceState.WAITING, SequenceState.FINISHED
DEMANDS = {"greedy": (0.2, 100, 60), "steady": (0.3, 8, 4), "rare": (0.02, 60, 30)}
"""The chance that a sequence comes in a step, and how long prompts and answers are at most."""


def flood(world, count, *, tenant="flood", prompt=4, **wants):
    return [world.add(prompt, tenant=tenant, **wants) for _ in range(count)]


def rows(world):
    return Counter(sequence.tenant for sequence in world.active())


def steps_until(world, is_so, at_most=200):
    for number in range(at_most):
        if is_so():
            return number
        world.step()
    raise AssertionError(f"not within {at_most} steps")


def test_y1_a_row_of_the_tenant_that_has_all_yields_and_returns_with_its_tokens():
    world = World(batch=4)
    sequences = flood(world, 6)
    world.steps(3)
    question = world.add(tenant="modest", generates=2)
    tokens = list(sequences[3].tokens)
    assert [chunk.sequence for chunk in world.step().prefill] == [question]
    assert (sequences[3].state, sequences[3].tokens, sequences[3].cache.pages) == (WAITING, tokens, [])
    world.step()
    assert question.state is FINISHED
    assert [chunk.sequence for chunk in world.step().prefill] == [sequences[3]]
    assert sequences[3].tokens[:-1] == tokens


def test_y1_tenants_that_want_all_rows_get_equal_numbers_and_nobody_yields_then():
    world = World(num_pages=2000, batch=9)
    flood(world, 20)
    world.steps(2)
    for tenant in ("second", "third"):
        flood(world, 20, tenant=tenant)
        world.step()
    assert set(rows(world).values()) == {3}
    world.scheduler.take_preempted()
    world.steps(100)
    assert world.scheduler.take_preempted() == []
    assert set(rows(world).values()) == {3}


def test_y1_short_requests_take_rows_from_long_ones_up_to_their_share_without_further_preemptions():
    world = World(num_pages=2000, batch=8)
    flood(world, 16)
    world.steps(2)
    waiting = flood(world, 200, tenant="modest", generates=1)
    world.step()
    assert len(world.scheduler.take_preempted()) == 4
    steps_until(world, lambda: waiting[-5].state is FINISHED, at_most=60)
    assert world.scheduler.take_preempted() == [], "a row that becomes free goes to the tenant that has fewer"


@pytest.mark.parametrize("priority", Priority)
def test_y1_priorities_do_not_change_shares(priority):
    world = World(batch=4)
    flood(world, 8, priority=priority)
    world.steps(2)
    question = world.add(tenant="modest", generates=1)
    world.step()
    assert question.state is FINISHED


def test_y1_pages_yield_as_rows_do():
    world = World(num_pages=32, page_size=4, batch=8)
    flood(world, 3, prompt=20)
    steps_until(world, lambda: world.pages.num_available < 5)
    question = world.add(30, tenant="modest", generates=1)
    world.step()
    assert question.state is FINISHED
    assert rows(world)["flood"] >= 1


def test_y1_a_tenant_that_has_a_row_takes_no_more_pages_than_leave_equal_shares():
    world = World(num_pages=32, page_size=4, batch=8)
    (large,) = flood(world, 1, prompt=60)
    flood(world, 1, prompt=20)
    world.add(30, tenant="modest")
    world.step()
    world.add(30, tenant="modest")
    world.steps(3)
    assert large in world.active()
    assert rows(world) == {"flood": 2, "modest": 1}


def test_y1_two_tenants_take_turns_with_the_only_row_in_slices_that_pay():
    world = World(num_pages=200, batch=1)
    first = world.add(10, tenant="first", generates=200)
    second = world.add(10, tenant="second", generates=200)
    num_turns = 0
    while not world.scheduler.is_idle:
        before = first.num_generated, second.num_generated
        world.step()
        num_turns += len(world.scheduler.take_preempted())
        assert abs(first.num_generated - second.num_generated) <= 210 or FINISHED in (first.state, second.state)
        assert (first.num_generated, second.num_generated) != before
    assert 2 <= num_turns <= 20, "each turn computes a prompt anew, and lasts for as many tokens"


def test_y1_nobody_yields_for_what_could_not_start_anyway():
    world = World(num_pages=32, page_size=4, batch=2)
    world.add(100, tenant="other", generates=50)
    flood(world, 1, prompt=8)
    world.step()
    world.add(120, tenant="third")
    world.steps(2)
    assert world.scheduler.take_preempted() == []


def test_y2_who_has_returned_gets_some_tokens_before_it_yields_again():
    world = World(num_pages=400, batch=2)
    sequences = flood(world, 2)
    progress = {sequence: [] for sequence in sequences}
    for _ in range(60):
        world.step()
        question = world.add(tenant="modest", generates=1)
        steps_until(world, lambda question=question: question.state is FINISHED)
        for sequence in world.scheduler.take_preempted():
            progress[sequence].append(sequence.num_generated)
    for tokens in progress.values():
        assert all(later - earlier >= MIN_TOKENS for earlier, later in pairwise(tokens))
    assert sum(map(len, progress.values())) > 4


def test_y2_a_prompt_that_is_not_being_computed_yet_yields_first():
    world = World(batch=4, prefill=8)
    sequences = flood(world, 4, prompt=20)
    world.step()
    question = world.add(tenant="modest", generates=1)
    world.step()
    assert (question.state, sequences[3].state) == (FINISHED, WAITING)


def test_y3_where_pages_run_out_the_youngest_of_the_largest_tenant_is_preempted():
    world = World(num_pages=12, page_size=2, batch=8)
    sequences = flood(world, 3, prompt=2)
    world.step()
    question = world.add(2, tenant="modest", generates=5)
    preempted = []
    while question.state is not FINISHED:
        world.step()
        preempted += world.scheduler.take_preempted()
    assert question.num_generated == 5
    assert preempted == [sequences[2]]


def test_the_prompt_of_the_tenant_that_was_served_least_is_computed_first():
    world = World(batch=8, prefill=10)
    flood(world, 4, prompt=40)
    world.step()
    question = world.add(5, tenant="modest", generates=1)
    assert world.step().prefill[0] == (question, 0, 5)
    assert question.state is FINISHED


def test_long_prompts_are_cut_smaller_while_a_tenant_that_was_served_less_is_active_and_for_another_second():
    world = World(num_pages=200, batch=8, prefill=40, prefill_of_others=10)
    world.add(5, tenant="modest", generates=10)
    world.step()
    (long,) = flood(world, 1, prompt=200)
    steps = [world.step().prefill for _ in range(9)]
    assert steps == [[(long, 10 * number, 10 * number + 10)] for number in range(9)]
    assert world.active() == [long]
    world.now += 0.9
    assert world.step().prefill == [(long, 90, 100)]
    world.now += 0.2
    assert world.step().prefill == [(long, 100, 140)]


def test_prompts_of_a_single_tenant_are_cut_as_long_as_a_step_takes():
    world = World(num_pages=200, batch=8, prefill=40, prefill_of_others=10)
    (long,) = flood(world, 1, prompt=200)
    assert world.step().prefill == [(long, 0, 40)]


def test_with_a_single_tenant_nobody_yields():
    world = World(batch=4)
    sequences = flood(world, 8, tenant="", priority=Priority.BATCH)
    world.steps(3)
    world.add(priority=Priority.INTERACTIVE)
    world.steps(5)
    assert world.active() == sequences[:4]
    assert world.scheduler.take_preempted() == []


@pytest.mark.parametrize("seed", range(12))
def test_tenants_of_any_demand_all_finish_with_what_they_would_have_got_alone(seed):
    """`World` checks what steps read and which tokens sequences get."""
    random = Random(seed)
    page_size = random.choice((1, 4, 8))
    world = World(
        num_pages=random.randrange(200, 400) // page_size,
        page_size=page_size,
        batch=random.randrange(1, 7),
        prefill=random.choice((5, 30, 1000)),
    )
    here, preempted, lost = [], Counter(), Counter()

    def step():
        computed = {
            sequence for sequence in world.active() if sequence.cache.num_cached > sequence.cache.num_matched
        }
        world.step()
        gave_way = world.scheduler.take_preempted()
        preempted.update(gave_way)
        lost.update(sequence for sequence in gave_way if sequence in computed)

    for _ in range(250):
        for tenant in ("greedy", "steady", "rare"):
            chance, max_prompt, max_tokens = DEMANDS[tenant]
            if random.random() < chance:
                prompt, generates = random.randrange(1, max_prompt), random.randrange(1, max_tokens)
                here.append(world.add(prompt, tenant=tenant, generates=generates))
        if here and random.random() < 0.02:
            sequence = random.choice(here)
            if sequence.state is not FINISHED:
                world.scheduler.remove(sequence)
        step()
    for _ in range(4000):
        if world.scheduler.is_idle:
            break
        step()
    assert world.scheduler.is_idle, "a sequence never finishes"
    assert world.pages.num_held == 0
    assert preempted.total() > 0
    for sequence, count in lost.items():
        assert count <= 2 + sequence.num_generated / MIN_TOKENS, "its prompt is not computed again and again"
