"""Bounds on errors: what they are derived from, that correct results meet them, and that single faults do not."""

import math

import pytest
import torch

from kestrel_runtime.models.moondream.verify.tolerances import (
    FALSE_ALARM,
    NUM_SIMULATIONS,
    ExpectedError,
    LargestError,
    degrees_of_freedom,
    f_quantile,
    rounding_deviation,
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_one_rounding_deviates_as_the_unit_roundoff_says(dtype):
    chance = torch.Generator().manual_seed(1)
    values = torch.exp2(torch.rand(200_000, generator=chance) * 4)
    errors = values.to(dtype).float() - values
    measured = errors.square().mean().sqrt() / values.square().mean().sqrt()
    assert measured.item() == pytest.approx(rounding_deviation(dtype), rel=0.05)


@pytest.mark.parametrize("reference_dof", [16, 80, 400])
def test_a_quantile_is_nearly_exact_where_there_is_a_closed_form(reference_dof):
    # With two degrees of freedom F exceeds x with probability (1 + 2 x / n) ^ (-n / 2).
    exact = reference_dof / 2 * (FALSE_ALARM ** (-2 / reference_dof) - 1)
    assert exact <= f_quantile(FALSE_ALARM, 2, reference_dof) < 1.12 * exact


def test_degrees_of_freedom_are_the_independent_directions_of_an_error():
    chance = torch.Generator().manual_seed(1)
    for num_directions in (1, 3, 40):
        directions = torch.linalg.qr(torch.randn(500, num_directions, generator=chance))[0]
        samples = torch.randn(400, num_directions, generator=chance) @ directions.T
        assert degrees_of_freedom(samples) == pytest.approx(num_directions, rel=0.15)


class Noise:
    """Tensors [rows, width] that are off by normal errors, all of one deviation."""

    def __init__(self, num_rows: int = 8, width: int = 200) -> None:
        self._chance = torch.Generator().manual_seed(1)
        self.exact = torch.randn(num_rows, width, generator=self._chance)
        self.bound = ExpectedError.of(self.exact, [self.rounded() for _ in range(NUM_SIMULATIONS)])

    def rounded(self, deviation: float = 0.1) -> torch.Tensor:
        return self.exact + deviation * torch.randn(self.exact.shape, generator=self._chance)


def test_errors_like_the_simulated_ones_are_within_the_bound():
    noise = Noise()
    assert all(noise.bound.compare(noise.rounded(), noise.exact).holds for _ in range(200))


def test_errors_three_times_as_large_in_many_directions_are_not():
    noise = Noise()
    comparison = noise.bound.compare(noise.rounded(0.3), noise.exact)
    assert not comparison.holds
    assert comparison.measure == "RMS error"
    assert comparison.share > 1


def test_one_wrong_element_of_many_is_found_although_the_whole_is_within_the_bound():
    noise = Noise()
    actual = noise.rounded()
    actual[3, 17] += 2
    comparison = noise.bound.compare(actual, noise.exact)
    assert comparison.measure == "largest error in deviations"
    assert not comparison.holds


def test_an_error_in_a_single_direction_is_allowed_more_than_one_in_many():
    chance, exact = torch.Generator().manual_seed(1), torch.zeros(8, 200)
    direction = torch.randn(200, generator=chance)
    samples = [torch.randn(1, generator=chance) * direction.expand(8, 200) for _ in range(NUM_SIMULATIONS)]
    single = ExpectedError.of(exact, samples)
    many = Noise().bound
    assert single.tolerance / single.rms > 4 > 2 > many.tolerance / many.rms


@pytest.mark.parametrize("bound", [LargestError(1.0), Noise().bound], ids=["float32", "simulated"])
def test_what_is_no_number_is_within_no_bound(bound):
    actual = torch.zeros(8, 200)
    actual[5, 5] = math.nan
    comparison = bound.compare(actual, torch.zeros(8, 200))
    assert not comparison.holds
    assert comparison.share == math.inf
