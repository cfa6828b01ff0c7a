import torch

from kestrel_ops.norms.reference import quantise_rows


def test_rows_come_back_within_a_step_of_eight_bits():
    torch.manual_seed(0)
    rows = torch.randn(6, 40) * torch.tensor([1e-4, 0.1, 1, 30, 1e3, 1e6])[:, None]
    quantised, scale = quantise_rows(rows)
    assert quantised.dtype == torch.float8_e4m3fn
    # Three bits of mantissa: a sixteenth, and half the smallest step near zero.
    assert ((quantised.float() * scale - rows).abs() <= rows.abs() / 16 + scale * 2**-10).all()


def test_the_largest_of_a_row_fills_the_type():
    torch.manual_seed(1)
    quantised, scale = quantise_rows(torch.randn(5, 24).bfloat16())
    assert quantised.float().abs().amax(dim=1).tolist() == [448.0] * 5
    assert scale.dtype == torch.float32
    assert scale.shape == (5, 1)


def test_zeros_stay_zeros():
    quantised, scale = quantise_rows(torch.zeros(2, 8))
    assert not quantised.float().any()
    assert scale.isfinite().all()
