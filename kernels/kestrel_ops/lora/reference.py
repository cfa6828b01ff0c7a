"""Defines the weights of low-rank adapters in slots, and the operations that add each row's own terms."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class LowRank(NamedTuple):
    """Describes the low-rank terms of one linear layer, or of a stack of E experts: x @ a.T @ b in each of S slots.

    Slots are counted from 1; slot 0 stands for no adapter and has no weights. Rows behind an adapter's rank are 0.
    """

    a: Tensor
    """[S, R, in], or [S, E, R, in] for experts."""
    b: Tensor
    """[S, R, out], or [S, E, R, out] for experts."""
    kind: int = 0
    """The row of the layer in the ranks that `rows_by_slot` takes. Experts have none."""

    def of_expert(self, expert: int) -> LowRank:
        """Returns the part of one expert."""
        return LowRank(self.a[:, expert], self.b[:, expert])


class RowsBySlot(NamedTuple):
    """Describes the rows of a step and the slots that they use. Made once for all layers, by `rows_by_slot`."""

    slots: Tensor
    """[T] int64: the slot of each row, 0 for none."""
    groups: Any = None
    """The lists of rows that an implementation derives from the slots for later operations; None for the reference.
    Their sizes do not depend on the slots, so that a CUDA graph serves any choice of adapters."""


class BlockLowRank(NamedTuple):
    """Describes the low-rank terms of one decoder block, and the rows that use them.

    Attention and MLP of a block read the same normalised rows and add to the same stream.
    """

    up: tuple[LowRank, ...]
    """Terms of the layers that read the normalised rows, in the order of their outputs: query, key and value, then
    the MLP's first layer if the block has one."""
    down: tuple[LowRank, ...]
    """Terms of the layers that add to the stream: the attention's projection, then the MLP's second layer, if
    any."""
    norm_weight: Tensor
    """[dim]: weight of the LayerNorm before the block."""
    norm_bias: Tensor
    """[dim]."""
    reads_block_input: Tensor
    """[S + 1] bool, by slot: whether the projection's term takes the block's normalised rows instead of the
    attention's result. Only where both are of one width."""
    normed: Tensor
    """[T, dim], of the type of the weights: the block's normalised rows with the norm's weight and bias.
    `add_layer_norm` and `decode_expand` write it, what is run after them for the same block reads it."""
    rows: RowsBySlot


class ExpertAdapters(NamedTuple):
    """Describes the low-rank terms of a mixture of experts, and the tokens that use them."""

    up: LowRank
    """Terms of the first product: out is 2 * inner."""
    down: LowRank
    """Terms of the second product."""
    slots: Tensor
    """[T] int64: the slot of each token, 0 for none."""


def add_low_rank(
    out: Tensor,  # [T, out], changed in place
    rows: Tensor,  # [T, in], of the type of the weights
    weights: LowRank,
    slots: Tensor,  # [T] int64: the slot of each row, 0 for none
) -> None:
    """Computes out[t] += rows[t] @ a.T @ b with the weights of row t's slot. Rows in slot 0 stay as they are."""
    for slot in slots.unique().tolist():
        if slot:
            chosen = (slots == slot).nonzero()[:, 0]
            product = rows[chosen] @ weights.a[slot - 1].T @ weights.b[slot - 1]
            out.index_add_(0, chosen, product.to(out.dtype))


def rows_by_slot(
    slots: Tensor,  # [T] int64: the slot of each row, 0 for none
    ranks: Tensor,  # [4, S] int32: the largest rank of the adapter in each slot in layers of each `LowRank.kind`
    max_rank: int,  # R, of any slot
    *,
    is_decode: bool,
    dtype: torch.dtype,  # of the weights
) -> RowsBySlot:
    """Returns the rows of a step, for the operations of a decode step or for those of packed prompts."""
    return RowsBySlot(slots)


def add_up_terms(
    product: Tensor,  # [T, sum of outputs of `low_rank.up`], rows may be strided, changed in place
    low_rank: BlockLowRank,
) -> None:
    """Adds each row's terms to the first product of a block. Rows in slot 0 stay as they are."""
    first = 0
    for weights in low_rank.up:
        _add(product[:, first : first + weights.b.shape[-1]], low_rank.normed, weights, low_rank.rows)
        first += weights.b.shape[-1]


def add_down_terms(
    out: Tensor,  # [T, dim], changed in place
    activations: Tensor,  # [T, H * D + ff_dim]: what the block's second product reads
    scale: Tensor | None,  # [T, 1] float32: activations * scale is meant
    low_rank: BlockLowRank,
) -> None:
    """Adds each row's terms to what a block adds to the stream. Rows in slot 0 stay as they are.

    The first columns of the activations are the attention's result.
    """
    if scale is not None:
        activations = activations.float() * scale
    attended, inner = activations.tensor_split((low_rank.down[0].a.shape[-1],), dim=1)
    if attended.shape == low_rank.normed.shape:
        reads_block_input = low_rank.reads_block_input[low_rank.rows.slots]
        attended = torch.where(reads_block_input[:, None], low_rank.normed, attended.to(low_rank.normed.dtype))
    _add(out, attended, low_rank.down[0], low_rank.rows)
    if len(low_rank.down) > 1:
        _add(out, inner, low_rank.down[1], low_rank.rows)


def _add(out: Tensor, rows: Tensor, weights: LowRank, grouped: RowsBySlot) -> None:
    """Computes `add_low_rank` for rows of any type, without reading slots on the host."""
    for slot in range(1, len(weights.a) + 1):
        a, b = weights.a[slot - 1], weights.b[slot - 1]
        term = (rows.to(a.dtype) @ a.T @ b).to(out.dtype)
        out.copy_(torch.where((grouped.slots == slot)[:, None], out + term, out))


def write_normed(
    normalised: Tensor,  # [T, dim]: (hidden - mean) / deviation
    low_rank: BlockLowRank,
) -> None:
    """Writes `low_rank.normed`."""
    wide = normalised.float() * low_rank.norm_weight.float() + low_rank.norm_bias.float()
    low_rank.normed.copy_(wide)
