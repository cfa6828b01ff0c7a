import random

import pytest

from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.sequence import Deadlines, Sequence, SequenceState
from tests.runtime.sequences import blank_crops, new_sequence

WAITING, PARKED, PREFILLING, PREFILLED, RUNNING, FINISHED = SequenceState


@pytest.mark.parametrize(
    ("state", "next_state"),
    [(WAITING, RUNNING), (WAITING, PREFILLED), (PARKED, PREFILLING), (RUNNING, PARKED), (FINISHED, WAITING)],
)
def test_a_sequence_that_moves_as_its_life_does_not_allow_is_a_bug(state, next_state):
    sequence = new_sequence()
    sequence.state = state
    with pytest.raises(AssertionError, match=f"{state.name} → {next_state.name}"):
        sequence.move_to(next_state)
    assert sequence.state is state


def test_the_image_takes_positions_but_no_tokens():
    sequence = new_sequence(4, num_image_tokens=9)
    assert len(sequence.tokens) == 4
    assert sequence.length == sequence.num_prompt_positions == 13
    assert sequence.prefix_length == 10  # BOS and the image


def test_text_alone_has_no_prefix():
    assert new_sequence(4).prefix_length == 0


def test_generated_tokens_lengthen_a_sequence_but_not_its_prompt():
    sequence = new_sequence(4, num_image_tokens=9)
    sequence.tokens += [Token(1), Token(2)]
    assert (sequence.length, sequence.num_prompt_positions, sequence.num_generated) == (15, 13, 2)


def test_crops_are_due_until_they_are_encoded():
    sequence = new_sequence(num_image_tokens=4, crops=blank_crops(3))
    assert sequence.num_crops_to_encode == 3
    sequence.num_encoded_crops = 2
    assert sequence.num_crops_to_encode == 1
    assert new_sequence().num_crops_to_encode == 0


def test_sequences_are_told_apart_by_identity():
    first, second = new_sequence(), new_sequence()
    second.id = first.id
    assert first != second
    assert len({first, second}) == 2


def watched(deadlines: Deadlines, deadline: float | None, queue_deadline: float | None = None) -> Sequence:
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
