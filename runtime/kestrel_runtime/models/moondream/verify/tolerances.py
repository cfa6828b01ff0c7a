"""Bounds errors: by fixed bounds for float32, and by simulated rounding for shorter formats.

docs/numerics.md has the derivation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from kestrel_runtime.models.family import Comparison

FLOAT32_RELATIVE = 2e-4
"""Largest error of embeddings, hidden states, keys and values in float32, as a share of the largest value."""
FLOAT32_LOGIT = 1e-3
"""Largest absolute error of a logit in float32, where the largest logits are about 10."""
NUM_SIMULATIONS = 24
FALSE_ALARM = 1e-4
"""The probability that a correct backend exceeds the bound on a tensor's RMS error, if simulations are exact."""
INT4_DEVIATION = 0.092
"""The relative error of normally distributed weights in 4 bits (`kestrel_ops.quantise_int4`)."""
SLACK = 1.5
"""Factor for inexact simulations: a backend may have a few more roundings of a kind than are simulated."""
DEVIATIONS = 4.0
"""Factor of the bound on single elements; see `ExpectedError.compare`."""


def rounding_deviation(number_format: torch.dtype | Literal["int4"]) -> float:
    """Returns the standard deviation of the relative error of one rounding to nearest, over a random significand.

    The error is uniform within the unit roundoff u times the power of two below the value, and the square of a
    significand that is uniform in its logarithm is 1.5 / ln 2 on average: u * sqrt(ln 2 / 4.5) = 0.39 u. That of
    4 bits depends on the other weights of a group, and is known for normally distributed ones.
    """
    if number_format == "int4":
        return INT4_DEVIATION
    return torch.finfo(number_format).eps / 2 * math.sqrt(math.log(2) / 4.5)


def f_quantile(exceeded_by: float, dof: float, reference_dof: float) -> float:
    """Returns the value that an F distribution exceeds with this probability, by Wilson and Hilferty's
    approximation.

    Up to 12% above the exact value for probabilities of 1e-4, at least one degree and eight of reference.
    """
    z = NormalDist().inv_cdf(1 - exceeded_by)
    a, b = 2 / (9 * dof), 2 / (9 * reference_dof)
    # The cube root of F, r, makes ((1 - b) r - (1 - a)) / sqrt(b r² + a) nearly normal.
    square, linear, constant = (1 - b) ** 2 - b * z**2, (1 - a) * (1 - b), (1 - a) ** 2 - a * z**2
    return ((linear + math.sqrt(linear**2 - square * constant)) / square) ** 3


@dataclass(frozen=True, slots=True)
class LargestError:
    """A bound on every element."""

    tolerance: float

    def compare(self, actual: Tensor, expected: Tensor) -> Comparison:
        """Returns the largest absolute error of tensors of one shape."""
        return Comparison("largest error", (actual - expected).abs().max().item(), self.tolerance)


@dataclass(frozen=True, slots=True)
class ExpectedError:
    """The error of a tensor in simulations: as a whole and of each element."""

    rms: float
    degrees_of_freedom: float
    """The effective number of independent directions of the error; see `degrees_of_freedom`."""
    elements: Tensor
    """Standard deviations, in the shape of the tensor."""

    @classmethod
    def of(cls, exact: Tensor, simulated: Sequence[Tensor]) -> ExpectedError:
        """Computes the errors from a tensor [..., width] without rounding and several simulations with rounding.

        The deviation of an element over few simulations may be small by chance, so it counts as at least that of
        its row.
        """
        errors = torch.stack([tensor - exact for tensor in simulated])
        squares = errors.square().mean(dim=0)
        by_row = squares.mean(dim=-1, keepdim=True)
        return cls(
            rms=squares.mean().sqrt().item(),
            degrees_of_freedom=degrees_of_freedom(errors.flatten(1)),
            elements=torch.maximum(squares, by_row).sqrt(),
        )

    @property
    def tolerance(self) -> float:
        """Returns the bound on an error's root mean square."""
        dof = self.degrees_of_freedom
        return SLACK * math.sqrt(f_quantile(FALSE_ALARM, dof, dof * NUM_SIMULATIONS)) * self.rms

    def compare(self, actual: Tensor, expected: Tensor) -> Comparison:
        """Returns the root mean square of the error or its largest element, whichever is nearer to its bound.

        Elements are bounded so that a single wrong one is found in a large tensor. The largest of n independent
        normal errors is about sqrt(2 ln n) deviations.
        """
        error = actual - expected
        crest = math.sqrt(2 * math.log(max(error.numel(), 2)))
        in_deviations = error.abs() / self.elements.clamp_min(torch.finfo(torch.float32).tiny)
        comparisons = (
            Comparison("RMS error", error.square().mean().sqrt().item(), self.tolerance),
            Comparison("largest error in deviations", in_deviations.max().item(), DEVIATIONS * crest),
        )
        return max(comparisons, key=lambda comparison: comparison.share)


def degrees_of_freedom(errors: Tensor) -> float:
    """Returns the effective number of independent directions of random vectors [samples, elements], at least 1.

    That is tr(C)² / tr(C²) of their covariance C, which a sum of squares of normal numbers has as its degrees of
    freedom by Satterthwaite's approximation. tr(C²) is estimated by products of different samples alone.
    """
    products = errors.double() @ errors.double().T
    count = len(errors)
    own = products.diagonal().mean().item()
    crossed = (products.square().sum() - products.diagonal().square().sum()).item() / (count * (count - 1))
    dof = own**2 / max(crossed, torch.finfo(torch.float64).tiny)
    return min(max(dof, 1.0), float(errors.shape[1]))
