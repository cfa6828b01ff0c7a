"""The decoder for one new token of each sequence: three operations per block, on buffers at fixed addresses.

Every shape depends on the batch size only, so a step can be captured, except with the reference mixture of experts,
which synchronises with the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel_ops import Kernels
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.models.moondream.adapters.slabs import BlockAdapters, RowAdapters
from kestrel_runtime.models.moondream.fused.weights import FusedBlock, Matrix
from kestrel_runtime.models.moondream.text.decoder import TextModel, rotary_tables

# The number of attention programs that keeps a large device busy. Small batches split their contexts to reach it.
_PROGRAMS_OF_ATTENTION = 512
_MOST_PARTS = 32


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Buffers for batches up to a size. A step uses the first rows. Contents are not kept between steps."""

    hidden: Tensor
    """[most sequences, dim] float32: the residual stream."""
    qkv: Tensor
    """[most sequences, qkv_dim], float16 where the weights are float8, else the model's type."""
    activations: Tensor
    """[most sequences, H * D + ff_dim], of the same type: the attention result and the inner part of the MLP."""
    partials: Tensor
    """Flat float32: attention over parts of contexts."""
    counters: Tensor
    """Flat int32, zeros: counters of completed parts."""


class FusedDecoder:
    """Runs `fused_blocks` of a `TextModel`; equal to its `forward` over one token per sequence, up to rounding."""

    def __init__(self, text: TextModel, blocks: Sequence[FusedBlock], kernels: Kernels) -> None:
        self._config = text.config
        self._blocks = tuple(blocks)
        self._kernels = kernels
        self._device = text.wte.device
        self._final_epsilon = text.post_ln.eps
        is_float8 = any(matrix.scale is not None for block in self._blocks for matrix in (block.up, block.down))
        self._dtype = torch.float16 if is_float8 else text.wte.dtype
        config = text.config
        self._cosine, self._sine = rotary_tables(
            config.rotary_dim, config.max_context, config.rope_theta, self._device
        )

    def workspace(self, max_batch: int) -> DecodeWorkspace:
        """Allocate the workspace of steps of up to `max_batch` sequences."""
        config = self._config
        widths = [block.down.weight.shape[1] for block in self._blocks]
        rows = max(batch * self._num_parts(batch) for batch in range(1, max_batch + 1))

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, device=self._device, dtype=dtype)

        return DecodeWorkspace(
            hidden=empty(max_batch, config.dim, dtype=torch.float32),
            qkv=empty(max_batch, config.qkv_dim, dtype=self._dtype),
            activations=empty(max_batch, max(widths), dtype=self._dtype),
            partials=empty(rows * config.n_heads * (config.head_dim + 2), dtype=torch.float32),
            counters=torch.zeros(max_batch * config.n_heads, device=self._device, dtype=torch.int32),
        )

    def forward(
        self,
        embeddings: Tensor,  # [B, dim], the model's type
        positions: Tensor,  # [B] int32 or int64: each new token's position; negative where there is none
        page_table: Tensor,  # [B, most pages of a sequence] int32
        cache: KVCache,
        workspace: DecodeWorkspace,
        adapters: RowAdapters | None = None,  # of the B tokens
    ) -> Tensor:  # [B, dim] float32, the first rows of the workspace: before the final LayerNorm
        """Run the blocks and write the tokens' keys and values. Rows without a token have undefined results."""
        config, kernels = self._config, self._kernels
        batch = len(embeddings)
        num_parts = self._num_parts(batch)
        hidden, qkv = workspace.hidden[:batch], workspace.qkv[:batch]
        shape = (batch, config.n_heads, num_parts, config.head_dim + 2)
        partials = workspace.partials[: torch.Size(shape).numel()].view(shape)
        counters = workspace.counters[: batch * config.n_heads].view(batch, config.n_heads)
        hidden.copy_(embeddings)
        if num_parts > 1:  # discards sums of a previous step
            counters.zero_()
        grouped = None if adapters is None else adapters.grouped(kernels, config.dim, is_decode=True)
        pending: Tensor | None = None
        for layer, block in enumerate(self._blocks):
            pages = cache.layer(layer)
            up, down = block.up, block.down
            activations = workspace.activations[:batch, : down.weight.shape[1]]
            attended, inner = activations.tensor_split((config.n_heads * config.head_dim,), dim=1)
            low_rank = None if grouped is None else grouped.of_block(layer, block.ln)
            kernels.decode_expand(
                hidden,
                up.weight,
                up.scale,
                up.row_sums,
                up.bias,
                block.ln.eps,
                config.qkv_dim,
                qkv,
                inner,
                pending,
                low_rank,
            )
            # Afterwards nothing is pending.
            mixed = self._experts(block, hidden, None if grouped is None else grouped.of_experts(layer))
            query_scale, value_factor = None, None
            if block.tau is not None:
                query_scale, value_factor = block.tau(qkv, positions, kernels.tau_scales)
            kernels.rotary_decode_attention(
                qkv,
                positions,
                self._cosine,
                self._sine,
                pages.key_pages,
                pages.value_pages,
                page_table,
                attended,
                pages.key_scale,
                pages.value_scale,
                query_scale,
                value_factor,
                partials,
                counters,
            )
            may_defer = layer + 1 < len(self._blocks)
            pending = kernels.decode_contract(
                activations, down.weight, down.scale, down.bias, hidden, may_defer, low_rank
            )
            if mixed is not None:
                hidden += mixed
        return hidden

    def logits(
        self,
        hidden: Tensor,  # [B, dim] float32, from `forward`
        head: Matrix,  # from `fused_head`
        out: Tensor,  # [B, vocabulary] of any floating type, written
    ) -> None:
        """The result of `TextModel.logits`, computed by the product for small batches."""
        nothing = out[:, out.shape[1] :]
        self._kernels.decode_expand(
            hidden,
            head.weight,
            head.scale,
            head.row_sums,
            head.bias,
            self._final_epsilon,
            out.shape[1],
            out,
            nothing,
        )

    def _num_parts(self, batch: int) -> int:
        """The number of parts into which a context may be split."""
        wanted = _PROGRAMS_OF_ATTENTION // (batch * self._config.n_heads)
        return min(max(wanted, 1), _MOST_PARTS)

    def _experts(self, block: FusedBlock, hidden: Tensor, adapters: BlockAdapters | None) -> Tensor | None:
        if block.experts is None:
            return None
        router, norm = block.experts.router, block.ln
        normed, logits = self._kernels.layer_norm_linear(
            hidden, norm.weight, norm.bias, norm.eps, router.weight, router.bias
        )
        return block.experts.mixed(normed, logits, self._kernels.mixture_of_experts, adapters)
