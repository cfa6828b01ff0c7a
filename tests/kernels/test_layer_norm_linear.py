"""A LayerNorm with a small linear layer behind it, by every implementation."""

import pytest
import torch
from torch.nn.functional import layer_norm

from tests.kernels.implementations import DEVICE, ROUNDING, implementation_name, implementations, relative_error

every_implementation = pytest.mark.parametrize(
    "layer_norm_linear", implementations("layer_norm_linear"), ids=implementation_name
)


def operands(num_tokens, dim, num_rows, dtype):
    torch.manual_seed(dim)
    hidden = torch.randn(num_tokens, dim, device=DEVICE) * 3 + 5
    shapes = (dim,), (dim,), (num_rows, dim), (num_rows,)
    gain, shift, weight, bias = (torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes)
    return hidden, gain, shift, 1e-5, weight, bias


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_tokens", "dim", "num_rows"), [(1, 17, 3), (1, 104, 64), (5, 48, 9), (3, 300, 1)])
def test_rows_are_normalised_and_multiplied(layer_norm_linear, num_tokens, dim, num_rows, dtype):
    hidden, gain, shift, epsilon, weight, bias = operands(num_tokens, dim, num_rows, dtype)
    normed, product = layer_norm_linear(hidden, gain, shift, epsilon, weight, bias)
    wanted = layer_norm(hidden.double(), (dim,), gain.double(), shift.double(), epsilon)
    is_rounded = implementation_name(layer_norm_linear) == "library"
    tolerance = max(ROUNDING[dtype], 2e-6)
    assert (normed.dtype, product.dtype) == (dtype, dtype if is_rounded else torch.float32)
    assert relative_error(normed, wanted) < (2 if is_rounded else 1) * tolerance
    # Of the rows as they were rounded.
    of_these = normed.double() @ weight.double().T + bias.double()
    assert relative_error(product, of_these) < (tolerance if is_rounded else 2e-6)


@every_implementation
@pytest.mark.parametrize("num_tokens", [1, 5, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_delta_is_added_before(layer_norm_linear, num_tokens, dtype):
    hidden, *others = operands(num_tokens, 48, 9, dtype)
    delta, before = torch.randn(num_tokens, 48, device=DEVICE).to(dtype), hidden.clone()
    found = layer_norm_linear(hidden, *others, delta)
    assert torch.equal(hidden, before)
    for own, wanted in zip(found, layer_norm_linear(before + delta, *others), strict=True):
        assert torch.equal(own, wanted)


@every_implementation
def test_no_row_gives_none(layer_norm_linear):
    hidden, *others = operands(1, 17, 3, torch.float32)
    normed, product = layer_norm_linear(hidden[:0], *others)
    assert (normed.shape, product.shape) == ((0, 17), (0, 3))


@every_implementation
def test_a_row_that_is_not_a_number_spoils_no_other(layer_norm_linear):
    hidden, *others = operands(3, 48, 9, torch.float32)
    before = layer_norm_linear(hidden, *others)
    hidden[1] = torch.nan
    for found, wanted in zip(layer_norm_linear(hidden, *others), before, strict=True):
        assert torch.equal(found[[0, 2]], wanted[[0, 2]])
