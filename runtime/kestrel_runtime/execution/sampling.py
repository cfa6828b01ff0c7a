"""Samples token ids on the device: by temperature and nucleus, under the rules of each sequence's grammar state.

Random numbers are counter-based: those of a token follow from the request's seed and the number of tokens before
it, so that they do not depend on the batch, on preemption, or on failed steps. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from kestrel_ops import sample
from kestrel_runtime.execution.request_state import RequestState, RowState


class SampleNeeds(NamedTuple):
    """What the tokens of a batch may need. What none of them needs is not computed. Part of every graph's key."""

    is_random: bool
    value_kinds: int
    """Bit mask of the family: kinds of values that tokens of the batch carry or may be sampled with."""


class TokenSampler:
    """Samples for rows of the request state in one step: `ids` first, then further choices of the same tokens."""

    def __init__(
        self,
        state: RequestState,
        rows: Tensor,  # [B] int64
        needs: SampleNeeds,
        uniform: Callable[[Tensor, Tensor], Tensor],  # the operation `philox_uniform`
    ) -> None:
        self.row_state: RowState = state.read(rows)
        self._rules = state.rules
        self._random: tuple[Tensor, Tensor, Tensor] | None = None
        if needs.is_random:
            numbers = uniform(self.row_state.seeds, self.row_state.num_sampled)
            self._random = (*state.settings(rows), numbers)

    def ids(self, logits: Tensor) -> Tensor:
        """Token ids int64 [B] from logits float32 [B, vocabulary]."""
        return self.pick(logits.masked_fill(self._rules.forbidden[self.row_state.rules], float("-inf")), 0)

    def pick(self, logits: Tensor, number: int) -> Tensor:
        """Indices int64 [B] of logits float32 [B, choices], by the token's uniform number of this index, 0 to 3."""
        if self._random is None:
            return logits.argmax(dim=-1)
        temperature, top_p, uniform = self._random
        return sample(logits, temperature, top_p, uniform[:, number])
