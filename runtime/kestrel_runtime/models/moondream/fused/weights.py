"""Rearranges the decoder's weights: two matrices per block, with the LayerNorm folded into the first.

Attention and MLP of a block read the same normalised tokens and add to the same stream. So their first matrices are
stacked by rows and their second ones by columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kestrel_ops import has_float8_product
from kestrel_runtime.models.moondream.layers import Mlp
from kestrel_runtime.models.moondream.quantisation import quantise_float8
from kestrel_runtime.models.moondream.text.decoder import MixtureOfExperts, Tau, TextModel

NUM_WIDE_BLOCKS = 1
"""The number of first blocks that compute prompts in the model's type when all others use float8.

The error of the first block passes through all others, at a point where the residual stream is still small. It is
about half of the whole error of a prompt in float8 (docs/numerics.md). The error of the last block is negligible.
"""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer y = x @ (weight * scale).T + bias, in the model's type or in float8 with a scale per row."""

    weight: Tensor
    """[N, K], the model's type or float8_e4m3fn."""
    scale: Tensor | None
    """[N] float32 where the weight is float8, else None."""
    bias: Tensor
    """[N] float32."""
    row_sums: Tensor
    """[N] float32: the sum of each row of weight * scale, as stored. A product with x - mean needs it."""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Matrix:
        """Stores a float32 weight and bias as `dtype`. A row of zeros is stored as zeros in float8, too."""
        if dtype != torch.float8_e4m3fn:
            stored = weight.to(dtype)
            return cls(stored, None, bias, stored.float().sum(dim=1))
        stored, scale = quantise_float8(weight)
        return cls(stored, scale, bias, stored.float().sum(dim=1) * scale)

    def part(self, rows: slice) -> Matrix:
        """Returns some of the outputs. Shares memory."""
        return Matrix(
            weight=self.weight[rows],
            scale=None if self.scale is None else self.scale[rows],
            bias=self.bias[rows],
            row_sums=self.row_sums[rows],
        )


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """One block: hidden + down([attended | gelu(inner)]) where [qkv | inner] = up(normalised hidden).

    A block with a mixture of experts has no inner part: its `experts` run by themselves on `ln(hidden)`.
    """

    up: Matrix
    """Rows: query, key and value [qkv_dim], then the MLP's first layer [ff_dim]. Takes (x - mean) / deviation."""
    down: Matrix
    """Columns: the attention's output projection [H * D], then the MLP's second layer [ff_dim]."""
    tau: Tau | None
    """Scales of queries and values, which tau attention computes from the packed query, key and value."""
    ln: nn.LayerNorm
    """The norm whose weight and bias are folded into `up`. The experts use the unfolded norm."""
    experts: MixtureOfExperts | None


@torch.no_grad()
def fused_blocks(
    text: TextModel, precision: Literal["model", "float8"], *, frees_originals: bool = False
) -> tuple[FusedBlock, ...]:
    """Returns the blocks of a loaded model with their weights in its own type, or in float8. Experts stay as they
    are.

    A matrix whose sizes no float8 product supports stays in the model's type. With `frees_originals` the model's
    matrices are freed block by block, except those that `prompt_blocks` still needs.
    """
    fused: list[FusedBlock] = []
    for layer, block in enumerate(text.blocks):
        fused.append(_fused(block, precision, text.wte.dtype))
        if frees_originals and layer >= NUM_WIDE_BLOCKS:
            _free_matrices(block)
    return tuple(fused)


@torch.no_grad()
def prompt_blocks(
    text: TextModel, blocks: tuple[FusedBlock, ...], *, frees_originals: bool = False
) -> tuple[FusedBlock, ...]:
    """Returns `fused_blocks` for packed prompts, with the first `NUM_WIDE_BLOCKS` in the model's type.

    Decode steps use `blocks` unchanged, since their time is that of reading weights. With `frees_originals` the
    matrices of the model that `fused_blocks` has kept are freed.
    """
    wide: list[FusedBlock] = []
    for block, fused in zip(text.blocks[:NUM_WIDE_BLOCKS], blocks, strict=False):
        wide.append(_fused(block, "model", text.wte.dtype) if _is_float8(fused) else fused)
        if frees_originals:
            _free_matrices(block)
    return (*wide, *blocks[NUM_WIDE_BLOCKS:])


@torch.no_grad()
def fused_head(text: TextModel, precision: Literal["model", "float8"]) -> Matrix:
    """Returns the head [vocabulary, dim] with the final LayerNorm folded in.

    Its input is (x - mean) / deviation.
    """
    dtype = text.wte.dtype if precision == "model" else torch.float8_e4m3fn
    weight, bias = text.lm_head.weight.float(), text.lm_head.bias.float()
    norm = text.post_ln
    return Matrix.of(weight * norm.weight.float(), bias + weight @ norm.bias.float(), dtype)


def free_weights(*layers: nn.Linear) -> None:
    """Frees the weights and biases of layers. A freed layer keeps its sizes and raises `RuntimeError` when run."""
    for layer in layers:
        layer.to("meta")


def _free_matrices(block: Any) -> None:  # a block of `TextModel`
    """Frees the weights that `FusedBlock` has copied. It uses norm, tau and experts of the block itself."""
    free_weights(block.attn.qkv, block.attn.proj)
    if isinstance(block.mlp, Mlp):
        free_weights(block.mlp.fc1, block.mlp.fc2)


def _is_float8(block: FusedBlock) -> bool:
    return block.up.scale is not None or block.down.scale is not None


def _fused(block: Any, precision: Literal["model", "float8"], own_dtype: torch.dtype) -> FusedBlock:
    # A block of `TextModel`.
    def dtype(*sizes: int) -> torch.dtype:
        fits = precision == "float8" and has_float8_product(*sizes)
        return torch.float8_e4m3fn if fits else own_dtype

    ln, attention, mlp = block.ln, block.attn, block.mlp
    if attention.tau is not None:
        attention.tau.stack()
    up_weight, up_bias = attention.qkv.weight.float(), attention.qkv.bias.float()
    down_weight, down_bias = attention.proj.weight.float(), attention.proj.bias.float()
    # Prefill also uses the rows of each stacked layer separately.
    rows, columns = [len(up_weight)], down_weight.shape[1]
    if isinstance(mlp, Mlp):
        rows.append(len(mlp.fc1.weight))
        columns += mlp.fc2.weight.shape[1]
        up_weight = torch.cat((up_weight, mlp.fc1.weight.float()))
        up_bias = torch.cat((up_bias, mlp.fc1.bias.float()))
        down_weight = torch.cat((down_weight, mlp.fc2.weight.float()), dim=1)
        down_bias = down_bias + mlp.fc2.bias.float()
    return FusedBlock(
        up=Matrix.of(
            up_weight * ln.weight.float(), up_bias + up_weight @ ln.bias.float(), dtype(*rows, up_weight.shape[1])
        ),
        down=Matrix.of(down_weight, down_bias, dtype(len(down_weight), columns)),
        tau=attention.tau,
        ln=ln,
        experts=mlp if isinstance(mlp, MixtureOfExperts) else None,
    )
