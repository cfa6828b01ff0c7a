import pytest
import torch

from tests.kernels.implementations import implementation_name, implementations, relative_error
from tests.kernels.test_scaled_linear_gelu import DEVICE, NAMES, some_operands

every_implementation = pytest.mark.parametrize(
    "scaled_linear_add", implementations("scaled_linear_add", NAMES), ids=implementation_name
)


@every_implementation
@pytest.mark.parametrize("rows", [16, 48, 729])
def test_the_product_and_its_bias_are_added(scaled_linear_add, rows):
    x, x_scale, weight, weight_scale, bias = some_operands(rows)
    hidden = torch.randn(rows, 96, device=DEVICE).bfloat16()
    wanted = hidden.double() + x.double() * x_scale @ (weight.double() * weight_scale).T + bias.double()
    assert scaled_linear_add(x, x_scale, weight, weight_scale, bias, hidden) is None
    assert relative_error(hidden, wanted) < 4e-3


@every_implementation
def test_each_call_adds_anew(scaled_linear_add):
    operands = some_operands()
    once = torch.zeros(48, 96, device=DEVICE, dtype=torch.bfloat16)
    twice = once.clone()
    scaled_linear_add(*operands, once)
    scaled_linear_add(*operands, twice)
    scaled_linear_add(*operands, twice)
    torch.testing.assert_close(twice, 2 * once, rtol=0.02, atol=0.02)
