import importlib
import importlib.util

import pytest

from kestrel_ops.dispatch import module_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

# Rows and warps of a program: all that operations use, and some more.
BLOCKS = [(4, 4), (2, 4), (1, 4), (1, 8), (8, 2), (16, 16), (1, 1), (64, 1)]


@pytest.mark.parametrize(("rows", "num_warps"), BLOCKS)
def test_no_block_has_fewer_elements_than_its_program_has_threads(rows, num_warps):
    from kestrel_ops.norms.triton_rows import RowBlocks, pieces

    for width in range(1, 2049):
        sizes = [size for size in pieces(width, RowBlocks(rows, num_warps)) if size]
        assert all(size * rows >= 32 * num_warps for size in sizes), (width, sizes)
        assert all(size.bit_count() == 1 for size in sizes), (width, sizes)
        assert sum(sizes) >= width, (width, sizes)


@pytest.mark.parametrize("operation", ["add_layer_norm", "concat_gelu"])
def test_the_blocks_that_operations_choose_suit_every_width(operation):
    from kestrel_ops.norms.triton_rows import pieces

    module = module_of("triton", operation)
    for width in range(1, 2049):
        blocks = module._blocks_for(width)
        assert all(size * blocks.rows >= 32 * blocks.num_warps for size in pieces(width, blocks) if size), width


def test_few_lanes_are_left_over():
    from kestrel_ops.norms.triton_rows import RowBlocks, pieces

    assert pieces(4304, RowBlocks(1, 4)) == (4096, 256)
    assert pieces(1152, RowBlocks(4, 4)) == (1024, 128)
    assert pieces(2048, RowBlocks(1, 4)) == (2048, 0)
    assert pieces(48, RowBlocks(4, 4)) == (64, 0)
    assert pieces(0, RowBlocks(4, 4)) == (0, 0)
