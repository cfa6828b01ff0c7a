"""A row's product is the same in any company, and what `linear` defines."""

import pytest
import torch
from torch.nn.functional import linear

from kestrel_ops import depends_on_place, invariant_linear

SIZES = [(37, 48), (256, 96), (77, 1), (1, 5), (1024, 40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_a_row_has_the_same_bits_alone_first_last_and_among_many(size, dtype):
    torch.manual_seed(1)
    width, height = size
    rows, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((99, width), (height, width), (height,)))
    together = invariant_linear(rows, weight, bias)
    for count in (1, 2, 15, 16, 17, 98):
        assert torch.equal(invariant_linear(rows[:count], weight, bias), together[:count])
        assert torch.equal(invariant_linear(rows[-count:], weight, bias), together[-count:])
    assert not depends_on_place(invariant_linear, weight)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_a_product(size):
    torch.manual_seed(2)
    rows, weight = torch.randn(3, 7, size[0]), torch.randn(size[1], size[0])
    assert invariant_linear(rows, weight).shape == (3, 7, size[1])
    torch.testing.assert_close(invariant_linear(rows, weight), linear(rows, weight), rtol=1e-4, atol=1e-4)
    assert invariant_linear(rows[:0], weight).shape == (0, 7, size[1])


def test_a_product_that_depends_on_its_place_is_found():
    def by_row_number(rows, weight):
        return linear(rows, weight) + torch.arange(len(rows))[:, None] * 1e-6

    assert depends_on_place(by_row_number, torch.randn(8, 16))
