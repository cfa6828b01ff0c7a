"""The decoder over packed prompts: few large products a block, and everything between them fused.

Holds no pages and decides nothing about who runs. The residual stream is float32; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kestrel_ops import Kernels
from kestrel_runtime.kv_cache import KVCache
from kestrel_runtime.models.moondream.fused_weights import FusedBlock
from kestrel_runtime.models.moondream.rope import rotary_tables
from kestrel_runtime.models.moondream.text import TextModel
from kestrel_runtime.prefill_plan import PrefillPlan


class FusedPrefill:
    """Runs `fused_blocks` of a `TextModel`; equal to its `forward` over packed prompts, up to rounding."""

    def __init__(self, text: TextModel, blocks: Sequence[FusedBlock], kernels: Kernels) -> None:
        config = text.config
        self._config = config
        self._kernels = kernels
        self._dtype = text.wte.dtype
        # A product takes a bias of its own type for nothing; a conversion with each would be one more kernel.
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
        plan: PrefillPlan,  # of the T tokens
        cache: KVCache,
        last_rows: Tensor | None = None,  # [n] int64: rows that end their chunks
    ) -> Tensor:  # [T, dim] float32, or [n, dim] of the last rows: before the final LayerNorm
        """Run the blocks, writing the tokens' keys and values. With `last_rows` the last block computes theirs
        alone, once it has written everybody's keys and values."""
        hidden = embeddings.to(torch.float32, copy=True)
        delta: Tensor | None = None
        num_whole = len(self._blocks) - (last_rows is not None)
        for layer in range(num_whole):
            delta = self._block(layer, hidden, delta, plan, cache)
        if last_rows is not None:
            return self._last_block(hidden, delta, plan, cache, last_rows)
        return hidden if delta is None else hidden.add_(delta)

    def _block(self, layer: int, hidden: Tensor, delta: Tensor | None, plan: PrefillPlan, cache: KVCache) -> Tensor:
        """Add `delta` to the stream and return what the block adds next."""
        normed, scale = self._normed(layer, hidden, delta)
        product = self._up(layer, normed, scale, slice(None))
        qkv, inner = product.tensor_split((self._config.qkv_dim,), dim=1)
        query, key, value = self._turned(layer, qkv, plan, cache)
        attended = self._attended(layer, query, key, value, plan, cache)
        return self._down(layer, hidden, attended, inner)

    def _last_block(
        self, hidden: Tensor, delta: Tensor | None, plan: PrefillPlan, cache: KVCache, rows: Tensor
    ) -> Tensor:
        """Write all keys and values of the last block, but go on with `rows` alone: their final hidden states."""
        layer, qkv_dim = len(self._blocks) - 1, self._config.qkv_dim
        normed, scale = self._normed(layer, hidden, delta)
        qkv = self._up(layer, normed, scale, slice(qkv_dim))
        query, key, value = self._turned(layer, qkv, plan, cache)
        hidden = hidden[rows]
        if not len(rows):
            return hidden
        normed, scale = _rows(normed, rows), None if scale is None else scale[rows]
        inner = self._up(layer, normed, scale, slice(qkv_dim, None))
        attended = self._attended(layer, query[rows], key[rows], value[rows], _single_rows(plan, rows), cache)
        return hidden + self._down(layer, hidden, attended, inner)

    def _normed(self, layer: int, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        block = self._blocks[layer]
        return self._kernels.add_layer_norm(hidden, delta, block.ln.eps, block.up.weight.dtype)

    def _up(self, layer: int, normed: Tensor, scale: Tensor | None, part: slice) -> Tensor:
        """Those of the first matrix's columns that `part` names; none where experts replace the MLP."""
        up = self._blocks[layer].up
        weight, bias = up.weight[part], up.bias[part]
        if not len(weight):
            return normed.new_empty((len(normed), 0), dtype=self._dtype)
        weight_scale = None if up.scale is None else up.scale[part]
        return self._kernels.scaled_linear(normed, scale, weight, weight_scale, bias, self._dtype)

    def _turned(self, layer: int, qkv: Tensor, plan: PrefillPlan, cache: KVCache) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, of which the latter two are in the cache too."""
        pages, tau = cache.layer(layer), self._blocks[layer].tau
        factors = (None, None) if tau is None else tau(qkv, plan.positions)
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

    def _attended(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: PrefillPlan, cache: KVCache
    ) -> Tensor:
        pages = cache.layer(layer)
        attended = self._kernels.prefill_attention(
            query,
            key,
            value,
            pages.key_pages,
            pages.value_pages,
            plan.page_table,
            plan.query_starts,
            plan.lengths,
            plan.prefix_lengths,
            plan.max_chunk,
            pages.key_scale,
            pages.value_scale,
        )
        return attended.flatten(1)

    def _down(self, layer: int, hidden: Tensor, attended: Tensor, inner: Tensor) -> Tensor:
        """What a block adds to the stream."""
        block, down = self._blocks[layer], self._blocks[layer].down
        operand = down.weight.dtype
        if block.experts is None:
            activations, scale = self._kernels.concat_gelu(attended, inner, operand)
        else:
            activations, scale = self._kernels.concat_gelu(None, attended, operand, activate=False)
        delta = self._kernels.scaled_linear(activations, scale, down.weight, down.scale, down.bias, self._dtype)
        if block.experts is not None:
            normed = block.ln(hidden.to(block.ln.weight.dtype))
            delta = delta + block.experts(normed, self._kernels.mixture_of_experts)
        return delta


def _single_rows(plan: PrefillPlan, rows: Tensor) -> PrefillPlan:
    """Each of `rows`, which end their chunks, as a chunk of its own: all before it is in the pages."""
    chunks = torch.searchsorted(plan.query_starts[1:], rows.to(torch.int32), right=True)
    return PrefillPlan(
        positions=plan.positions[rows],
        slots=plan.slots[rows],
        page_table=plan.page_table[chunks],
        query_starts=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
        lengths=plan.lengths[chunks],
        prefix_lengths=plan.prefix_lengths[chunks],
        max_chunk=1,
    )


def _rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """Rows of a matrix that may be float8, which torch cannot index everywhere."""
    if matrix.dtype.itemsize == 1:
        return matrix.view(torch.uint8)[rows].view(matrix.dtype)
    return matrix[rows]
