import torch

from kestrel_runtime.execution.step_inputs import PrefillPlan
from kestrel_runtime.scheduling.batch import Chunk
from tests.runtime.sequences import new_sequence

CPU = torch.device("cpu")


def holder(pages, length, num_image_tokens=0):
    sequence = new_sequence(length - num_image_tokens, num_image_tokens=num_image_tokens)
    sequence.pages = pages
    return sequence


def test_a_position_lies_in_its_page_at_its_place():
    plan = PrefillPlan.of([Chunk(holder([7, 2, 4], 9), 2, 9)], 3, CPU)
    assert plan.positions.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert plan.slots.tolist() == [23, 6, 7, 8, 12, 13, 14]


def test_chunks_lie_one_after_the_other():
    pictured, plain = holder([3, 8, 0], 7, num_image_tokens=3), holder([5, 2], 6)
    plan = PrefillPlan.of([Chunk(pictured, 4, 7), Chunk(plain, 0, 5)], 3, CPU)
    assert plan.positions.tolist() == [4, 5, 6, 0, 1, 2, 3, 4]
    assert plan.query_starts.tolist() == [0, 3, 8]
    assert plan.lengths.tolist() == [7, 5]
    assert plan.prefix_lengths.tolist() == [4, 0]
    assert plan.max_chunk == 5


def test_a_sequence_with_fewer_pages_fills_its_row_with_one_of_its_own():
    plan = PrefillPlan.of([Chunk(holder([3, 8, 0], 7), 0, 7), Chunk(holder([5], 2), 0, 2)], 3, CPU)
    assert plan.page_table.tolist() == [[3, 8, 0], [5, 5, 5]]


def test_the_kernels_get_the_types_they_ask_for():
    plan = PrefillPlan.of([Chunk(holder([1], 3), 0, 3)], 3, CPU)
    assert plan.positions.dtype == plan.slots.dtype == torch.int64
    tables = (plan.page_table, plan.query_starts, plan.lengths, plan.prefix_lengths)
    assert {table.dtype for table in tables} == {torch.int32}
