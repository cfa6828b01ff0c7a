import pytest
import torch
from torch.nn.functional import gelu

from tests.kernels.implementations import DEVICE, FLOAT8, implementation_name, implementations, relative_error

# cuBLASLt is there on a device only.
NAMES = ("reference", "library") if DEVICE == "cuda" else ("reference",)

every_implementation = pytest.mark.parametrize(
    "scaled_linear_gelu", implementations("scaled_linear_gelu", NAMES), ids=implementation_name
)


def some_operands(rows=48, in_dim=64, out_dim=96):
    torch.manual_seed(0)
    x = torch.randn(rows, in_dim, device=DEVICE).mul(50).to(FLOAT8)
    weight = torch.randn(out_dim, in_dim, device=DEVICE).mul(40).to(FLOAT8)
    bias = torch.randn(out_dim, device=DEVICE).bfloat16()
    return x, torch.tensor([0.02], device=DEVICE), weight, torch.tensor([0.004], device=DEVICE), bias


def written_out(x, x_scale, weight, weight_scale, bias):
    return gelu(x.double() * x_scale @ (weight.double() * weight_scale).T + bias.double(), approximate="tanh")


@every_implementation
@pytest.mark.parametrize("rows", [16, 48, 729])
def test_the_activated_product_is_rounded_by_the_factor(scaled_linear_gelu, rows):
    operands = some_operands(rows)
    out = scaled_linear_gelu(*operands, torch.tensor([40.0], device=DEVICE))
    assert out.dtype == FLOAT8
    assert out.shape == (rows, 96)
    assert relative_error(out.double() / 40, written_out(*operands)) < 0.04


@every_implementation
@pytest.mark.parametrize(("rows", "in_dim", "out_dim"), [(729, 144, 16), (1000, 384, 304), (2187, 1152, 432)])
def test_sizes_need_not_be_whole_tiles(scaled_linear_gelu, rows, in_dim, out_dim):
    operands = some_operands(rows, in_dim, out_dim)
    out = scaled_linear_gelu(*operands, torch.tensor([20.0], device=DEVICE))
    assert relative_error(out.double() / 20, written_out(*operands)) < 0.04


@every_implementation
def test_what_does_not_fit_is_cut(scaled_linear_gelu):
    operands = some_operands()
    out = scaled_linear_gelu(*operands, torch.tensor([1e5], device=DEVICE)).float()
    assert out.isfinite().all()
    assert (out[written_out(*operands) > 0.01] == 448).all()
