"""Runs the decoder for one new token of each sequence: three operations per block, on buffers at fixed addresses.

Every shape depends on the batch size only, so a step can be captured, except with the reference mixture of experts,
which synchronises with the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel_ops import BlockLowRank, Kernels
from kestrel_runtime.execution.cuda_stream import SideStream
from kestrel_runtime.execution.kv_cache import KVCache, LayerPages
from kestrel_runtime.models.moondream.adapters.slabs import RowAdapters
from kestrel_runtime.models.moondream.fused.weights import FusedBlock, Matrix
from kestrel_runtime.models.moondream.text.decoder import TextModel, rotary_tables

# The number of attention programs that keeps a large device busy. Small batches split their contexts to reach it.
_PROGRAMS_OF_ATTENTION = 512
_MOST_PARTS = 32


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Buffers for batches up to a size. A step uses the first rows. Contents are not kept between steps."""

    hidden: Tensor
    """[2, most sequences, dim] float32: the residual stream. A block with experts reads one and writes the other,
    since its two parts read concurrently."""
    qkv: Tensor
    """[most sequences, qkv_dim], float16 where the weights are float8, else the model's type."""
    activations: Tensor
    """[most sequences, H * D + ff_dim], of the same type: the attention result and the inner part of the MLP."""
    partials: Tensor
    """Flat float32: attention over parts of contexts."""
    counters: Tensor
    """Flat int32, zeros: counters of completed parts."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The new tokens of a step, and the parts of the workspace that their attention uses in every block."""

    positions: Tensor
    page_table: Tensor
    qkv: Tensor
    partials: Tensor
    counters: Tensor


class FusedDecoder:
    """Runs `fused_blocks` of a `TextModel`; equal to its `forward` over one token per sequence, up to rounding."""

    def __init__(self, text: TextModel, blocks: Sequence[FusedBlock], kernels: Kernels) -> None:
        self._config = text.config
        self._blocks = tuple(blocks)
        self._kernels = kernels
        self._device = text.wte.device
        self._side, self._in_turn = SideStream(self._device), SideStream(torch.device("cpu"))
        self._final_epsilon = text.post_ln.eps
        is_float8 = any(matrix.scale is not None for block in self._blocks for matrix in (block.up, block.down))
        self._dtype = torch.float16 if is_float8 else text.wte.dtype
        config = text.config
        self._cosine, self._sine = rotary_tables(
            config.rotary_dim, config.max_context, config.rope_theta, self._device
        )

    def workspace(self, max_batch: int) -> DecodeWorkspace:
        """Allocates the workspace of steps of up to `max_batch` sequences."""
        config = self._config
        widths = [block.down.weight.shape[1] for block in self._blocks]
        rows = max(batch * self.num_parts_of(batch) for batch in range(1, max_batch + 1))

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, device=self._device, dtype=dtype)

        return DecodeWorkspace(
            hidden=empty(2, max_batch, config.dim, dtype=torch.float32),
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
    ) -> Tensor:  # [B, dim] float32, in the workspace: before the final LayerNorm
        """Runs the blocks and writes the tokens' keys and values. Rows without a token have undefined results."""
        config = self._config
        batch = len(embeddings)
        num_parts = self.num_parts_of(batch)
        hidden, spare = workspace.hidden[0, :batch], workspace.hidden[1, :batch]
        shape = (batch, config.n_heads, num_parts, config.head_dim + 2)
        tokens = _Tokens(
            positions,
            page_table,
            qkv=workspace.qkv[:batch],
            partials=workspace.partials[: torch.Size(shape).numel()].view(shape),
            counters=workspace.counters[: batch * config.n_heads].view(batch, config.n_heads),
        )
        hidden.copy_(embeddings)
        if num_parts > 1:  # discards sums of a previous step
            tokens.counters.zero_()
        grouped = None if adapters is None else adapters.grouped(self._kernels, config.dim, is_decode=True)
        side = self._side if grouped is None else self._in_turn  # parts with adapters share memory
        splits = batch == 1 and grouped is None  # with more tokens nothing is gained
        pending: Tensor | None = None  # what `decode_contract` has deferred
        mixed: Tensor | None = None  # what the experts of the block before add to the stream
        for layer, block in enumerate(self._blocks):
            pages = cache.layer(layer)
            activations = workspace.activations[:batch, : block.down.weight.shape[1]]
            low_rank = None if grouped is None else grouped.of_block(layer, block.ln)
            if block.experts is None:
                if mixed is not None:
                    hidden += mixed
                    mixed = None
                if splits:
                    self._attend_concurrently(block, hidden, tokens, pages, activations)
                    continue
                may_defer = layer + 1 < len(self._blocks) and self._blocks[layer + 1].experts is None
                pending = self._attend(
                    *(block, hidden, tokens, pages, activations, low_rank), pending=pending, may_defer=may_defer
                )
                continue
            # Attention and experts of a block both take the stream as it is here.
            with side.forked():
                self._attend(block, hidden, tokens, pages, activations, low_rank, delta=mixed, total=spare)
            router, norm = block.experts.router, block.ln
            normed, logits = self._kernels.layer_norm_linear(
                hidden, norm.weight, norm.bias, norm.eps, router.weight, router.bias, mixed
            )
            own = None if grouped is None else grouped.of_experts(layer)
            following = block.experts.mixed(normed, logits, self._kernels.mixture_of_experts, own, positions)
            side.join()
            # The side has read what was mixed before, which is only freed here.
            hidden, spare, mixed = spare, hidden, following
        if mixed is not None:
            hidden += mixed
        return hidden

    def _attend(
        self,
        block: FusedBlock,
        hidden: Tensor,
        tokens: _Tokens,
        pages: LayerPages,
        activations: Tensor,  # [B, H * D + inner]
        low_rank: BlockLowRank | None,
        *,
        pending: Tensor | None = None,
        may_defer: bool = False,
        delta: Tensor | None = None,
        total: Tensor | None = None,
    ) -> Tensor | None:
        """Adds attention, and the MLP where there is one, to the stream; returns what is deferred.

        With a `total`, the sum of the stream, a delta and the result is written to it instead.
        """
        (attended, inner), down = self._parts_of(activations), block.down
        self._expand(block, block.up, hidden, tokens.qkv, inner, pending, low_rank, delta)
        self._attend_to_pages(block, tokens, pages, attended)
        return self._kernels.decode_contract(
            activations, down.weight, down.scale, down.bias, hidden, may_defer, low_rank, delta, total
        )

    def _attend_concurrently(
        self, block: FusedBlock, hidden: Tensor, tokens: _Tokens, pages: LayerPages, activations: Tensor
    ) -> None:
        """Computes `_attend` of a block with an MLP, whose first layer runs concurrently with attention.

        Attention to one context leaves most of the device's bandwidth unused.
        """
        (attended, inner), down = self._parts_of(activations), block.down
        qkv, qkv_dim = tokens.qkv, self._config.qkv_dim
        with self._side.forked():
            self._expand(block, block.up.part(slice(qkv_dim)), hidden, qkv, inner[:, :0])
            self._attend_to_pages(block, tokens, pages, attended)
        self._expand(block, block.up.part(slice(qkv_dim, None)), hidden, qkv[:, :0], inner)
        self._side.join()
        self._kernels.decode_contract(activations, down.weight, down.scale, down.bias, hidden)

    def _parts_of(self, activations: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the attention result and the inner part of the MLP."""
        attended, inner = activations.tensor_split((self._config.n_heads * self._config.head_dim,), dim=1)
        return attended, inner

    def _expand(
        self,
        block: FusedBlock,
        up: Matrix,  # of the block, or a part of it
        hidden: Tensor,
        plain: Tensor,
        activated: Tensor,
        pending: Tensor | None = None,
        low_rank: BlockLowRank | None = None,
        delta: Tensor | None = None,
    ) -> None:
        self._kernels.decode_expand(
            hidden,
            up.weight,
            up.scale,
            up.row_sums,
            up.bias,
            block.ln.eps,
            plain.shape[1],
            plain,
            activated,
            pending,
            low_rank,
            delta,
        )

    def _attend_to_pages(self, block: FusedBlock, tokens: _Tokens, pages: LayerPages, attended: Tensor) -> None:
        """Writes the new keys and values, and attend to all of the contexts."""
        kernels, qkv = self._kernels, tokens.qkv
        query_scale, value_factor = None, None
        if block.tau is not None:
            query_scale, value_factor = block.tau(qkv, tokens.positions, kernels.tau_scales)
        kernels.rotary_decode_attention(
            qkv,
            tokens.positions,
            self._cosine,
            self._sine,
            pages.key_pages,
            pages.value_pages,
            tokens.page_table,
            attended,
            pages.key_scale,
            pages.value_scale,
            query_scale,
            value_factor,
            tokens.partials,
            tokens.counters,
        )

    def logits(
        self,
        hidden: Tensor,  # [B, dim] float32, from `forward`
        head: Matrix,  # from `fused_head`
        out: Tensor,  # [B, vocabulary] of any floating type, written
    ) -> None:
        """Returns the result of `TextModel.logits`, computed by the product for small batches."""
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

    def num_parts_of(self, batch: int) -> int:
        """Returns the number of parts into which a step of so many sequences may split a context."""
        wanted = _PROGRAMS_OF_ATTENTION // (batch * self._config.n_heads)
        return min(max(wanted, 1), _MOST_PARTS)
