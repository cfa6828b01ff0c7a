"""Adds the product with each row's own low-rank matrices, as adapters do."""

from torch import Tensor

from kestrel_ops.low_rank import LowRank

WAITS_FOR_DEVICE = True
"""Reads on the host which slots are used: no graph can capture it."""


def add_low_rank(
    out: Tensor,  # [T, out], changed in place
    rows: Tensor,  # [T, in], of the type of the weights
    weights: LowRank,
    slots: Tensor,  # [T] int64: the slot of each row, 0 for none
) -> None:
    """out[t] += rows[t] @ a.T @ b with the weights of row t's slot. Rows in slot 0 stay as they are."""
    for slot in slots.unique().tolist():
        if slot:
            chosen = (slots == slot).nonzero()[:, 0]
            product = rows[chosen] @ weights.a[slot - 1].T @ weights.b[slot - 1]
            out.index_add_(0, chosen, product.to(out.dtype))
