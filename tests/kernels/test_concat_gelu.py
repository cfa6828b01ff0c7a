import pytest
import torch
from torch.nn.functional import gelu

from tests.kernels.implementations import (
    DEVICE,
    FLOAT8,
    ROUNDING,
    dequantised,
    implementation_name,
    implementations,
    in_pairs,
    relative_error,
)

every_implementation = pytest.mark.parametrize(
    "concat_gelu", implementations("concat_gelu"), ids=implementation_name
)


def some_rows(count, dim, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return (2 * torch.randn(count, dim)).to(DEVICE, dtype)


def written_out(plain, inner, activate):
    wide = gelu(inner.double(), approximate="tanh") if activate else inner.double()
    return wide if plain is None else torch.cat((plain.double(), wide), dim=1)


@every_implementation
@pytest.mark.parametrize(
    ("shape", "plain_dim", "activate", "dtype", "out_dtype"),
    in_pairs(
        [(1, 16), (3, 264), (2, 104), (5, 1)],
        [None, 16, 77],
        [True, False],
        [torch.float32, torch.bfloat16, torch.float16],
        [*ROUNDING],
    ),
    ids=str,
)
def test_plain_columns_stand_before_activated_ones(concat_gelu, shape, plain_dim, activate, dtype, out_dtype):
    count, inner_dim = shape
    plain = None if plain_dim is None else some_rows(count, plain_dim, dtype, seed=1)
    inner = some_rows(count, inner_dim, dtype)
    out, scale = concat_gelu(plain, inner, out_dtype, activate)
    assert out.dtype == out_dtype
    assert out.shape == (count, (plain_dim or 0) + inner_dim)
    assert (scale is None) == (out_dtype != FLOAT8)
    assert relative_error(dequantised(out, scale), written_out(plain, inner, activate)) < ROUNDING[out_dtype]


@every_implementation
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, FLOAT8], ids=str)
def test_inputs_may_be_columns_of_wider_rows(concat_gelu, out_dtype):
    packed = some_rows(5, 160, torch.bfloat16)
    out, scale = concat_gelu(packed[:, 96:128], packed[:, 16:80], out_dtype)
    wanted = written_out(packed[:, 96:128], packed[:, 16:80], True)
    assert relative_error(dequantised(out, scale), wanted) < ROUNDING[out_dtype]


@every_implementation
def test_one_scale_covers_a_whole_row(concat_gelu):
    plain, inner = some_rows(4, 32, seed=1), some_rows(4, 48)
    plain[1] *= 100
    out, scale = concat_gelu(plain, inner, FLOAT8)
    assert scale.shape == (4, 1)
    assert scale.dtype == torch.float32
    wanted = written_out(plain, inner, True).abs().amax(dim=1, keepdim=True) / 448
    torch.testing.assert_close(scale, wanted.float())
    assert out.float().abs().max() <= 448


@every_implementation
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")  # of the interpreter
def test_large_values_pass_and_large_negative_ones_vanish(concat_gelu):
    inner = torch.tensor([[50.0, -50.0, 1e4, -1e4, 0.0, 0.5, -0.5, 1e-3] * 2], device=DEVICE)
    out, _ = concat_gelu(None, inner, torch.float32)
    torch.testing.assert_close(out.double(), written_out(None, inner, True), rtol=1e-5, atol=1e-6)


@every_implementation
def test_a_row_of_zeros_stays_one(concat_gelu):
    out, scale = concat_gelu(None, torch.zeros(2, 32, device=DEVICE), FLOAT8)
    assert torch.equal(dequantised(out, scale), torch.zeros(2, 32, device=DEVICE))


@every_implementation
@pytest.mark.parametrize("activate", [True, False])
def test_a_given_scale_is_that_of_all_rows(concat_gelu, activate):
    plain, inner = some_rows(6, 16, seed=1), some_rows(6, 48)
    out, scale = concat_gelu(plain, inner, FLOAT8, activate, out_scale=10 / 448)
    assert scale is None
    assert relative_error(out.double() * 10 / 448, written_out(plain, inner, activate)) < ROUNDING[FLOAT8]


@every_implementation
def test_what_a_given_scale_does_not_hold_is_cut(concat_gelu):
    inner = some_rows(6, 48)
    out, _ = concat_gelu(None, inner, FLOAT8, False, out_scale=0.5 / 448)
    assert torch.equal(out.float()[inner.abs() > 0.51], 448 * inner.sign()[inner.abs() > 0.51])
