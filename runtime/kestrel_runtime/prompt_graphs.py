"""The prefill of one prompt recorded as CUDA graphs, one for each of a few lengths, and replayed.

A single prompt keeps the device busy for less time than the host takes to launch its hundreds of kernels; replaying
takes the host no time. Several prompts at once keep it busy for longer and run as they are.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kestrel_runtime.prefill_plan import PrefillPlan
from kestrel_runtime.recording import Recording

_STEP_TOKENS = 64
_MOST_TOKENS = 1024
"""Of a longer prompt, launching takes no longer than running."""

_log = logging.getLogger(__name__)

_Prefill = Callable[[Tensor, PrefillPlan, Tensor], Tensor]


class PromptInputs:
    """Where a recorded prefill of one chunk finds its tokens: always the same place, padded with nobody's."""

    def __init__(self, dim: int, most_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        """For chunks of up to 1,024 tokens [T, dim] of sequences of up to `most_pages` pages."""
        self._embeddings = torch.zeros(_MOST_TOKENS, dim, dtype=dtype, device=device)
        self._rows = torch.zeros(1, dtype=torch.int64, device=device)
        self._plan = PrefillPlan(
            positions=torch.zeros(_MOST_TOKENS, dtype=torch.int64, device=device),
            slots=torch.full((_MOST_TOKENS,), -1, dtype=torch.int64, device=device),
            page_table=torch.zeros(1, most_pages, dtype=torch.int32, device=device),
            query_starts=torch.zeros(2, dtype=torch.int32, device=device),
            lengths=torch.zeros(1, dtype=torch.int32, device=device),
            prefix_lengths=torch.zeros(1, dtype=torch.int32, device=device),
            max_chunk=_MOST_TOKENS,
        )

    def fill(self, embeddings: Tensor, plan: PrefillPlan, rows: Tensor) -> None:
        """Take a chunk [T, dim], its plan, and the row [1] int64 that is asked for."""
        num_tokens, own = len(embeddings), self._plan
        self._embeddings[:num_tokens] = embeddings
        self._rows.copy_(rows)
        own.positions[:num_tokens] = plan.positions
        own.slots[:num_tokens] = plan.slots
        own.slots[num_tokens:] = -1
        own.page_table[:, : plan.page_table.shape[1]] = plan.page_table
        own.query_starts.copy_(plan.query_starts)
        own.lengths.copy_(plan.lengths)
        own.prefix_lengths.copy_(plan.prefix_lengths)

    def clear(self) -> None:
        """A chunk of one token, which is nobody's too: what runs on it writes no page."""
        self._plan.slots.fill_(-1)
        self._plan.positions[0] = 0
        self._plan.query_starts.copy_(torch.arange(2))
        self._plan.lengths.fill_(1)
        self._plan.prefix_lengths.zero_()
        self._rows.zero_()

    def padded(self, num_tokens: int) -> tuple[Tensor, PrefillPlan, Tensor]:
        """The place of the first `num_tokens` tokens, what is there of the chunk or nobody's."""
        plan = dataclasses.replace(
            self._plan,
            positions=self._plan.positions[:num_tokens],
            slots=self._plan.slots[:num_tokens],
            max_chunk=num_tokens,
        )
        return self._embeddings[:num_tokens], plan, self._rows


class PromptGraphs:
    """Records `prefill` when a length is first met. Stands in for it."""

    def __init__(self, prefill: _Prefill, inputs: PromptInputs) -> None:
        """`prefill` takes packed tokens, their plan and the rows asked for, as a `TextPath` does."""
        self._prefill = prefill
        self._inputs = inputs
        self._recorded: dict[int, Recording] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, embeddings: Tensor, plan: PrefillPlan, rows: Tensor) -> Tensor:
        """What `prefill` returns for them, on its own for one chunk that is asked for one row."""
        if not is_recorded(embeddings, plan, rows):
            return self._prefill(embeddings, plan, rows)
        size = padded_length(len(embeddings))
        recording = self._recorded.get(size) or self._record(size)
        self._inputs.fill(embeddings, plan, rows)
        return recording.replayed()

    def _record(self, size: int) -> Recording:
        started = time.monotonic()
        self._inputs.clear()
        recording = Recording.of(lambda: self._prefill(*self._inputs.padded(size)), self._pool)
        self._recorded[size] = recording
        _log.info("recorded prompts of up to %d tokens in %.2f s", size, time.monotonic() - started)
        return recording


def is_recorded(embeddings: Tensor, plan: PrefillPlan, rows: Tensor) -> bool:
    """Whether such a prefill is: one chunk, of which one row is asked for, that is not too long."""
    return len(plan.lengths) == len(rows) == 1 and len(embeddings) <= _MOST_TOKENS


def padded_length(num_tokens: int) -> int:
    """The next length that is recorded."""
    return -(-num_tokens // _STEP_TOKENS) * _STEP_TOKENS
