"""How the products of float8 experts are divided into programs on Hopper, by the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WarpgroupPlan:
    """Divides both products of a mixture of experts into programs."""

    block_tokens: int
    """The most tokens of an item, a multiple of 16."""
    tiles: int
    """Of 64 rows of the weight, for each of two warpgroups. Times `block_tokens` that is at most 256."""
    num_stages: int
    """Iterations whose loads run concurrently."""
    is_few: bool
    """Whether the first product rounds its results itself, and programs leave place for others."""
    programs: int
    """Of each multiprocessor, one or two, which take tiles in turns; two where there are few tokens."""


_FEWEST = 6
"""Tokens of an expert, up to which Triton's programs are faster: they leave attention more place beside them."""

PLANS = (
    WarpgroupPlan(16, tiles=2, num_stages=3, is_few=True, programs=2),
    WarpgroupPlan(32, tiles=2, num_stages=3, is_few=True, programs=2),
    WarpgroupPlan(64, tiles=1, num_stages=4, is_few=False, programs=2),
    WarpgroupPlan(128, tiles=2, num_stages=4, is_few=False, programs=1),
)
"""The fastest on one H200 (`bench.experts`), by the tokens of an item."""


def plan_for(per_expert: float) -> WarpgroupPlan | None:
    """The plan for so many tokens of an expert; None where Triton's kernels are faster."""
    if per_expert <= _FEWEST:
        return None
    # Experts have more tokens than the mean.
    return next((plan for plan in PLANS if per_expert <= 0.75 * plan.block_tokens), PLANS[-1])
