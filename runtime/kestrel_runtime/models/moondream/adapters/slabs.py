"""Holds the weights of adapters on the device, in stacked tensors with a fixed number of slots for each target.

Targets of a decoder block are `attn.qkv`, `attn.proj`, `mlp.fc1` and `mlp.fc2`; the last two are stacks of experts
where the block has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kestrel_ops import BlockLowRank, ExpertAdapters, Kernels, LowRank, RowsBySlot, add_low_rank
from kestrel_runtime.execution.cuda_stream import CudaStream
from kestrel_runtime.models.moondream.config import TextConfig

_KINDS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
"""The targets of a block, in the order of `LowRank.kind`."""


class TargetShape(NamedTuple):
    """A weight matrix, or a stack of them, that adapters can change."""

    in_dim: int
    out_dim: int
    num_experts: int | None
    """None for a single matrix."""
    max_rank: int
    """The largest rank of an adapter here, for each expert."""

    @property
    def num_weights(self) -> int:
        """Returns the number of elements of A and B of one adapter."""
        return (self.num_experts or 1) * self.max_rank * (self.in_dim + self.out_dim)


class Factors(NamedTuple):
    """The low-rank term of a target: x @ a.T @ b, the scale included."""

    a: Tensor
    """[r, in], or [E, r, in] for experts."""
    b: Tensor
    """[r, out], or [E, r, out] for experts."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A checked adapter, on the host."""

    factors: Mapping[str, Factors]
    """Factors by target, such as "blocks.3.attn.qkv"."""
    reads_block_input: bool = False
    """True if `attn.proj` takes the block's normalised input and not the attention's result, as variants do."""


def target_shapes(config: TextConfig, max_rank: int) -> dict[str, TargetShape]:
    """Returns the targets of a decoder by name.

    Adapters of experts have `max_rank` for all experts of a token together.
    """
    shapes: dict[str, TargetShape] = {}
    for layer in range(config.n_layers):
        block = f"blocks.{layer}"
        attended_dim = config.n_heads * config.head_dim
        shapes[f"{block}.attn.qkv"] = TargetShape(config.dim, config.qkv_dim, None, max_rank)
        shapes[f"{block}.attn.proj"] = TargetShape(attended_dim, config.dim, None, max_rank)
        if config.moe is not None and config.is_moe_layer(layer):
            moe, rank = config.moe, max(1, max_rank // config.moe.experts_per_token)
            inner = moe.expert_inner_dim
            shapes[f"{block}.mlp.fc1"] = TargetShape(config.dim, 2 * inner, moe.num_experts, rank)
            shapes[f"{block}.mlp.fc2"] = TargetShape(inner, config.dim, moe.num_experts, rank)
        else:
            shapes[f"{block}.mlp.fc1"] = TargetShape(config.dim, config.ff_dim, None, max_rank)
            shapes[f"{block}.mlp.fc2"] = TargetShape(config.ff_dim, config.dim, None, max_rank)
    return shapes


def slot_bytes(config: TextConfig, max_rank: int, itemsize: int) -> int:
    """Returns the memory of one slot."""
    return itemsize * sum(shape.num_weights for shape in target_shapes(config, max_rank).values())


class AdapterSlabs:
    """The weights of `num_slots` adapters. Slots count from 1; 0 stands for no adapter.

    A slot is written while no request uses it; steps read the others meanwhile.
    """

    def __init__(
        self, config: TextConfig, num_slots: int, max_rank: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._device = device
        self._stream: CudaStream | None = None
        self._targets: dict[str, LowRank] = {}
        for name, shape in target_shapes(config, max_rank).items():
            stack = (num_slots,) if shape.num_experts is None else (num_slots, shape.num_experts)
            self._targets[name] = LowRank(
                torch.zeros((*stack, shape.max_rank, shape.in_dim), dtype=dtype, device=device),
                torch.zeros((*stack, shape.max_rank, shape.out_dim), dtype=dtype, device=device),
                _kind_of(name),
            )
        self.max_rank, self.dtype = max_rank, dtype
        self.ranks = torch.zeros(len(_KINDS), num_slots, dtype=torch.int32, device=device)
        """[4, S]: the largest rank of the adapter in each slot, in layers of each kind with a single matrix."""
        self.reads_block_input = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)
        """[S + 1] bool, by slot: see `AdapterWeights`."""
        self.layers = tuple(self._layer(layer) for layer in range(config.n_layers))

    @torch.inference_mode()
    def write(self, slot: int, weights: AdapterWeights) -> None:
        """Puts an adapter into a slot. Returns when it is there; for one thread at a time."""
        if self._stream is None:
            self._stream = CudaStream(self._device)
        with self._stream.entered():
            ranks = [0] * len(_KINDS)
            for name, slab in self._targets.items():
                factors = weights.factors.get(name)
                rank = 0 if factors is None else factors.a.shape[-2]
                ranks[slab.kind] = max(ranks[slab.kind], rank)
                for stored, part in zip((slab.a, slab.b), factors or (None, None), strict=True):
                    own = stored[slot - 1]
                    own[..., rank:, :] = 0
                    if part is not None:
                        own[..., :rank, :] = part.to(own.device, own.dtype)
            self.ranks[:, slot - 1] = torch.tensor(ranks, dtype=torch.int32)
            self.reads_block_input[slot] = weights.reads_block_input
        self._stream.synchronize()

    def for_rows(self, slots: Tensor, operation: Callable[..., None] = add_low_rank) -> RowAdapters:
        """Returns the adapters of a step's rows, whose slots are int64 [T]; `operation`: see `add_low_rank`."""
        return RowAdapters(self, slots, operation)

    def _layer(self, layer: int) -> LayerAdapters:
        return LayerAdapters(*(self._targets[f"blocks.{layer}.{kind}"] for kind in _KINDS))


def _kind_of(target: str) -> int:
    return _KINDS.index(".".join(target.split(".")[-2:]))


class LayerAdapters(NamedTuple):
    """The slots of one block."""

    qkv: LowRank
    proj: LowRank
    fc1: LowRank
    fc2: LowRank


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """The adapters of the rows of a step."""

    slabs: AdapterSlabs
    slots: Tensor
    """[T] int64."""
    operation: Callable[..., None]

    def of_tokens(self, chosen: Tensor) -> RowAdapters:
        """Returns the adapters of the rows `chosen`, int64 [n]."""
        return replace(self, slots=self.slots[chosen])

    def grouped(self, kernels: Kernels, dim: int, *, is_decode: bool) -> GroupedAdapters:
        """Returns the adapters for the fused operations of a decode step, or of prompts, on rows [T, dim]."""
        slabs = self.slabs
        rows = kernels.rows_by_slot(self.slots, slabs.ranks, slabs.max_rank, is_decode=is_decode, dtype=slabs.dtype)
        return GroupedAdapters(self, rows, self.slots.new_empty((len(self.slots), dim), dtype=slabs.dtype))

    def of_block(self, layer: int) -> BlockAdapters:
        """Returns the adapters of the rows in one block."""
        return BlockAdapters(self.slabs.layers[layer], self)

    def of_layers(self) -> Iterator[BlockAdapters]:
        """Yields the adapters of the rows in each block."""
        return (BlockAdapters(layer, self) for layer in self.slabs.layers)


@dataclass(frozen=True, slots=True)
class BlockAdapters:
    """The adapters of the rows in one block. Each method adds to the result of a linear layer in place."""

    layer: LayerAdapters
    rows: RowAdapters

    def add_qkv(self, out: Tensor, normed: Tensor) -> None:
        """Adds the term of `attn.qkv` for normed [T, dim] to out [T, qkv_dim]."""
        self.rows.operation(out, normed, self.layer.qkv, self.rows.slots)

    def add_proj(self, out: Tensor, attended: Tensor, normed: Tensor) -> None:
        """Adds the term of `attn.proj` for attended [T, H * D], or for normed [T, dim], to out [T, dim]."""
        if attended.shape == normed.shape:
            reads_block_input = self.rows.slabs.reads_block_input[self.rows.slots]
            attended = torch.where(reads_block_input[:, None], normed, attended)
        self.rows.operation(out, attended, self.layer.proj, self.rows.slots)

    def add_fc1(self, out: Tensor, normed: Tensor) -> None:
        """Adds the term of `mlp.fc1` for normed [T, dim] to out [T, ff_dim]."""
        self.rows.operation(out, normed, self.layer.fc1, self.rows.slots)

    def add_fc2(self, out: Tensor, inner: Tensor) -> None:
        """Adds the term of `mlp.fc2` for inner [T, ff_dim] to out [T, dim]."""
        self.rows.operation(out, inner, self.layer.fc2, self.rows.slots)

    def of_experts(self) -> ExpertAdapters:
        """Returns the adapters of the experts, for a block with a mixture of experts."""
        return ExpertAdapters(self.layer.fc1, self.layer.fc2, self.rows.slots)


@dataclass(frozen=True, slots=True)
class GroupedAdapters:
    """The adapters of the rows of a step, as fused operations take them."""

    adapters: RowAdapters
    rows: RowsBySlot
    normed: Tensor
    """[T, dim]: see `BlockLowRank`."""

    def of_block(self, layer: int, norm: nn.LayerNorm) -> BlockLowRank:
        """Returns the terms of one block with this norm. A mixture of experts is no part of them."""
        slabs = self.adapters.slabs
        qkv, proj, fc1, fc2 = slabs.layers[layer]
        is_dense = fc1.a.dim() == 3
        return BlockLowRank(
            (qkv, fc1) if is_dense else (qkv,),
            (proj, fc2) if is_dense else (proj,),
            norm.weight,
            norm.bias,
            slabs.reads_block_input,
            self.normed,
            self.rows,
        )

    def of_experts(self, layer: int) -> BlockAdapters:
        """Returns the adapters of the experts of one block."""
        return self.adapters.of_block(layer)
