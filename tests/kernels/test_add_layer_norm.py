import pytest
import torch
from torch.nn.functional import layer_norm

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

EPSILON = 1e-5

every_implementation = pytest.mark.parametrize(
    "add_layer_norm", implementations("add_layer_norm"), ids=implementation_name
)


def some_rows(count, dim, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return (3 * torch.randn(count, dim) + torch.randn(count, 1)).to(DEVICE, dtype)


@every_implementation
@pytest.mark.parametrize(
    ("shape", "dtype", "out_dtype"),
    in_pairs(
        [(1, 16), (7, 48), (5, 72), (1, 77), (3, 1152), (9, 1)],
        [torch.float32, torch.bfloat16, torch.float16],
        [*ROUNDING],
    ),
    ids=str,
)
def test_rows_are_added_and_normalised(add_layer_norm, shape, dtype, out_dtype):
    count, dim = shape
    hidden, delta = some_rows(count, dim, dtype), some_rows(count, dim, dtype, seed=1)
    summed = hidden + delta
    out, scale = add_layer_norm(hidden, delta, EPSILON, out_dtype)
    torch.testing.assert_close(hidden, summed, rtol=0, atol=1e-6)
    assert out.dtype == out_dtype
    assert out.shape == (count, dim)
    wanted = layer_norm(hidden.double(), (dim,), eps=EPSILON)
    assert relative_error(dequantised(out, scale), wanted) < ROUNDING[out_dtype] or dim == 1


@every_implementation
@pytest.mark.parametrize("out_dtype", [torch.float32, FLOAT8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "dim"), [(1, 16), (5, 72), (3, 1152), (9, 1)])
def test_normalised_rows_come_with_a_weight_and_a_bias_as_well(add_layer_norm, count, dim, dtype, out_dtype):
    hidden, delta = some_rows(count, dim), some_rows(count, dim, seed=1)
    weight, bias = (torch.randn(dim, device=DEVICE).to(dtype) for _ in range(2))
    affine_out = torch.empty(count, dim, dtype=dtype, device=DEVICE)
    folded, scale = add_layer_norm(hidden.clone(), delta, EPSILON, out_dtype)
    out, own_scale = add_layer_norm(hidden, delta, EPSILON, out_dtype, None, None, weight, bias, affine_out)
    # The compiler may round the last bit of another kernel otherwise.
    tolerance = 2e-6 if out_dtype == torch.float32 else 1e-2
    assert dim == 1 or relative_error(dequantised(out, own_scale), dequantised(folded, scale)) < tolerance
    wanted = layer_norm(hidden.double(), (dim,), weight.double(), bias.double(), EPSILON)
    assert relative_error(affine_out, wanted) < max(ROUNDING[dtype], 2e-6)


@pytest.mark.parametrize("add_layer_norm", implementations("add_layer_norm", ("triton",)), ids=implementation_name)
def test_no_rows_are_no_work(add_layer_norm):
    out, scale = add_layer_norm(some_rows(0, 40), some_rows(0, 40), EPSILON, FLOAT8)
    assert out.shape == (0, 40)
    assert scale.shape == (0, 1)


@every_implementation
def test_without_a_delta_the_rows_stay_as_they_are(add_layer_norm):
    hidden = some_rows(4, 48)
    before = hidden.clone()
    out, scale = add_layer_norm(hidden, None, EPSILON, torch.float32)
    assert scale is None
    assert torch.equal(hidden, before)
    torch.testing.assert_close(out, layer_norm(hidden, (48,), eps=EPSILON))


@every_implementation
def test_a_delta_of_another_type_is_added_in_float32(add_layer_norm):
    hidden, delta = some_rows(4, 48), some_rows(4, 48, torch.bfloat16, seed=1)
    summed = hidden + delta.float()
    add_layer_norm(hidden, delta, EPSILON, torch.bfloat16)
    assert torch.equal(hidden, summed)


@every_implementation
def test_the_scale_of_a_row_is_its_largest_magnitude_over_448(add_layer_norm):
    hidden = some_rows(6, 64)
    out, scale = add_layer_norm(hidden, None, EPSILON, FLOAT8)
    wanted = layer_norm(hidden, (64,), eps=EPSILON).abs().amax(dim=1, keepdim=True) / 448
    assert scale.shape == (6, 1)
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale, wanted)
    assert (out.float().abs().amax(dim=1) == 448).all()


@every_implementation
def test_a_row_far_from_zero_keeps_its_variance(add_layer_norm):
    hidden = some_rows(4, 128) + 1000
    out, _ = add_layer_norm(hidden, None, EPSILON, torch.float32)
    wanted = layer_norm(hidden.double(), (128,), eps=EPSILON)
    assert relative_error(out, wanted) < 1e-4


@every_implementation
def test_a_constant_row_becomes_zeros(add_layer_norm):
    out, scale = add_layer_norm(torch.full((2, 32), 3.0, device=DEVICE), None, EPSILON, FLOAT8)
    assert torch.equal(dequantised(out, scale), torch.zeros(2, 32, device=DEVICE))
    assert scale.gt(0).all()


@every_implementation
def test_a_row_does_not_see_its_neighbours(add_layer_norm):
    hidden = some_rows(9, 48)
    together, _ = add_layer_norm(hidden, None, EPSILON, torch.float32)
    for row in range(9):
        alone, _ = add_layer_norm(hidden[row : row + 1].clone(), None, EPSILON, torch.float32)
        torch.testing.assert_close(together[row], alone[0])


@every_implementation
def test_a_given_scale_is_that_of_all_rows(add_layer_norm):
    hidden = some_rows(6, 64)
    out, scale = add_layer_norm(hidden, None, EPSILON, FLOAT8, out_scale=8 / 448)
    assert scale is None
    wanted = layer_norm(hidden.double(), (64,), eps=EPSILON)
    assert relative_error(out.double() * 8 / 448, wanted) < ROUNDING[FLOAT8]


@every_implementation
def test_what_a_given_scale_does_not_hold_is_cut(add_layer_norm):
    hidden = some_rows(6, 64)
    out, _ = add_layer_norm(hidden, None, EPSILON, FLOAT8, out_scale=0.5 / 448)
    wanted = layer_norm(hidden, (64,), eps=EPSILON)
    assert torch.equal(out.float()[wanted.abs() > 0.51], 448 * wanted.sign()[wanted.abs() > 0.51])


@every_implementation
@pytest.mark.skipif(DEVICE == "cpu", reason="threads run one after the other without a CUDA device")
@pytest.mark.parametrize("delta_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "dim"), [(1, 48), (37, 48), (735, 48), (1001, 77), (333, 17)])
def test_two_hundred_runs_all_add_the_residual_once(add_layer_norm, count, dim, delta_dtype):
    hidden, delta = some_rows(count, dim), some_rows(count, dim, delta_dtype, seed=1)
    summed = (hidden.double() + delta.double()).float()
    wanted = layer_norm(summed.double(), (dim,), eps=EPSILON)
    for _ in range(200):
        stream = hidden.clone()
        out, _ = add_layer_norm(stream, delta, EPSILON, torch.float32)
        assert torch.equal(stream, summed)
        assert relative_error(out, wanted) < ROUNDING[torch.float32]
