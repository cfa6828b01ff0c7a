"""How far are weights of 4 bits from those that they stand for, in our format and in others?

Relative errors (root mean square) of random weights: normally distributed ones, and ones of Student's distribution
with 5 degrees of freedom, which has more large ones. Levels times a scale for each group; scales are rounded to
bfloat16 unless they are powers of two.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench.harness.output import parser_of
from kestrel_ops import dequantise_int4, quantise_int4

_OURS = (1.0, 3.0, 5.0, 7.0, 10.0, 14.0, 20.0, 28.0)
_EVEN = tuple(range(1, 16, 2))
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FACTORS = (1.1, 1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
_ROWS, _COLUMNS = 2048, 2048


def ours(weight: Tensor) -> Tensor:
    """As it is stored for `--expert-dtype int4`."""
    return dequantise_int4(*quantise_int4(weight), weight.shape[1])


def nearest(weight: Tensor, levels: tuple[float, ...], group: int, factors: tuple[float, ...]) -> Tensor:
    """By levels of either sign. Of some factors of the scale at which the largest weight is the largest level, the
    best is taken."""
    groups = weight.view(-1, group)
    signed = torch.tensor(sorted({*levels, *(-level for level in levels)}))
    between = (signed[1:] + signed[:-1]) / 2
    scale = groups.abs().amax(dim=1, keepdim=True) / levels[-1]
    return _best(groups, ((scale * factor).bfloat16().float() for factor in factors), signed, between).view_as(
        weight
    )


def from_minus_eight(weight: Tensor, group: int) -> Tensor:
    """By -8 to 7, with the best of some scales of either sign."""
    groups = weight.view(-1, group)
    largest = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True)) / -8
    levels = torch.arange(-8.0, 8)
    between = levels[1:] - 0.5
    scales = ((sign * factor * largest).bfloat16().float() for factor in _FACTORS[1:] for sign in (1, -1))
    return _best(groups, scales, levels, between).view_as(weight)


def with_offset(weight: Tensor, group: int) -> Tensor:
    """By 16 even steps from the least to the largest weight."""
    groups = weight.view(-1, group)
    least, most = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    step, offset = ((most - least) / 15).bfloat16().float(), least.bfloat16().float()
    return (((groups - offset) / step).round().clamp(0, 15) * step + offset).view_as(weight)


def mxfp4(weight: Tensor) -> Tensor:
    """By float4 and powers of two."""
    groups = weight.view(-1, 32)
    scale = torch.exp2(groups.abs().amax(dim=1, keepdim=True).log2().floor() - 2)
    levels = torch.tensor(sorted({*_FLOAT4, *(-level for level in _FLOAT4)}))
    return _best(groups, iter((scale,)), levels, (levels[1:] + levels[:-1]) / 2).view_as(weight)


def _best(groups: Tensor, scales: Iterator[Tensor], levels: Tensor, between: Tensor) -> Tensor:
    found, least = torch.zeros_like(groups), torch.full((len(groups), 1), torch.inf)
    for scale in scales:
        own = levels[torch.bucketize(groups / scale, between)] * scale
        error = (own - groups).square().sum(dim=1, keepdim=True)
        found, least = torch.where(error < least, own, found), torch.minimum(error, least)
    return found


FORMATS: tuple[tuple[str, float, Callable[[Tensor], Tensor]], ...] = (
    ("ours: its levels, groups of 64", 4.25, ours),
    ("its levels, groups of 32", 4.5, partial(nearest, levels=_OURS, group=32, factors=_FACTORS)),
    ("even steps, groups of 64", 4.25, partial(nearest, levels=_EVEN, group=64, factors=_FACTORS)),
    ("-8 to 7, groups of 64, scales with a sign", 4.25, partial(from_minus_eight, group=64)),
    ("even steps with an offset, groups of 64", 4.5, partial(with_offset, group=64)),
    ("float4 (e2m1), groups of 64", 4.25, partial(nearest, levels=_FLOAT4, group=64, factors=(1.0,))),
    ("MXFP4: float4, groups of 32, powers of two", 4.25, mxfp4),
)


def main() -> int:
    """Print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=_ROWS, help=f"of {_COLUMNS} weights each (%(default)s)")
    num_rows = parser.parse_args().rows
    torch.manual_seed(1)
    normal = torch.randn(num_rows, _COLUMNS)
    students = torch.distributions.StudentT(5.0).sample((num_rows, _COLUMNS))
    print("| format | bits | normal | Student's |\n|---|---|---|---|")
    for name, bits, rounded in FORMATS:
        errors = [((rounded(each) - each).norm() / each.norm()).item() for each in (normal, students)]
        print(f"| {name} | {bits} | {errors[0]:.3f} | {errors[1]:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
