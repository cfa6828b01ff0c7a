import pytest

from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.batch import Batch, Chunk, EncodeItem, Plan
from kestrel_runtime.scheduling.page_manager import StepId
from tests.runtime.sequences import blank_crops, new_sequence


def test_a_chunk_samples_when_it_reaches_the_newest_token():
    sequence = new_sequence(6)
    assert not Chunk.of(sequence, 0, 5).num_samples
    assert Chunk.of(sequence, 2, 6).num_samples == 1
    sequence.tokens.append(Token(1))
    assert not Chunk.of(sequence, 2, 6).num_samples


def test_what_a_chunk_samples_is_fixed_when_it_is_planned():
    sequence = new_sequence(6)
    batch = Batch.of_prefill(prefill=[Chunk.of(sequence, 2, 6)])
    sequence.num_pending = 1
    assert batch.prefill[0].num_samples == 1
    assert batch.sampled == (sequence,)


def test_prompts_that_end_and_running_sequences_are_sampled_in_the_order_of_the_batch():
    begun, ending, other = new_sequence(6), new_sequence(6), new_sequence(2)
    chunks = [Chunk.of(begun, 0, 3), Chunk.of(ending, 3, 6), Chunk.of(other, 0, 2)]
    assert Batch.of_prefill(prefill=chunks).sampled == (ending, other)
    assert Batch.of_decode([other, ending]).sampled == (other, ending)


def test_a_decode_step_depends_on_the_prefill_steps_that_still_write_its_prompts():
    first, second, third = new_sequence(6), new_sequence(6), new_sequence(6)
    first.cache.writing, third.cache.writing = {StepId(7), StepId(9)}, {StepId(9)}
    batch = Batch.of_decode([first, second, third])
    first.cache.writing.clear()  # a batch does not change with its sequences
    assert batch.depends_on == {7, 9}
    assert Batch.of_decode([second]).depends_on == frozenset()


def test_an_encode_item_takes_the_crops_that_are_not_encoded():
    sequence = new_sequence(num_image_tokens=4, pixels=blank_crops(5))
    (image,) = sequence.images
    assert EncodeItem.rest_of(sequence, image) == EncodeItem(sequence, image, (0, 1, 2, 3, 4))
    image.encoded_crops, image.found_crops = {0, 2}, {3: 7}
    assert EncodeItem.rest_of(sequence, image) == EncodeItem(
        sequence, image, (1, 4), found=((3, 7),), is_first=False
    )
    image.pixels = None
    with pytest.raises(AssertionError, match="only decoded images"):
        EncodeItem.rest_of(sequence, image)


def test_a_batch_names_each_of_its_sequences_once():
    pictured, other = new_sequence(num_image_tokens=4, pixels=blank_crops(5)), new_sequence(3)
    batch = Batch.of_prefill(
        [EncodeItem.rest_of(pictured, pictured.images[0])], [Chunk.of(other, 0, 3), Chunk.of(pictured, 0, 5)]
    )
    assert batch.sequences == [pictured, other]
    assert Batch.of_decode([other]).sequences == [other]


def test_a_batch_without_work_is_empty():
    sequence = new_sequence(2, num_image_tokens=4)
    assert Batch.of_prefill().is_empty
    assert Batch.of_decode().is_empty
    assert not Batch.of_prefill([EncodeItem(sequence, sequence.images[0], (0,))]).is_empty
    assert not Batch.of_prefill(prefill=[Chunk(sequence, 0, 1)]).is_empty
    assert not Batch.of_decode([sequence]).is_empty
    assert Plan(Batch.of_prefill(), Batch.of_decode()).is_empty
    assert not Plan(Batch.of_prefill(), Batch.of_decode([sequence])).is_empty
