"""M1 and M2 are the rules in the docstring of `MemoryBudget`."""

import gc

import pytest

from kestrel_runtime.fairness.image_budget import MemoryBudget


class Thing:
    """Something that takes memory."""


def test_m1_bytes_that_were_taken_count_until_they_are_given_back():
    budget = MemoryBudget(100)
    budget.take("", 60)
    assert budget.has_room(40)
    assert not budget.has_room(41)
    budget.give_back("", 60)
    assert budget.has_room(100)


def test_m1_the_bytes_of_an_object_count_until_it_is_freed_and_the_callback_is_called():
    budget, num_freed = MemoryBudget(100), 0

    def count() -> None:
        nonlocal num_freed
        num_freed += 1

    budget.on_freed(count)
    thing: Thing | None = Thing()
    also = thing
    budget.hold("a", thing, 70)
    del thing
    assert (budget.used_bytes, num_freed) == (70, 0)
    also = None
    gc.collect()
    assert (also, budget.used_bytes, num_freed) == (None, 0, 1)


def test_m1_an_object_may_be_freed_while_the_budget_is_in_use():
    budget = MemoryBudget(100)
    thing = Thing()
    budget.hold("a", thing, 70)
    with budget._lock:  # the garbage collector may run at any moment
        del thing
    assert budget.used_bytes == 0


@pytest.mark.parametrize(("owner", "may_go_on"), [("", True), ("a", False)])
def test_m2_a_named_owner_gets_half(owner: str, may_go_on: bool):
    budget = MemoryBudget(100)
    budget.take(owner, 49)
    assert budget.has_share(owner)
    budget.take(owner, 1)
    assert budget.has_share(owner) is may_go_on
    assert budget.has_share("another")


def test_m2_the_share_follows_what_others_hold():
    budget = MemoryBudget(90)
    budget.take("a", 30)
    budget.take("b", 30)
    assert not budget.has_share("a")
    assert budget.has_share("c")
    budget.give_back("b", 10)
    assert budget.has_share("a")
