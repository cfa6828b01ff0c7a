"""The weights of low-rank adapters in slots: what the operations that apply adapters take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LowRank(NamedTuple):
    """The low-rank terms of one linear layer, or of a stack of E experts: x @ a.T @ b in each of S slots.

    Slots are counted from 1; slot 0 stands for no adapter and has no weights. Rows behind an adapter's rank are 0.
    """

    a: Tensor
    """[S, R, in], or [S, E, R, in] for experts."""
    b: Tensor
    """[S, R, out], or [S, E, R, out] for experts."""

    def of_expert(self, expert: int) -> LowRank:
        """The part of one expert."""
        return LowRank(self.a[:, expert], self.b[:, expert])


class ExpertAdapters(NamedTuple):
    """The low-rank terms of a mixture of experts, and the tokens that use them."""

    up: LowRank
    """Of the first product: out is 2 * inner."""
    down: LowRank
    """Of the second product."""
    slots: Tensor
    """[T] int64: the slot of each token, 0 for none."""
