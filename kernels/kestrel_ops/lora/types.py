"""The weights of low-rank adapters in slots, and the rows that use them, as operations take them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class LowRank(NamedTuple):
    """The low-rank terms of one linear layer, or of a stack of E experts: x @ a.T @ b in each of S slots.

    Slots are counted from 1; slot 0 stands for no adapter and has no weights. Rows behind an adapter's rank are 0.
    """

    a: Tensor
    """[S, R, in], or [S, E, R, in] for experts."""
    b: Tensor
    """[S, R, out], or [S, E, R, out] for experts."""
    kind: int = 0
    """Of the layer: the row of ranks that is given to `rows_by_slot`. Experts have none."""

    def of_expert(self, expert: int) -> LowRank:
        """The part of one expert."""
        return LowRank(self.a[:, expert], self.b[:, expert])


class RowsBySlot(NamedTuple):
    """The rows of a step and the slots that they use. Made once for all layers, by `rows_by_slot`."""

    slots: Tensor
    """[T] int64: the slot of each row, 0 for none."""
    plan: Any = None
    """What an implementation derives from the slots, and keeps between operations; None for the reference. Its
    sizes do not depend on the slots, so that a CUDA graph serves any choice of adapters."""


class BlockLowRank(NamedTuple):
    """The low-rank terms of one decoder block, and the rows that use them.

    Attention and MLP of a block read the same normalised rows and add to the same stream.
    """

    up: tuple[LowRank, ...]
    """Of the layers that read the normalised rows, in the order of their outputs: query, key and value, then the
    MLP's first layer where the block has one."""
    down: tuple[LowRank, ...]
    """Of the layers that add to the stream: the attention's projection, then the MLP's second layer, if any."""
    norm_weight: Tensor
    """[dim]: of the LayerNorm before the block."""
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
    """The low-rank terms of a mixture of experts, and the tokens that use them."""

    up: LowRank
    """Of the first product: out is 2 * inner."""
    down: LowRank
    """Of the second product."""
    slots: Tensor
    """[T] int64: the slot of each token, 0 for none."""
