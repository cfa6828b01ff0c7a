"""The prefill of packed prompts as CUDA graphs, one for each of a few sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kestrel_runtime.execution.captured_graphs import CapturedGraphs, GraphBudget, Works
from kestrel_runtime.execution.graph_capture import Recorder
from kestrel_runtime.execution.step_inputs import PrefillPlan

_STEP_TOKENS, _LARGE_STEP_TOKENS = 64, 128
_LARGE_FROM_TOKENS = 1024
"""From here on products take rows by the larger step anyway."""
_USUAL_TEXT_TOKENS = (8, 16, 24, 32, 40)
"""Of questions about an image, template included."""

_Prefill = Callable[[Tensor, PrefillPlan, Tensor], Tensor]


class PromptSize(NamedTuple):
    """What graphs are told apart by. Packed prompts have the next size above them, padded with nobody's."""

    num_tokens: int
    num_chunks: int
    max_chunk: int

    @classmethod
    def of(cls, plan: PrefillPlan) -> PromptSize:
        """The size for the chunks of `plan`."""
        return cls.above(len(plan.positions), len(plan.lengths), plan.max_chunk)

    @classmethod
    def above(cls, num_tokens: int, num_chunks: int, max_chunk: int) -> PromptSize:
        """The size for so many tokens in so many chunks, the longest of `max_chunk`."""
        step = _STEP_TOKENS if num_tokens <= _LARGE_FROM_TOKENS else _LARGE_STEP_TOKENS
        padded = _rounded_up(num_tokens, step)
        if num_chunks == 1:
            return cls(padded, 1, padded)
        return cls(padded, _power_of_two(num_chunks), max(_power_of_two(max_chunk), _STEP_TOKENS))

    @classmethod
    def usual(cls, prefix_length: int, *, max_tokens: int, max_chunks: int) -> list[PromptSize]:
        """The sizes of one prompt of moderate length, and of several short questions together about an image each,
        which takes `prefix_length` positions; the largest first."""
        sizes = {cls.above(length, 1, length) for length in range(1, min(max_tokens, _LARGE_FROM_TOKENS) + 1)}
        for text in _USUAL_TEXT_TOKENS:
            length = prefix_length + text
            most = min(max_chunks, max_tokens // length)
            sizes |= {cls.above(count * length, count, length) for count in range(2, most + 1)}
        return sorted(sizes, reverse=True)


class PromptInputs:
    """Where graphs find their tokens: always the same places."""

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

    def usual_sizes(self, prefix_length: int) -> list[PromptSize]:
        """The usual sizes there is room for, the largest first."""
        most_tokens = len(self._embeddings)
        sizes = PromptSize.usual(prefix_length, max_tokens=most_tokens, max_chunks=self._max_chunks)
        return [size for size in sizes if self.fits(size)]

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

    def fill_blank(self, size: PromptSize) -> None:
        """Take tokens that store nothing, in chunks of the size, each from its sequence's start."""
        own, count = self._plan, size.num_tokens
        starts = torch.linspace(0, count, size.num_chunks + 1).int()
        lengths = starts.diff()
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        own.positions[:count] = positions.to(own.positions.device)
        own.slots[:count] = -1
        own.page_table[: size.num_chunks] = 0
        own.query_starts[: size.num_chunks + 1] = starts.to(own.query_starts.device)
        own.lengths[: size.num_chunks] = lengths.to(own.lengths.device)
        own.prefix_lengths[: size.num_chunks] = 0
        self._embeddings[:count] = 0
        self._rows[: size.num_chunks] = (starts[1:] - 1).to(self._rows.device)

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
    """Runs `prefill` by a graph where there is one for the prompts' size."""

    def __init__(self, prefill: _Prefill, inputs: PromptInputs, recorder: Recorder, budget: GraphBudget) -> None:
        """`prefill` takes packed tokens, their plan and the rows asked for, as a `TextPath` does."""
        self._prefill = prefill
        self._inputs = inputs
        self.captured = CapturedGraphs("prompts", recorder, budget)

    def __call__(self, embeddings: Tensor, plan: PrefillPlan, rows: Tensor) -> Tensor:
        """What `prefill` returns for them."""
        size = PromptSize.of(plan)
        if not self._inputs.fits(size):
            return self._prefill(embeddings, plan, rows)
        self._inputs.fill(embeddings, plan, rows)
        return self.captured.run(size, partial(self._padded, size))[: len(rows)].clone()

    def usual(self, prefix_length: int, max_context: int) -> Works:
        """The usual sizes of prompts, of which images take `prefix_length` positions; the largest first."""
        for size in self._inputs.usual_sizes(prefix_length):
            if size.num_tokens <= size.num_chunks * max_context:  # else there is no position for every token
                self._inputs.fill_blank(size)
                yield size, partial(self._padded, size)

    def _padded(self, size: PromptSize) -> Tensor:
        return self._prefill(*self._inputs.padded(size))


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
