import pytest
import torch
from torch.nn.functional import gelu

from kestrel_ops.norms.reference import quantise_rows
from tests.kernels.implementations import DEVICE, FLOAT8, implementation_name, implementations, relative_error

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# Fast accumulation keeps fewer bits of a float8 product's sum.
FLOAT8_TOLERANCE = 1e-2 if DEVICE == "cuda" else 4e-3

# cuBLASLt is there on a device only.
NAMES = ("reference", "library") if DEVICE == "cuda" else ("reference",)

every_implementation = pytest.mark.parametrize(
    "scaled_linear", implementations("scaled_linear"), ids=implementation_name
)


def some_matrix(rows, columns, seed):
    torch.manual_seed(seed)
    return torch.randn(rows, columns, device=DEVICE)


@every_implementation
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_plain_product_with_its_bias(scaled_linear, dtype, with_bias):
    x, weight = some_matrix(7, 48, 0).to(dtype), some_matrix(20, 48, 1).to(dtype)
    bias = some_matrix(1, 20, 2)[0] if with_bias else None
    out = scaled_linear(x, None, weight, None, bias, dtype)
    assert out.dtype == dtype
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert relative_error(out, wanted) < TOLERANCES[dtype]


@every_implementation
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 7, 40])
def test_a_float8_product_is_that_of_the_scaled_operands(scaled_linear, count, bias_dtype, out_dtype):
    x, x_scale = quantise_rows(some_matrix(count, 64, 0) * torch.arange(1, count + 1, device=DEVICE)[:, None])
    weight, weight_scale = quantise_rows(some_matrix(32, 64, 1) * torch.arange(1, 33, device=DEVICE)[:, None])
    bias = None if bias_dtype is None else some_matrix(1, 32, 2)[0].to(bias_dtype)
    out = scaled_linear(x, x_scale, weight, weight_scale[:, 0].contiguous(), bias, out_dtype)
    assert out.dtype == out_dtype
    assert out.shape == (count, 32)
    wanted = (x.double() * x_scale) @ (weight.double() * weight_scale).T + (0 if bias is None else bias.double())
    assert relative_error(out, wanted) < FLOAT8_TOLERANCE


@pytest.mark.parametrize(
    ("count", "in_dim", "out_dim", "out_dtype"),
    [
        (1, 144, 48, torch.bfloat16),
        (17, 640, 208, torch.bfloat16),
        (63, 144, 208, torch.float16),
        (16, 64, 32, torch.float32),
    ],
)
def test_few_rows_of_any_sizes_are_summed_in_float32(count, in_dim, out_dim, out_dtype):
    few_rows = pytest.importorskip("kestrel_ops.linear.triton_few_rows", reason="needs Triton")
    x, x_scale = quantise_rows(some_matrix(count, in_dim, 0) * torch.arange(1, count + 1, device=DEVICE)[:, None])
    weight, weight_scale = quantise_rows(some_matrix(out_dim, in_dim, 1))
    bias = some_matrix(1, out_dim, 2)[0].to(out_dtype) if count != 17 else None
    operands = (x, x_scale, weight, weight_scale[:, 0].contiguous(), bias, out_dtype)
    assert few_rows.serves(*operands[:4])
    wanted = (x.double() * x_scale) @ (weight.double() * weight_scale).T + (0 if bias is None else bias.double())
    assert relative_error(few_rows.multiply_few(*operands), wanted) < TOLERANCES[out_dtype]


@every_implementation
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("count", [40, 729])
def test_one_scale_of_each_operand_is_enough(scaled_linear, count, with_bias):
    x, weight = (some_matrix(rows, 64, rows).mul(20).to(FLOAT8) for rows in (count, 32))
    scales = torch.tensor([[0.05]], device=DEVICE), torch.tensor([0.003], device=DEVICE)
    bias = some_matrix(1, 32, 2)[0].bfloat16() if with_bias else None
    out = scaled_linear(x, scales[0], weight, scales[1], bias, torch.bfloat16)
    wanted = (x.double() * scales[0]) @ (weight.double() * scales[1]).T + (0 if bias is None else bias.double())
    assert relative_error(out, wanted) < FLOAT8_TOLERANCE


@every_implementation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "in_dim", "out_dim"), [(729, 144, 16), (1000, 384, 304), (2187, 1152, 432)])
def test_with_one_scale_each_sizes_need_not_be_whole_tiles(scaled_linear, rows, in_dim, out_dim, dtype):
    x, weight = (some_matrix(count, in_dim, count).mul(40).to(FLOAT8) for count in (rows, out_dim))
    x_scale, weight_scale = torch.tensor([[0.02]], device=DEVICE), torch.tensor([0.004], device=DEVICE)
    bias = some_matrix(1, out_dim, 2)[0].to(dtype)
    out = scaled_linear(x, x_scale, weight, weight_scale, bias, dtype)
    wanted = (x.double() * x_scale) @ (weight.double() * weight_scale).T + bias.double()
    assert out.dtype == dtype
    assert relative_error(out, wanted) < FLOAT8_TOLERANCE


every_activation = pytest.mark.parametrize(
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


@every_activation
@pytest.mark.parametrize("rows", [16, 48, 729])
def test_the_activated_product_is_rounded_by_the_factor(scaled_linear_gelu, rows):
    operands = some_operands(rows)
    out = scaled_linear_gelu(*operands, torch.tensor([40.0], device=DEVICE))
    assert out.dtype == FLOAT8
    assert out.shape == (rows, 96)
    assert relative_error(out.double() / 40, written_out(*operands)) < 0.04


@every_activation
@pytest.mark.parametrize(("rows", "in_dim", "out_dim"), [(729, 144, 16), (1000, 384, 304), (2187, 1152, 432)])
def test_sizes_need_not_be_whole_tiles(scaled_linear_gelu, rows, in_dim, out_dim):
    operands = some_operands(rows, in_dim, out_dim)
    out = scaled_linear_gelu(*operands, torch.tensor([20.0], device=DEVICE))
    assert relative_error(out.double() / 20, written_out(*operands)) < 0.04


@every_activation
def test_what_does_not_fit_is_cut(scaled_linear_gelu):
    operands = some_operands()
    out = scaled_linear_gelu(*operands, torch.tensor([1e5], device=DEVICE)).float()
    assert out.isfinite().all()
    assert (out[written_out(*operands) > 0.01] == 448).all()


SHORT = {dtype: TOLERANCES[dtype] for dtype in (torch.bfloat16, torch.float16)}
every_short_type = pytest.mark.parametrize("dtype", SHORT, ids=str)
every_odd_size = pytest.mark.parametrize(
    ("rows", "in_dim", "out_dim"), [(3, 24, 40), (729, 144, 24), (1000, 384, 304), (2187, 1152, 432)]
)


def some_short_operands(rows, in_dim, out_dim, dtype):
    x, weight = some_matrix(rows, in_dim, 0).to(dtype), some_matrix(out_dim, in_dim, 1).mul(in_dim**-0.5).to(dtype)
    bias = some_matrix(1, out_dim, 2)[0].to(dtype)
    return (x, None, weight, None, bias), x.double() @ weight.double().T + bias.double()


@every_activation
@every_short_type
@every_odd_size
def test_short_types_are_activated_without_scales(scaled_linear_gelu, rows, in_dim, out_dim, dtype):
    operands, inner = some_short_operands(rows, in_dim, out_dim, dtype)
    out = scaled_linear_gelu(*operands, None)
    assert out.dtype == dtype
    assert relative_error(out, gelu(inner, approximate="tanh")) < SHORT[dtype]


every_sum = pytest.mark.parametrize(
    "scaled_linear_add", implementations("scaled_linear_add", NAMES), ids=implementation_name
)


@every_sum
@pytest.mark.parametrize("rows", [16, 48, 729])
def test_the_product_and_its_bias_are_added(scaled_linear_add, rows):
    x, x_scale, weight, weight_scale, bias = some_operands(rows)
    hidden = torch.randn(rows, 96, device=DEVICE).bfloat16()
    wanted = hidden.double() + x.double() * x_scale @ (weight.double() * weight_scale).T + bias.double()
    assert scaled_linear_add(x, x_scale, weight, weight_scale, bias, hidden) is None
    assert relative_error(hidden, wanted) < 4e-3


@every_sum
@every_short_type
@every_odd_size
def test_short_types_are_added_without_scales(scaled_linear_add, rows, in_dim, out_dim, dtype):
    operands, product = some_short_operands(rows, in_dim, out_dim, dtype)
    hidden = some_matrix(rows, out_dim, 3).to(dtype)
    wanted = hidden.double() + product
    scaled_linear_add(*operands, hidden)
    assert relative_error(hidden, wanted) < SHORT[dtype]


@every_sum
def test_each_call_adds_anew(scaled_linear_add):
    operands = some_operands()
    once = torch.zeros(48, 96, device=DEVICE, dtype=torch.bfloat16)
    twice = once.clone()
    scaled_linear_add(*operands, once)
    scaled_linear_add(*operands, twice)
    scaled_linear_add(*operands, twice)
    torch.testing.assert_close(twice, 2 * once, rtol=0.02, atol=0.02)
