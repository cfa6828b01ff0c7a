"""Runs the decoder over packed prompts: few large products per block, with fused operations between them.

The residual stream is float32. Does not synchronise with the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kestrel_ops import BlockLowRank, Kernels
from kestrel_runtime.execution.cuda_stream import SideStream
from kestrel_runtime.execution.kv_cache import KVCache, LayerPages
from kestrel_runtime.execution.step_inputs import PackedChunks
from kestrel_runtime.models.moondream.adapters.slabs import GroupedAdapters, RowAdapters
from kestrel_runtime.models.moondream.fused.weights import FusedBlock, Matrix
from kestrel_runtime.models.moondream.text.decoder import TextModel, rotary_tables


class FusedPrefill:
    """Runs `fused_blocks` of a `TextModel`; equal to its `forward` over packed prompts, up to rounding."""

    def __init__(self, text: TextModel, blocks: Sequence[FusedBlock], kernels: Kernels) -> None:
        config = text.config
        self._config = config
        self._kernels = kernels
        self._dtype = text.wte.dtype
        self._side, self._in_turn = SideStream(text.wte.device), SideStream(torch.device("cpu"))
        # A bias of the type of a product costs nothing; converting it each time would be one more kernel.
        self._blocks = tuple(
            replace(
                block,
                up=replace(block.up, bias=block.up.bias.to(self._dtype)),
                down=replace(block.down, bias=block.down.bias.to(self._dtype)),
            )
            for block in blocks
        )
        self._cosine, self._sine = rotary_tables(
            config.rotary_dim, config.max_context, config.rope_theta, text.wte.device
        )

    def forward(
        self,
        embeddings: Tensor,  # [T, dim], the model's type
        plan: PackedChunks,  # of the T tokens
        cache: KVCache,
        last_rows: Tensor | None = None,  # [n] int64: rows that end their chunks
        adapters: RowAdapters | None = None,  # of the T tokens
    ) -> Tensor:  # [T, dim] float32, or [n, dim] of the last rows: before the final LayerNorm
        """Runs the blocks and writes the tokens' keys and values. With `last_rows` the last block writes the keys
        and values of all tokens and computes only these rows.
        """
        hidden = embeddings.to(torch.float32, copy=True)
        delta: Tensor | None = None
        num_whole = len(self._blocks) - (last_rows is not None)
        grouped = None if adapters is None else adapters.grouped(self._kernels, self._config.dim, is_decode=False)
        for layer in range(num_whole):
            delta = self._block(layer, hidden, delta, plan, cache, grouped)
        if last_rows is not None:
            return self._last_block(hidden, delta, plan, cache, last_rows, grouped)
        return hidden if delta is None else hidden.add_(delta)

    def _block(
        self,
        layer: int,
        hidden: Tensor,
        delta: Tensor | None,
        plan: PackedChunks,
        cache: KVCache,
        adapters: GroupedAdapters | None,
    ) -> Tensor:
        """Adds `delta` to the stream and returns the next `delta`."""
        block, pages = self._blocks[layer], cache.layer(layer)
        low_rank = None if adapters is None else adapters.of_block(layer, block.ln)
        if block.experts is None:
            normed, scale = self._normed(block, hidden, delta, low_rank)
            return self._attention(block, normed, scale, plan, pages, low_rank)
        unfolded = torch.empty(hidden.shape, dtype=block.ln.weight.dtype, device=hidden.device)
        normed, scale = self._normed(block, hidden, delta, low_rank, unfolded)
        experts = None if adapters is None else adapters.of_experts(layer)
        side = self._side if adapters is None else self._in_turn  # parts with adapters share memory
        # Attention and experts of a block both take the stream as it is here.
        with side.forked():
            out = self._attention(block, normed, scale, plan, pages, low_rank)
        mixed = block.experts(unfolded, self._kernels.mixture_of_experts, experts)
        side.join()
        return out + mixed

    def _attention(
        self,
        block: FusedBlock,
        normed: Tensor,
        scale: Tensor | None,
        plan: PackedChunks,
        pages: LayerPages,
        low_rank: BlockLowRank | None,
    ) -> Tensor:
        """Returns what attention, and the MLP where there is one, add to the stream."""
        product = self._product(block.up, normed, scale)
        qkv, inner = product.tensor_split((self._config.qkv_dim,), dim=1)
        if low_rank is not None:
            self._kernels.add_up_terms(product, low_rank)
        query, key, value = self._rotated_qkv(block, qkv, plan, pages)
        attended = self._attended(query, key, value, plan, pages)
        return self._down(block, attended, inner, low_rank)

    def _last_block(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        plan: PackedChunks,
        cache: KVCache,
        rows: Tensor,
        adapters: GroupedAdapters | None,
    ) -> Tensor:
        """Writes all keys and values of the last block, and returns the final hidden states of `rows` only."""
        layer, qkv_dim = len(self._blocks) - 1, self._config.qkv_dim
        block, pages = self._blocks[layer], cache.layer(layer)
        low_rank = None if adapters is None else adapters.of_block(layer, block.ln)
        normed, scale = self._normed(block, hidden, delta, low_rank)
        qkv = self._product(block.up.part(slice(qkv_dim)), normed, scale)
        if low_rank is not None:
            self._kernels.add_up_terms(qkv, low_rank._replace(up=low_rank.up[:1]))
        query, key, value = self._rotated_qkv(block, qkv, plan, pages)
        hidden = hidden[rows]
        if not len(rows):
            return hidden
        experts = None
        if adapters is not None and low_rank is not None:
            own = adapters.adapters.of_tokens(rows).grouped(self._kernels, self._config.dim, is_decode=False)
            experts, low_rank = (
                own.of_experts(layer),
                low_rank._replace(normed=low_rank.normed[rows], rows=own.rows),
            )
        inner = qkv[rows, :0]
        if block.experts is None:
            own_scale = None if scale is None else scale[rows]
            inner = self._product(block.up.part(slice(qkv_dim, None)), _rows(normed, rows), own_scale)
            if low_rank is not None:
                self._kernels.add_up_terms(inner, low_rank._replace(up=low_rank.up[1:]))
        attended = self._attended(query[rows], key[rows], value[rows], _single_rows(plan, rows), pages)
        out = self._down(block, attended, inner, low_rank)
        if block.experts is not None:
            out = out + block.experts(self._unfolded(block, hidden), self._kernels.mixture_of_experts, experts)
        return hidden + out

    def _normed(
        self,
        block: FusedBlock,
        hidden: Tensor,
        delta: Tensor | None,
        low_rank: BlockLowRank | None,
        unfolded: Tensor | None = None,  # [T, dim], written: with the norm's weight and bias
    ) -> tuple[Tensor, Tensor | None]:
        dtype, epsilon = block.up.weight.dtype, block.ln.eps
        if unfolded is None:
            return self._kernels.add_layer_norm(hidden, delta, epsilon, dtype, None, low_rank)
        affine = block.ln.weight, block.ln.bias, unfolded
        result = self._kernels.add_layer_norm(hidden, delta, epsilon, dtype, None, None, *affine)
        if low_rank is not None:
            low_rank.normed.copy_(unfolded)
        return result

    def _product(self, matrix: Matrix, rows: Tensor, scale: Tensor | None) -> Tensor:
        return self._kernels.scaled_linear(rows, scale, matrix.weight, matrix.scale, matrix.bias, self._dtype)

    def _rotated_qkv(
        self, block: FusedBlock, qkv: Tensor, plan: PackedChunks, pages: LayerPages
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query, key and value; writes key and value to the cache."""
        factors = (None, None) if block.tau is None else block.tau(qkv, plan.positions, self._kernels.tau_scales)
        return self._kernels.rotary_write_kv(
            qkv,
            plan.positions,
            self._cosine,
            self._sine,
            pages.key_pages,
            pages.value_pages,
            plan.slots,
            pages.key_scale,
            pages.value_scale,
            *factors,
        )

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, plan: PackedChunks, pages: LayerPages) -> Tensor:
        attended = self._kernels.prefill_attention(
            query,
            key,
            value,
            pages.key_pages,
            pages.value_pages,
            plan.page_table,
            plan.query_starts,
            plan.lengths,
            plan.visible_until,
            plan.max_chunk,
            pages.key_scale,
            pages.value_scale,
        )
        return attended.flatten(1)

    @staticmethod
    def _unfolded(block: FusedBlock, hidden: Tensor) -> Tensor:
        """Returns the normalised stream with the norm's weight and bias, which `up` has folded in."""
        return block.ln(hidden.to(block.ln.weight.dtype))

    def _down(self, block: FusedBlock, attended: Tensor, inner: Tensor, low_rank: BlockLowRank | None) -> Tensor:
        """Returns what attention, and the MLP where there is one, add to the stream."""
        operand = block.down.weight.dtype
        if block.experts is None:
            activations = self._kernels.concat_gelu(attended, inner, operand)
        else:
            activations = self._kernels.concat_gelu(None, attended, operand, activate=False)
        out = self._product(block.down, *activations)
        if low_rank is not None:
            self._kernels.add_down_terms(out, *activations, low_rank)
        return out


def _single_rows(plan: PackedChunks, rows: Tensor) -> PackedChunks:
    """Returns the last rows of chunks as chunks of one row each, whose context is in the pages."""
    chunks = torch.searchsorted(plan.query_starts[1:], rows.to(torch.int32), right=True)
    return PackedChunks(
        positions=plan.positions[rows],
        slots=plan.slots[rows],
        page_table=plan.page_table[chunks],
        query_starts=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
        lengths=plan.lengths[chunks],
        visible_until=plan.visible_until[rows],
        max_chunk=1,
    )


def _rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """Returns rows of a matrix that may be float8, which torch cannot index everywhere."""
    if matrix.dtype.itemsize == 1:
        return matrix.view(torch.uint8)[rows].view(matrix.dtype)
    return matrix[rows]
