import math

import pytest
import torch

from kestrel_runtime.models.moondream.rope import rotary_tables


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
