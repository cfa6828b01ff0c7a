"""The paths through the decoder: plain, as the model defines it; fused; and invariant, for `--deterministic`.

Each writes the key-value cache.
"""

from __future__ import annotations

import logging
from typing import Literal, Protocol

import torch
from torch import Tensor

from kestrel_ops import Kernels
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.step_inputs import PackedChunks
from kestrel_runtime.models.moondream.adapters.slabs import RowAdapters
from kestrel_runtime.models.moondream.fused.decode import FusedDecoder
from kestrel_runtime.models.moondream.fused.prefill import FusedPrefill
from kestrel_runtime.models.moondream.fused.weights import fused_blocks, prompt_blocks
from kestrel_runtime.models.moondream.text.decoder import TextModel

_log = logging.getLogger(__name__)


class TextPath(Protocol):
    """Interface of the decoder. Hidden states are those of the last block, before the final LayerNorm."""

    def prefill(
        self,
        embeddings: Tensor,
        plan: PackedChunks,
        rows: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """Packed tokens [T, dim] → hidden states of `rows` [n] int64: [n, dim]."""
        ...

    def decode(
        self,
        embeddings: Tensor,
        positions: Tensor,
        page_table: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """One token of each sequence [B, dim], at positions [B] int64, pages [B, most pages] int32 → [B, dim]."""
        ...


class PlainText:
    """The decoder block by block, one operation after the other."""

    def __init__(self, text: TextModel) -> None:
        self._text = text

    def prefill(
        self,
        embeddings: Tensor,
        plan: PackedChunks,
        rows: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        return self._text(embeddings, plan.positions, cache.prefill(plan), adapters)[rows]

    def decode(
        self,
        embeddings: Tensor,
        positions: Tensor,
        page_table: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        return self._text(embeddings, positions, cache.decode(positions, page_table), adapters)


def single_tokens(positions: Tensor, page_table: Tensor, page_size: int) -> PackedChunks:
    """A decode step as prompts of one token each; a negative position is padding, which writes nothing."""
    known = positions.clamp(min=0)
    pages = page_table.gather(1, (known // page_size)[:, None].to(torch.int64))[:, 0].to(torch.int64)
    return PackedChunks(
        positions=known,
        slots=torch.where(positions >= 0, pages * page_size + known % page_size, -1),
        page_table=page_table,
        query_starts=torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device),
        lengths=(known + 1).to(torch.int32),
        prefix_lengths=torch.zeros(len(positions), dtype=torch.int32, device=positions.device),
        max_chunk=1,
    )


class FusedText:
    """The decoder on fused operations. `decode` does not synchronise, so it can be captured."""

    def __init__(
        self,
        text: TextModel,
        kernels: Kernels,
        precision: Literal["model", "float8"],
        *,
        max_batch_size: int,
        frees_originals: bool = False,
    ) -> None:
        """With `frees_originals` the matrices of `text.blocks` are freed block by block, so that only one copy of
        them is in memory. `text` keeps its embedding and its head."""
        blocks = fused_blocks(text, precision, frees_originals=frees_originals)
        matrices = [matrix for block in blocks for matrix in (block.up, block.down)]
        if precision == "float8" and (num_kept := sum(matrix.scale is None for matrix in matrices)):
            _log.warning(
                "%d of %d text matrices stay in %s: float8 products need multiples of 16",
                num_kept,
                len(matrices),
                text.wte.dtype,
            )
        self._prefill = FusedPrefill(text, prompt_blocks(text, blocks, frees_originals=frees_originals), kernels)
        self._decoder = FusedDecoder(text, blocks, kernels)
        self._workspace = self._decoder.workspace(max_batch_size)

    def prefill(
        self,
        embeddings: Tensor,
        plan: PackedChunks,
        rows: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        return self._prefill.forward(embeddings, plan, cache, rows, adapters)

    def decode(
        self,
        embeddings: Tensor,
        positions: Tensor,
        page_table: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """A negative position is padding: nothing is written, and its hidden state is undefined."""
        return self._decoder.forward(embeddings, positions, page_table, cache, self._workspace, adapters)


class InvariantText:
    """The decoder with fused weights, and kernels of which each row has the same bits in any step.

    Run it in an `InvariantMode`. A decode step is a prompt of one token for each sequence: what computes a token
    once computes it always.
    """

    def __init__(self, text: TextModel, kernels: Kernels, *, frees_originals: bool = False) -> None:
        """`kernels` are `Kernels.invariant()`. With `frees_originals` the matrices of `text` are freed."""
        blocks = fused_blocks(text, "model", frees_originals=frees_originals)
        blocks = prompt_blocks(text, blocks, frees_originals=frees_originals)
        self._prefill = FusedPrefill(text, blocks, kernels)

    def prefill(
        self,
        embeddings: Tensor,
        plan: PackedChunks,
        rows: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        assert adapters is None, "refused at the start"
        return self._prefill.forward(embeddings, plan, cache, rows)

    def decode(
        self,
        embeddings: Tensor,
        positions: Tensor,
        page_table: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """A negative position is padding: nothing is written, and its hidden state is undefined."""
        rows = torch.arange(len(positions), device=positions.device)
        plan = single_tokens(positions, page_table, cache.page_size)
        return self.prefill(embeddings, plan, rows, cache, adapters)
