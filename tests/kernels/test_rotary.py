import cmath

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel_ops import rotary

FREQUENCIES = torch.tensor([1.0, 0.31, 0.07])  # six of eight dimensions are rotated


def angles(positions, frequencies=FREQUENCIES):
    table = torch.as_tensor(positions, dtype=torch.float32)[:, None] * frequencies
    return table.cos(), table.sin()


def rotated(heads, positions):
    return rotary(heads, *angles(positions))


def interleaved(heads, positions):
    """The other convention: neighbours are written out as pairs (first, second, first, second …)."""
    half = len(FREQUENCIES)
    turned = rotated(heads, positions)
    pairs = torch.stack((turned[..., :half], turned[..., half : 2 * half]), dim=-1).flatten(-2)
    return torch.cat((pairs, turned[..., 2 * half :]), dim=-1)


def test_lanes_turn_in_pairs_as_complex_numbers():
    torch.manual_seed(0)
    heads, positions = torch.randn(4, 2, 8), [0, 1, 5, 700]
    turned = rotated(heads, positions)
    for token, position in enumerate(positions):
        for head in range(2):
            for dim, frequency in enumerate(FREQUENCIES.tolist()):
                pair = complex(heads[token, head, dim], heads[token, head, dim + 3])
                wanted = pair * cmath.exp(1j * position * frequency)
                assert turned[token, head, dim].item() == pytest.approx(wanted.real, abs=1e-3)
                assert turned[token, head, dim + 3].item() == pytest.approx(wanted.imag, abs=1e-3)


def test_lanes_behind_the_rotated_ones_pass_through():
    heads = torch.randn(3, 2, 8)
    assert torch.equal(rotated(heads, [1, 2, 3])[..., 6:], heads[..., 6:])


def test_position_zero_turns_nothing():
    heads = torch.randn(1, 2, 8)
    assert torch.equal(rotated(heads, [0]), heads)


@settings(max_examples=50)
@given(
    query_at=st.integers(0, 300),
    key_at=st.integers(0, 300),
    shift=st.integers(0, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_scores_depend_on_the_distance_alone(query_at, key_at, shift, seed):
    torch.manual_seed(seed)
    query, key = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    here = (rotated(query, [query_at]) * rotated(key, [key_at])).sum()
    there = (rotated(query, [query_at + shift]) * rotated(key, [key_at + shift])).sum()
    torch.testing.assert_close(here, there, rtol=0, atol=2e-3)


def test_scores_do_depend_on_the_distance():
    query = key = torch.ones(1, 1, 8)
    near = (rotated(query, [4]) * rotated(key, [4])).sum()
    far = (rotated(query, [4]) * rotated(key, [1])).sum()
    assert near == pytest.approx(8.0, abs=1e-5)
    assert far < near - 1


def test_interleaved_and_half_split_pairs_give_equal_scores():
    torch.manual_seed(1)
    queries, keys, positions = torch.randn(9, 2, 8), torch.randn(9, 2, 8), list(range(9))
    halves = torch.einsum("qhd,khd->hqk", rotated(queries, positions), rotated(keys, positions))
    pairs = torch.einsum("qhd,khd->hqk", interleaved(queries, positions), interleaved(keys, positions))
    torch.testing.assert_close(halves, pairs)
    assert not torch.equal(interleaved(queries, positions), rotated(queries, positions))


def test_a_short_type_is_kept_but_turned_in_float32():
    torch.manual_seed(2)
    heads = torch.randn(6, 2, 8).bfloat16()
    turned = rotated(heads, range(6))
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotated(heads.float(), range(6)).bfloat16())
