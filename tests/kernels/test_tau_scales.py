"""The scales of tau attention by every implementation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kestrel_ops.attention.reference import tau_positions
from tests.kernels.implementations import DEVICE, implementation_name, implementations

every_implementation = pytest.mark.parametrize("tau_scales", implementations("tau_scales"), ids=implementation_name)


def operands(num_tokens, num_heads, width, dtype=torch.float32):
    torch.manual_seed(num_tokens)
    packed = torch.randn(num_tokens, width + 3, device=DEVICE)[:, :width].to(dtype)
    positions = torch.arange(num_tokens, device=DEVICE) * 7 - 2
    query, value = (torch.randn(num_heads, width, device=DEVICE).to(dtype) * 0.1 for _ in range(2))
    return packed, positions, query, value, torch.randn(num_heads, device=DEVICE).to(dtype)


def written_out(packed, positions, weight, alpha):
    """Element by element, in Python's numbers."""
    rows = []
    for vector, position in zip(packed.tolist(), positions.tolist(), strict=True):
        activated = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in vector]
        rows.append(
            [
                math.tanh(sum(factor * value for factor, value in zip(row, activated, strict=True)))
                + 1 / (1 + math.exp(-own * math.log(max(position, 0) + 1)))
                + 0.5
                for row, own in zip(weight.tolist(), alpha.tolist(), strict=True)
            ]
        )
    return torch.tensor(rows, device=DEVICE)


@every_implementation
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "width"), [(1, 2, 17), (3, 5, 300), (5, 2, 17), (23, 3, 300), (40, 12, 129)]
)
def test_scales_are_those_written_out(tau_scales, num_tokens, num_heads, width):
    packed, positions, query, value, alpha = operands(num_tokens, num_heads, width)
    found = tau_scales(packed, positions, query, value, alpha)
    for own, weight in zip(found, (query, value), strict=True):
        assert own.is_contiguous()
        torch.testing.assert_close(own, written_out(packed, positions, weight, alpha), rtol=1e-5, atol=1e-5)


@every_implementation
@pytest.mark.parametrize("num_tokens", [2, 40])
@pytest.mark.parametrize("packed_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_of_short_types_have_the_type_of_the_weights(tau_scales, num_tokens, packed_dtype):
    packed, positions, query, value, alpha = operands(num_tokens, 4, 200, torch.bfloat16)
    found = tau_scales(packed.to(packed_dtype), positions.int(), query, value, alpha)
    for own, weight in zip(found, (query, value), strict=True):
        assert own.dtype == torch.bfloat16
        wanted = written_out(packed, positions, weight, alpha)
        torch.testing.assert_close(own.float(), wanted, rtol=0.02, atol=0.02)


@every_implementation
def test_very_many_tokens_are_scaled_as_few_are(tau_scales):
    packed, positions, query, value, alpha = operands(1100, 2, 17)
    found = tau_scales(packed, positions, query, value, alpha)
    few = tau_scales(packed[1077:1079], positions[1077:1079], query, value, alpha)
    for own, wanted in zip(found, few, strict=True):
        torch.testing.assert_close(own[1077:1079], wanted, rtol=1e-5, atol=1e-5)


@every_implementation
@pytest.mark.parametrize("num_tokens", [2, 20])
def test_weights_one_behind_the_other_give_the_same(tau_scales, num_tokens):
    packed, positions, query, value, alpha = operands(num_tokens, 8, 384)
    stacked = torch.cat([query, value])
    found = tau_scales(packed, positions, stacked[:8], stacked[8:], alpha)
    for own, weight in zip(found, (query, value), strict=True):
        torch.testing.assert_close(own, written_out(packed, positions, weight, alpha), rtol=1e-5, atol=1e-5)


@every_implementation
def test_no_token_has_no_scale(tau_scales):
    packed, positions, query, value, alpha = operands(1, 2, 17)
    assert [part.shape for part in tau_scales(packed[:0], positions[:0], query, value, alpha)] == [(0, 2), (0, 2)]


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=8))
def test_tau_is_one_at_position_zero_for_any_alpha(alpha):
    assert tau_positions(torch.tensor(alpha), torch.tensor([0])).tolist() == [[1.0] * len(alpha)]


def test_tau_is_the_sigmoid_of_alpha_and_the_logarithm_of_the_place():
    alpha, positions = [-1.5, 0.0, 0.7], [0, 1, 9, 730, 32_767]
    table = tau_positions(torch.tensor(alpha), torch.tensor(positions))
    for row, position in enumerate(positions):
        for head, slope in enumerate(alpha):
            wanted = 0.5 + 1 / (1 + math.exp(-slope * math.log(position + 1)))
            assert table[row, head].item() == pytest.approx(wanted, abs=1e-6)


def test_tau_counts_in_float32_whatever_the_type_of_alpha():
    positions = torch.tensor([500, 501])  # alike in bfloat16
    table = tau_positions(torch.tensor([1.0, -1.0]).bfloat16(), positions)
    assert table.dtype == torch.float32
    assert table[0, 0] < table[1, 0]
    assert table[0, 1] > table[1, 1]
