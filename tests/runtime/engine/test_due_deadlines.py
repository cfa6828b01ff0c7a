"""Deadlines are found in their order, each once."""

import random

from kestrel_runtime.engine.due_deadlines import Deadlines
from kestrel_runtime.scheduling.sequence import TokenSequence
from tests.runtime.sequences import new_sequence


def watched(deadlines: Deadlines, deadline: float | None, queue_deadline: float | None = None) -> TokenSequence:
    sequence = new_sequence()
    sequence.clock.deadline, sequence.clock.queue_deadline = deadline, queue_deadline
    deadlines.watch(sequence)
    return sequence


def test_the_soonest_is_named_first_and_each_deadline_once() -> None:
    deadlines = Deadlines()
    late, soon, both = watched(deadlines, 3.0), watched(deadlines, 1.0), watched(deadlines, 4.0, 2.0)
    watched(deadlines, None)
    assert list(deadlines.due(0.9)) == []
    assert list(deadlines.due(3.0)) == [soon, both, late]
    assert list(deadlines.due(3.5)) == []
    assert list(deadlines.due(4.0)) == [both]


def test_a_removed_deadline_is_not_returned_even_while_expired_ones_are_read() -> None:
    deadlines = Deadlines()
    first, second = watched(deadlines, 1.0), watched(deadlines, 2.0)
    named = deadlines.due(5.0)
    assert next(named) is first
    deadlines.forget(first)
    deadlines.forget(second)
    assert list(named) == []


def test_far_deadlines_of_those_long_gone_do_not_pile_up() -> None:
    deadlines = Deadlines()
    staying = watched(deadlines, 7.0)
    for _ in range(2000):
        deadlines.forget(watched(deadlines, 1e9))
    assert len(deadlines._moments) < 100  # memory shows in no other way
    assert list(deadlines.due(7.0)) == [staying]


def test_deadlines_that_stay_come_in_their_order_whatever_is_forgotten() -> None:
    deadlines, moments = Deadlines(), [float(moment) for moment in range(400)]
    random.Random(1).shuffle(moments)
    sequences = [watched(deadlines, moment) for moment in moments]
    for sequence in sequences[20:]:
        deadlines.forget(sequence)
    assert [sequence.clock.deadline for sequence in deadlines.due(400.0)] == sorted(moments[:20])
