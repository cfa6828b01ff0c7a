"""A product whose rows do not depend on how many rows there are, nor on which."""

from torch import Tensor
from torch.nn.functional import linear, pad

_BLOCK_ROWS = 16


def invariant_linear(
    rows: Tensor,  # [..., in]
    weight: Tensor,  # [out, in]
    bias: Tensor | None = None,  # [out]
) -> Tensor:  # [..., out]
    """As `linear`, in products of exactly 16 rows, the last of which is filled up with zeros.

    Libraries choose their kernels, and with them the order of their sums, by the number of rows. Here it is always
    the same. That the place of a row among the 16 does not matter either is a property of the library, which
    `kestrel_ops.depends_on_place` checks.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    result = flat.new_empty(len(flat), len(weight))
    for first in range(0, len(flat), _BLOCK_ROWS):
        block = flat[first : first + _BLOCK_ROWS]
        padded = pad(block, (0, 0, 0, _BLOCK_ROWS - len(block)))
        result[first : first + len(block)] = linear(padded, weight, bias)[: len(block)]
    return result.unflatten(0, rows.shape[:-1])
