"""Runs the vision encoder on fused operations, optionally with float8 products; equals the plain `VisionModel`."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, layer_norm

from kestrel_ops import Kernels, has_float8_product
from kestrel_runtime.models.moondream.config import VisionConfig
from kestrel_runtime.models.moondream.fused.weights import Matrix, free_weights
from kestrel_runtime.models.moondream.layers import concatenated
from kestrel_runtime.models.moondream.vision.encoder import VisionModel

# Products are fastest if every row starts at a multiple of 16 bytes.
_PATCH_ALIGNMENT = 8
_MAX_KEPT_PLANS = 16
"""Combinations of images whose plans stay on the device: each takes some 100 kB for each image."""
SHORT_TYPES = (torch.bfloat16, torch.float16)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer in the layout of the products."""

    weight: Tensor  # [N, K] model dtype or float8_e4m3fn
    scale: Tensor | None  # [N] float32 where the weight is float8
    bias: Tensor  # [N] model dtype


@dataclass(frozen=True, slots=True)
class _Block:
    """The four products of a block; both LayerNorms' weights and biases are folded into `qkv` and `fc1`."""

    qkv: _Linear
    proj: _Linear
    fc1: _Linear
    fc2: _Linear


def folded(layer: nn.Linear, norm: nn.LayerNorm | None) -> tuple[Tensor, Tensor]:
    """Returns the float32 weight [N, K] and bias [N] of a layer, with a gain and a shift of its input folded in."""
    weight, bias = layer.weight.float(), layer.bias.float()
    if norm is None:
        return weight, bias
    return weight * norm.weight.float(), bias + weight @ norm.bias.float()


class FusedVision:
    """Encoder and projector of a loaded `VisionModel`, for many crops and many images at a time."""

    def __init__(
        self,
        vision: VisionModel,
        kernels: Kernels,
        precision: Literal["model", "float8"],
        *,
        frees_originals: bool = False,
    ) -> None:
        """Copies the weights. With `frees_originals` those of the model are freed block by block, except the final
        norm.

        In float8, a matrix whose sizes no float8 product supports stays in the model's type.
        """
        self.config = vision.config
        self._kernels = kernels
        self._dtype = vision.patch_emb.weight.dtype
        self._precision = precision
        # Products in short types apply the GELU and the addition to the stream themselves. In float32, which serves
        # comparisons, nothing would be gained, and rows of float8 need scales first.
        self._products_add = precision == "model" and self._dtype in SHORT_TYPES
        self._post_ln = vision.post_ln
        self._epsilon = vision.post_ln.eps
        with torch.no_grad():
            self._patch_weight, self._patch_offsets = self._fold_pixels(vision)
            self._blocks: list[_Block] = []
            self._fold_blocks(vision, frees_originals=frees_originals)
            self._projector = [self._linear(layer) for layer in (vision.proj_mlp.fc1, vision.proj_mlp.fc2)]
        if frees_originals:
            free_weights(vision.patch_emb, vision.proj_mlp.fc1, vision.proj_mlp.fc2)
            vision.pos_emb = nn.Parameter(vision.pos_emb.to("meta"), requires_grad=False)
        self._log_kept()
        self._plans: dict[tuple[int, int], PoolingPlan] = {}
        # Two launches for each image that a step encodes would keep the host from launching other steps.
        self._plan_of_images = lru_cache(_MAX_KEPT_PLANS)(self._new_plan_of_images)

    def encode(self, crops: Tensor) -> Tensor:
        """Computes uint8 crops [N, side, side, channels] → features [N, patches, enc_dim]."""
        hidden = self._embed_patches(crops)
        delta: Tensor | None = None
        for layer in range(self.config.enc_n_layers):
            delta = self._run_block(layer, hidden, delta)
        if delta is not None:
            hidden += delta
        features = layer_norm(hidden, hidden.shape[-1:], self._post_ln.weight, self._post_ln.bias, self._epsilon)
        return features.view(len(crops), self.config.num_image_tokens, -1)

    def states(self, crops: Tensor) -> Iterator[Tensor]:
        """Yields the stream [N * patches, enc_dim] after each block, for inspection."""
        hidden = self._embed_patches(crops)
        delta: Tensor | None = None
        for layer in range(self.config.enc_n_layers):
            delta = self._run_block(layer, hidden, delta)
            yield hidden.clone() if delta is None else hidden + delta

    def project_all(self, features: Sequence[Tensor], grids: Sequence[tuple[int, int]]) -> Tensor:
        """Computes features of several images → their embeddings [images, patches, text dim].

        Each image's are [1 + rows * columns, patches, enc_dim], the global crop first; a grid is (rows, columns).
        """
        num_images, num_patches = len(features), self.config.num_image_tokens
        plan = self._plan_of_images(tuple(grids), features[0].device)
        rows = concatenated([image.flatten(0, 1) for image in features])
        # A row of the projector's input: a patch of the global crop, then an average of local patches.
        pairs = embedding_bag(plan.patches, rows, plan.starts, mode="mean").view(num_images * num_patches, -1)
        fc1, fc2 = self._projector
        inner = self._product(*self._quantised(pairs, fc1, activate=False), fc1)
        return self._product(*self._quantised(inner, fc2), fc2).view(num_images, num_patches, -1)

    def _embed_patches(self, crops: Tensor) -> Tensor:
        config = self.config
        size, side, channels = config.enc_patch_size, config.grid_size, config.in_channels
        # Pixels as signed bytes, -128 to 127: exact in every type. A patch is ordered channel, row, column.
        signed = (crops ^ 128).view(torch.int8).view(-1, side, size, side, size, channels)
        padded = torch.zeros(
            len(crops) * side * side, self._patch_weight.shape[1], dtype=self._dtype, device=crops.device
        )
        patches = padded[:, : channels * size * size].view(-1, side, side, channels, size, size)
        patches.copy_(signed.permute(0, 1, 3, 5, 2, 4))
        hidden = self._kernels.scaled_linear(padded, None, self._patch_weight, None, None, self._dtype)
        hidden.view(len(crops), side * side, -1).add_(self._patch_offsets)
        return hidden

    def _run_block(self, layer: int, hidden: Tensor, delta: Tensor | None) -> Tensor | None:
        # Adds `delta` to `hidden` and returns the next `delta`.
        block = self._blocks[layer]
        if self._products_add:
            self._run_adding_block(block, hidden)
            return None
        packed = self._product(*self._normed(hidden, delta, block.qkv), block.qkv)
        attended = self._product(*self._quantised(self._attend(packed), block.proj, activate=False), block.proj)
        inner = self._product(*self._normed(hidden, attended, block.fc1), block.fc1)
        return self._product(*self._quantised(inner, block.fc2), block.fc2)

    def _run_adding_block(self, block: _Block, hidden: Tensor) -> None:
        kernels, (qkv, proj, fc1, fc2) = self._kernels, (block.qkv, block.proj, block.fc1, block.fc2)
        packed = self._product(*self._normed(hidden, None, qkv), qkv)
        kernels.scaled_linear_add(self._attend(packed), None, proj.weight, None, proj.bias, hidden)
        normed, _ = self._normed(hidden, None, fc1)
        activated = kernels.scaled_linear_gelu(normed, None, fc1.weight, None, fc1.bias, None)
        kernels.scaled_linear_add(activated, None, fc2.weight, None, fc2.bias, hidden)

    def _attend(self, packed: Tensor, out_scale: float | None = None) -> Tensor:
        config = self.config
        return self._kernels.crop_attention(packed, config.num_image_tokens, config.enc_n_heads, out_scale)

    def _normed(self, hidden: Tensor, delta: Tensor | None, taker: _Linear) -> tuple[Tensor, Tensor | None]:
        return self._kernels.add_layer_norm(hidden, delta, self._epsilon, taker.weight.dtype)

    def _quantised(self, rows: Tensor, taker: _Linear, activate: bool = True) -> tuple[Tensor, Tensor | None]:
        if not activate and rows.dtype == taker.weight.dtype:
            return rows, None
        return self._kernels.concat_gelu(None, rows, taker.weight.dtype, activate)

    def _product(self, rows: Tensor, scale: Tensor | None, linear: _Linear) -> Tensor:
        return self._kernels.scaled_linear(rows, scale, linear.weight, linear.scale, linear.bias, self._dtype)

    def _fold_pixels(self, vision: VisionModel) -> tuple[Tensor, Tensor]:
        # The model sees (2 * byte - 255) / 255 = (2 * signed + 1) / 255.
        weight = vision.patch_emb.weight.float()
        padding = -weight.shape[1] % _PATCH_ALIGNMENT
        padded = torch.nn.functional.pad(weight * (2 / 255), (0, padding)).to(self._dtype)
        offsets = vision.pos_emb[0].float() + vision.patch_emb.bias.float() + weight.sum(dim=1) / 255
        return padded, offsets.to(self._dtype)

    def _fold_blocks(self, vision: VisionModel, *, frees_originals: bool) -> None:
        for block in vision.blocks:
            self._blocks.append(self._fold_block(block))
            if frees_originals:
                self._free_matrices(block)

    @staticmethod
    def _free_matrices(block: Any) -> None:  # of `VisionModel`
        free_weights(block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2)

    def _fold_block(self, block: Any) -> _Block:  # a block of `VisionModel`
        return _Block(
            qkv=self._linear(block.attn.qkv, block.ln1),
            proj=self._linear(block.attn.proj),
            fc1=self._linear(block.mlp.fc1, block.ln2),
            fc2=self._linear(block.mlp.fc2),
        )

    def _linear(self, layer: nn.Linear, norm: nn.LayerNorm | None = None) -> _Linear:
        weight, bias = folded(layer, norm)
        fits = self._precision == "float8" and has_float8_product(*weight.shape)
        dtype = torch.float8_e4m3fn if fits else self._dtype
        matrix = Matrix.of(weight, bias, dtype)
        return _Linear(matrix.weight, matrix.scale, matrix.bias.to(self._dtype))

    def _log_kept(self) -> None:
        matrices = [matrix for block in self._blocks for matrix in (block.qkv, block.proj, block.fc1, block.fc2)]
        matrices += self._projector
        if self._precision == "float8" and (num_kept := sum(matrix.scale is None for matrix in matrices)):
            _log.warning(
                "%d of %d vision matrices stay in %s: float8 products need multiples of 16",
                num_kept,
                len(matrices),
                self._dtype,
            )

    def _new_plan_of_images(self, grids: tuple[tuple[int, int], ...], device: torch.device) -> PoolingPlan:
        plans, num_patches = [self._plan(grid, device) for grid in grids], self.config.num_image_tokens
        num_rows = itertools.accumulate(((1 + rows * columns) * num_patches for rows, columns in grids), initial=0)
        num_entries = itertools.accumulate((len(plan.patches) for plan in plans), initial=0)
        return PoolingPlan(
            patches=torch.cat([plan.patches + base for plan, base in zip(plans, num_rows, strict=False)]),
            starts=torch.cat([plan.starts + base for plan, base in zip(plans, num_entries, strict=False)]),
        )

    def _plan(self, grid: tuple[int, int], device: torch.device) -> PoolingPlan:
        if grid not in self._plans:
            self._plans[grid] = PoolingPlan.of(self.config, *grid, device)
        return self._plans[grid]


def run_products(config: VisionConfig, kernels: Kernels, num_crops: int, out: Tensor, *, is_float8: bool) -> None:
    """Computes the products of one block for so many crops on operands without values, so that they are measured
    before there are weights.

    `out` is any tensor of the device and of the type of the model. With `is_float8` the products are those of a
    `CalibratedVision`, else those of a `FusedVision` that adds to the stream.
    """
    num_rows, dim = num_crops * config.num_image_tokens, config.enc_dim
    scale = out.new_ones(1, dtype=torch.float32) if is_float8 else None
    scales = None if scale is None else scale[:, None]

    def matrix(rows: int, columns: int) -> Tensor:
        return out.new_empty(rows, columns, dtype=torch.float8_e4m3fn if is_float8 else out.dtype)

    def weights(out_dim: int, in_dim: int) -> tuple[Tensor, Tensor | None, Tensor]:
        return matrix(out_dim, in_dim), scale, out.new_zeros(out_dim)

    rows, hidden = matrix(num_rows, dim), out.new_empty(num_rows, dim)
    kernels.scaled_linear(rows, scales, *weights(3 * dim, dim), out.dtype)
    kernels.scaled_linear_add(rows, scale, *weights(dim, dim), hidden)
    activated = kernels.scaled_linear_gelu(rows, scale, *weights(config.enc_ff_dim, dim), scale)
    kernels.scaled_linear_add(activated, scale, *weights(dim, config.enc_ff_dim), hidden)


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """Averages in the order: patch 0 of the global crop, place 0 of the pooled whole, patch 1, place 1 …"""

    patches: Tensor
    """[entries] int64: indices of patches, counted from the image's first crop."""
    starts: Tensor
    """[2 * patches of a crop] int64: the first index in `patches` of each average."""

    @classmethod
    def of(cls, config: VisionConfig, rows: int, columns: int, device: torch.device) -> PoolingPlan:
        """Returns the plan of a grid.

        It equals stitching followed by an adaptive average pool to the size of a crop.
        """
        side = config.grid_size
        stitched_rows, stitched_columns = _stitched(config, rows), _stitched(config, columns)
        averages: list[list[int]] = []
        for y, x in itertools.product(range(side), repeat=2):
            averages.append([y * side + x])
            averages.append(
                [
                    (1 + row * columns + column) * side * side + crop_y * side + crop_x
                    for row, crop_y in _window(stitched_rows, y, side)
                    for column, crop_x in _window(stitched_columns, x, side)
                ]
            )
        starts = itertools.accumulate((len(average) for average in averages[:-1]), initial=0)
        return cls(
            patches=torch.tensor([patch for average in averages for patch in average], device=device),
            starts=torch.tensor(list(starts), device=device),
        )


def _stitched(config: VisionConfig, count: int) -> list[tuple[int, int]]:
    # Along one axis: the crop, and the place within it, of every patch that stitching keeps. Each crop contributes
    # its middle, and its margins only at the border of the image.
    margin, side = config.overlap_margin, config.grid_size
    return [
        (crop, place)
        for crop in range(count)
        for place in range(0 if crop == 0 else margin, side if crop == count - 1 else side - margin)
    ]


def _window(places: list[tuple[int, int]], index: int, count: int) -> list[tuple[int, int]]:
    # The window of an adaptive average pool from len(places) to `count`.
    return places[index * len(places) // count : -(-(index + 1) * len(places) // count)]
