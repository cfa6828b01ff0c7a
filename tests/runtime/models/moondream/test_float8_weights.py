"""Experts rounded to float8: each row to its own scale, with the error that is told."""

import pytest
import torch

from kestrel_runtime.models.moondream.float8_weights import float8_experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_is_as_close_as_float8_with_a_scale_of_its_own_allows(dtype):
    weight = torch.randn(3, 7, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[1, 2] *= 1e4
    weight[2, 6] *= 1e-6
    rounded, scales, _ = float8_experts(weight)
    assert (rounded.dtype, rounded.shape) == (torch.float8_e4m3fn, weight.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, weight.shape[:2])
    largest = weight.float().abs().amax(dim=2, keepdim=True)
    # Half a unit of the last of three bits, or of the smallest number that float8 has below its largest one.
    allowed = (weight.float().abs() / 16).maximum(largest / 448 * 2**-10)
    assert ((rounded.float() * scales[..., None] - weight.float()).abs() <= allowed * 1.001).all()


def test_the_error_is_that_of_all_weights_together():
    weight = torch.randn(2, 5, 301, generator=torch.Generator().manual_seed(2))
    rounded, scales, error = float8_experts(weight)
    changed = rounded.float() * scales[..., None] - weight
    assert error == pytest.approx((changed.norm() / weight.norm()).item(), rel=1e-5)
    assert 0.02 < error < 0.03


def test_what_float8_represents_is_not_changed_and_zeros_stay_zeros():
    weight = torch.zeros(1, 3, 5)
    weight[0, 0] = torch.tensor([448.0, -224.0, 1.75, 0.0, 2**-6])
    rounded, scales, error = float8_experts(weight)
    assert torch.equal(rounded.float() * scales[..., None], weight)
    assert error == 0.0
