from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kestrel_runtime.execution.buckets import DecodeSize, PrefillSize
from kestrel_runtime.execution.request_state import RequestState, SampleNeeds
from kestrel_runtime.execution.step_inputs import (
    InputBuffers,
    PackedChunks,
    PrefillInputs,
    fill_blank_decode,
    fill_blank_prefill,
    fill_decode,
    fill_prefill,
    value_counts,
)
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.batch import Chunk
from tests.runtime.sequences import new_sequence

CPU = torch.device("cpu")
PAGE_SIZE = 3


def new_state(num_rows=5, max_pages=4):
    return RequestState(
        CPU,
        lambda grammar, state: 0,
        lambda _: 0,
        num_rows=num_rows,
        max_pages=max_pages,
        values_per_token=2,
        vocab_size=100,
    )


def holder(pages, length, num_image_tokens=0):
    sequence = new_sequence(length - num_image_tokens, num_image_tokens=num_image_tokens)
    sequence.cache.pages = pages
    return sequence


def prefill(chunks, sampled, state, size=None, slab_row=lambda sequence: 100):
    counts = [chunk.end - chunk.start for chunk in chunks]
    size = size or PrefillSize(sum(counts), len(chunks), max(counts), len(sampled), state.max_pages)
    state.open([chunk.sequence for chunk in chunks])
    return InputBuffers(CPU, 2).prefill(
        size,
        lambda host: fill_prefill(host, chunks, sampled, state, slab_row, PAGE_SIZE),
        in_place=False,
    )


def test_a_position_lies_in_its_page_at_its_place():
    sequence = holder([7, 2, 4], 9)
    fields = prefill([Chunk(sequence, 2, 9)], [sequence], new_state())
    assert fields.positions.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert fields.kv_slots.tolist() == [23, 6, 7, 8, 12, 13, 14]
    assert fields.token_ids.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert fields.sample_tokens.tolist() == [6]


def test_chunks_lie_one_after_the_other():
    pictured, plain = holder([3, 8, 0], 7, num_image_tokens=3), holder([5, 2], 6)
    state = new_state()
    fields = prefill([Chunk(pictured, 4, 7), Chunk(plain, 0, 5)], [pictured], state)
    assert fields.positions.tolist() == [4, 5, 6, 0, 1, 2, 3, 4]
    assert fields.query_starts.tolist() == [0, 3, 8]
    assert fields.context_lengths.tolist() == [7, 5]
    assert fields.visible_until.tolist() == [5, 6, 7, 1, 2, 3, 4, 5]
    assert fields.rows.tolist() == [state.row(pictured), state.row(plain)]
    assert (fields.sample_tokens.tolist(), fields.sample_rows.tolist()) == ([2], [state.row(pictured)])


def test_an_image_stands_behind_the_first_token_and_comes_from_its_entry():
    sequence = holder([3, 8, 0], 7, num_image_tokens=3)
    fields = prefill([Chunk(sequence, 0, 7)], [sequence], new_state(), slab_row=lambda _: 30)
    assert fields.embedding_rows.tolist() == [-1, 30, 31, 32, -1, -1, -1]
    assert fields.token_ids.tolist() == [0, 0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize("chunk", [(0, 4), (2, 4), (2, 7)])
def test_a_chunk_that_divides_an_image_is_refused(chunk):
    sequence = holder([3, 8, 0], 7, num_image_tokens=4)
    with pytest.raises(AssertionError, match="no step divides a span"):
        prefill([Chunk(sequence, *chunk)], [], new_state())


@pytest.mark.parametrize(
    ("spans", "visible"),
    [
        ([], range(1, 13)),
        ([(0, 3), (4, 7), (7, 8), (8, 10)], [3, 3, 3, 4, 7, 7, 7, 8, 10, 10, 11, 12]),
        ([(1, 3), (4, 7), (9, 12)], [1, 3, 3, 4, 7, 7, 7, 8, 9, 12, 12, 12]),  # text before the first
    ],
)
def test_positions_see_themselves_those_before_them_and_all_of_their_span(spans, visible):
    chunks = [(0, 12), (0, 3), (3, 7), (7, 12), (4, 8)]
    own = [Chunk(holder([7, 2, 4, 1], 12), *chunk) for chunk in chunks]
    for chunk in own:
        chunk.sequence.spans = tuple(spans)
    fields = prefill(own, [], new_state(7))
    assert fields.visible_until.tolist() == [end for chunk in chunks for end in visible[slice(*chunk)]]


def test_tokens_bring_their_values():
    sequence = new_sequence([Token(0), Token(5, (0.25,)), Token(6, (0.5, 0.75)), Token(9)])
    sequence.cache.pages = [1, 2]
    chunk = Chunk(sequence, 0, 4)
    fields = prefill([chunk], [sequence], new_state())
    assert fields.num_values.tolist() == [0, 1, 2, 0]
    assert fields.token_values.tolist() == [[0, 0], [0.25, 0], [0.5, 0.75], [0, 0]]
    assert list(value_counts([chunk])) == [1, 2]


def test_padding_writes_nothing_and_samples_for_the_padding_row():
    sequence, state = holder([7, 2], 5), new_state()
    fields = prefill([Chunk(sequence, 0, 5)], [sequence], state, PrefillSize(64, 2, 64, 2, 4))
    assert fields.kv_slots[5:].tolist() == [-1] * 59
    assert fields.embedding_rows[5:].tolist() == [-1] * 59
    assert fields.query_starts.tolist() == [0, 5, 5]
    assert fields.visible_until[5:].tolist() == [0] * 59
    assert (fields.context_lengths[1], fields.rows[1]) == (0, state.padding_row)
    assert fields.sample_tokens.tolist() == [4, 0]
    assert fields.sample_rows.tolist() == [state.row(sequence), state.padding_row]


def test_the_kernels_get_the_types_they_ask_for_and_the_pages_of_each_row():
    first, second = holder([3, 1, 0], 7), holder([5], 2)
    state, chunks = new_state(), [Chunk(first, 0, 7), Chunk(second, 0, 2)]
    fields = prefill(chunks, [], state)
    inputs = PrefillInputs(fields, PrefillSize(9, 2, 7, 0, 3), 0, SampleNeeds(False, 0), 0, is_in_place=False)
    packed = PackedChunks.of(inputs, state)
    assert packed.page_table.tolist() == [[3, 1, 0], [5, 5, 5]]
    assert packed.positions.dtype == packed.slots.dtype == torch.int64
    tables = (packed.page_table, packed.query_starts, packed.lengths, packed.visible_until)
    assert {table.dtype for table in tables} == {torch.int32}
    assert packed.max_chunk == 7


def test_a_decode_step_tells_rows_positions_and_their_pages():
    first, second, state = holder([3], 3), holder([5, 1], 5), new_state()
    state.open([first, second])
    first.cache.num_cached, second.cache.num_cached = 16, 17
    first.cache.pages.append(2)
    fields = InputBuffers(CPU, 2).decode(
        DecodeSize(4, 4), lambda host: fill_decode(host, [first, second], state, page_size=16), in_place=False
    )
    padding = state.padding_row
    assert fields.rows.tolist() == [state.row(first), state.row(second), padding, padding]
    assert fields.positions.tolist() == [16, 17, -1, -1]
    assert fields.pages.tolist() == [2, 1, 0, 0]


def test_steps_with_graphs_stand_where_the_ones_before_did():
    buffers = InputBuffers(CPU, 2)
    buffers.reserve(DecodeSize(8, 4), PrefillSize(128, 2, 128, 2, 4))

    def decode(size):
        return buffers.decode(DecodeSize(size, 4), lambda host: fill_blank_decode(host, 7), in_place=True)

    first, second = decode(3), decode(3)
    assert first.rows.data_ptr() == second.rows.data_ptr()
    assert first.positions.data_ptr() == second.positions.data_ptr()
    assert second.rows.tolist() == [7, 7, 7]


def test_blank_prefills_write_nothing_and_fill_their_size():
    size = PrefillSize(64, 2, 64, 2, 4)
    fields = InputBuffers(CPU, 2).prefill(size, lambda host: fill_blank_prefill(host, size, 7), in_place=False)
    assert (fields.kv_slots == -1).all()
    assert fields.query_starts.tolist() == [0, 32, 64]
    assert fields.context_lengths.tolist() == [32, 32]
    assert fields.sample_tokens.tolist() == [31, 63]
    assert fields.positions.tolist() == [*range(32), *range(32)]
    assert fields.visible_until.tolist() == [*range(1, 33), *range(1, 33)]
    assert set(fields.rows.tolist()) == set(fields.sample_rows.tolist()) == {7}


def test_every_field_is_written_whatever_stood_there():
    sequence, state = holder([7, 2], 5), new_state()
    state.open([sequence])
    size = PrefillSize(64, 2, 64, 2, 4)
    buffers = InputBuffers(CPU, 2)
    found = []
    for garbage in (0, 1):
        host = SimpleNamespace()

        def fill(fields, garbage=garbage, host=host):
            for array in fields:
                array[...] = garbage
            fill_prefill(fields, [Chunk(sequence, 0, 5)], [sequence], state, lambda _: 0, PAGE_SIZE)
            host.copies = [array.copy() for array in fields]

        buffers.prefill(size, fill, in_place=False)
        found.append(host.copies)
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)
