"""The prefill of packed prompts recorded as CUDA graphs, one for each of a few sizes, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kestrel_runtime.prefill_plan import PrefillPlan
from kestrel_runtime.recording import Recorder, Recordings

_STEP_TOKENS, _LARGE_STEP_TOKENS = 64, 128
_LARGE_FROM_TOKENS = 1024
"""From here on products take rows by the larger step anyway."""

_Prefill = Callable[[Tensor, PrefillPlan, Tensor], Tensor]


class PromptSize(NamedTuple):
    """What recordings are told apart by. Packed prompts have the next size above them, padded with nobody's."""

    num_tokens: int
    num_chunks: int
    max_chunk: int

    @classmethod
    def of(cls, plan: PrefillPlan) -> PromptSize:
        """The size for the chunks of `plan`."""
        num_tokens, num_chunks = len(plan.positions), len(plan.lengths)
        step = _STEP_TOKENS if num_tokens <= _LARGE_FROM_TOKENS else _LARGE_STEP_TOKENS
        padded = _rounded_up(num_tokens, step)
        if num_chunks == 1:
            return cls(padded, 1, padded)
        return cls(padded, _power_of_two(num_chunks), max(_power_of_two(plan.max_chunk), _STEP_TOKENS))


class PromptInputs:
    """Where recordings find their tokens: always the same places."""

    def __init__(
        self,
        dim: int,
        most_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_tokens: int,
        max_chunks: int,
    ) -> None:
        """For `max_tokens` tokens [T, dim] in `max_chunks` chunks of sequences of `most_pages` pages, or less."""
        self._max_chunks, max_tokens = _power_of_two(max_chunks), _rounded_up(max_tokens, _LARGE_STEP_TOKENS)
        self._embeddings = torch.zeros(max_tokens, dim, dtype=dtype, device=device)
        self._rows = torch.zeros(self._max_chunks, dtype=torch.int64, device=device)
        self._plan = PrefillPlan(
            positions=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            slots=torch.full((max_tokens,), -1, dtype=torch.int64, device=device),
            page_table=torch.zeros(self._max_chunks, most_pages, dtype=torch.int32, device=device),
            query_starts=torch.zeros(self._max_chunks + 1, dtype=torch.int32, device=device),
            lengths=torch.zeros(self._max_chunks, dtype=torch.int32, device=device),
            prefix_lengths=torch.zeros(self._max_chunks, dtype=torch.int32, device=device),
            max_chunk=max_tokens,
        )

    def fits(self, size: PromptSize) -> bool:
        """Whether there is room."""
        return size.num_tokens <= len(self._embeddings) and size.num_chunks <= self._max_chunks

    def fill(self, embeddings: Tensor, plan: PrefillPlan, rows: Tensor) -> None:
        """Take packed tokens [T, dim], their plan, and the rows [n] int64 that are asked for, n ≤ chunks."""
        num_tokens, num_chunks, own = len(embeddings), len(plan.lengths), self._plan
        self._embeddings[:num_tokens] = embeddings
        self._rows[: len(rows)] = rows
        self._rows[len(rows) :] = 0
        own.positions[:num_tokens] = plan.positions
        own.slots[:num_tokens] = plan.slots
        own.slots[num_tokens:] = -1
        own.page_table[:num_chunks, : plan.page_table.shape[1]] = plan.page_table
        # Chunks of nobody have no tokens.
        own.query_starts[: num_chunks + 1] = plan.query_starts
        own.query_starts[num_chunks + 1 :] = plan.query_starts[-1]
        own.lengths[:num_chunks] = plan.lengths
        own.lengths[num_chunks:] = 0
        own.prefix_lengths[:num_chunks] = plan.prefix_lengths
        own.prefix_lengths[num_chunks:] = 0

    def padded(self, size: PromptSize) -> tuple[Tensor, PrefillPlan, Tensor]:
        """Tokens, plan and rows (one for each chunk) of the size, in their places."""
        num_tokens, num_chunks, max_chunk = size
        plan = PrefillPlan(
            positions=self._plan.positions[:num_tokens],
            slots=self._plan.slots[:num_tokens],
            page_table=self._plan.page_table[:num_chunks],
            query_starts=self._plan.query_starts[: num_chunks + 1],
            lengths=self._plan.lengths[:num_chunks],
            prefix_lengths=self._plan.prefix_lengths[:num_chunks],
            max_chunk=max_chunk,
        )
        return self._embeddings[:num_tokens], plan, self._rows[:num_chunks]


class PromptGraphs:
    """Records `prefill`: a prompt alone at once, several together when their size comes again."""

    def __init__(self, prefill: _Prefill, inputs: PromptInputs, recorder: Recorder) -> None:
        """`prefill` takes packed tokens, their plan and the rows asked for, as a `TextPath` does."""
        self._prefill = prefill
        self._inputs = inputs
        self._recordings = Recordings("prompts", recorder)

    def __call__(self, embeddings: Tensor, plan: PrefillPlan, rows: Tensor) -> Tensor:
        """What `prefill` returns for them."""
        size = PromptSize.of(plan)
        if not self._inputs.fits(size):
            return self._prefill(embeddings, plan, rows)
        self._inputs.fill(embeddings, plan, rows)
        is_usual = size.num_chunks == 1 and size.num_tokens <= _LARGE_FROM_TOKENS
        hidden = self._recordings.run(size, lambda: self._prefill(*self._inputs.padded(size)), at_once=is_usual)
        return hidden[: len(rows)]


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
