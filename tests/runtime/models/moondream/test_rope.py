import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kestrel_runtime.models.moondream.rope import rotary_tables, tau_positions


@pytest.mark.parametrize("theta", [10_000.0, 1_500_000.0])
def test_an_angle_is_the_position_times_the_frequency_of_its_dimension(theta):
    cosine, sine = rotary_tables(32, 800, theta)
    assert cosine.shape == sine.shape == (800, 16)
    assert cosine.dtype == sine.dtype == torch.float32
    for position in (0, 1, 2, 729, 799):
        for dim in range(16):
            angle = position * theta ** (-2 * dim / 32)
            assert cosine[position, dim].item() == pytest.approx(math.cos(angle), abs=2e-4)
            assert sine[position, dim].item() == pytest.approx(math.sin(angle), abs=2e-4)


def test_the_first_lane_turns_by_one_radian_and_position_zero_not_at_all():
    cosine, sine = rotary_tables(8, 3, 10_000.0)
    assert sine[:, 0].tolist() == pytest.approx([0, math.sin(1), math.sin(2)])
    assert cosine[0].tolist() == [1.0] * 4


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
