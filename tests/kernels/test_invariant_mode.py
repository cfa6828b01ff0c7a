"""Plain torch code computes each row by itself while the mode is entered."""

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from kestrel_ops import InvariantMode, invariant_linear


def work(rows):
    """What the decoder is made of, at widths that are no multiple of a vector."""
    torch.manual_seed(0)
    layer, norm = nn.Linear(37, 101), nn.LayerNorm(37)
    inner = gelu(layer(norm(rows)), approximate="tanh")
    gate = torch.sigmoid(inner @ torch.randn(101, 37)) + gelu(rows).tanh()
    return gate.softmax(dim=-1).log_softmax(dim=-1) * gate.exp().sum(dim=-1, keepdim=True)


@torch.inference_mode()
def test_a_row_has_the_same_bits_with_any_others():
    rows = torch.randn(300, 37)
    with InvariantMode(invariant_linear):
        together = work(rows)
        for first, last in ((0, 1), (5, 8), (99, 300)):
            assert torch.equal(work(rows[first:last]), together[first:last])
    torch.testing.assert_close(together, work(rows), rtol=1e-4, atol=1e-4)


def test_products_that_it_cannot_replace_are_refused():
    rows = torch.randn(1, 2, 3, 4)
    with InvariantMode(invariant_linear):
        for product in (
            lambda: scaled_dot_product_attention(rows, rows, rows),
            lambda: torch.mm(rows[0, 0], rows[0, 0].mT),
            lambda: rows @ rows.mT,
            lambda: torch.einsum("abij,abkj->abik", rows, rows),
        ):
            with pytest.raises(NotImplementedError, match="depend on the batch"):
                product()
