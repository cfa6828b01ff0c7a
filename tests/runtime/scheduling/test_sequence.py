import pytest

from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.positions import bidirectional_spans
from kestrel_runtime.scheduling.sequence import SequenceState
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
    assert sequence.spans == ((0, 10),)  # BOS and the image


def test_text_alone_has_no_prefix():
    assert new_sequence(4).spans == ()


def test_bos_belongs_to_the_span_of_an_image_that_follows_it_directly():
    assert new_sequence(4).spans == ()
    assert new_sequence(4, num_image_tokens=9).spans == ((0, 10),)
    assert bidirectional_spans([(1, 5), (7, 9), (9, 12)]) == ((0, 5), (7, 9), (9, 12))
    assert bidirectional_spans([(2, 5), (5, 9)]) == ((2, 5), (5, 9))


def test_generated_tokens_lengthen_a_sequence_but_not_its_prompt():
    sequence = new_sequence(4, num_image_tokens=9)
    sequence.tokens += [Token(1), Token(2)]
    assert (sequence.length, sequence.num_prompt_positions, sequence.num_generated) == (15, 13, 2)


def test_crops_are_due_until_they_are_encoded():
    sequence = new_sequence(num_image_tokens=4, pixels=blank_crops(3))
    (image,) = sequence.images
    assert image.crops_left() == (0, 1, 2)
    image.encoded_crops, image.found_crops = {2}, {0: 5}
    assert image.crops_left() == (1,)


def test_sequences_are_told_apart_by_identity():
    first, second = new_sequence(), new_sequence()
    second.id = first.id
    assert first != second
    assert len({first, second}) == 2
