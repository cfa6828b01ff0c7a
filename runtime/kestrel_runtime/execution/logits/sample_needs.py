"""The features of sampling that the rows of a step need."""

from __future__ import annotations

from typing import NamedTuple


class SampleNeeds(NamedTuple):
    """The features of sampling that a batch may need; others are not computed. Part of a graph's key."""

    is_random: bool
    value_kinds: int
    """Bit mask of the family: kinds of values that tokens may be sampled with, and those that are fed in carry."""
    is_controlled: bool = False
    """Whether a row has `Sequence.controls`."""
    with_logprobs: bool = False
    """Whether a row has `Sequence.num_logprobs`."""
    is_restricted: bool = False
    """Whether a row has `Sequence.matcher`, so that the step samples under masks."""
