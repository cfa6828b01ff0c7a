"""Computes a mixture of gated experts, with full-precision weights, or scaled ones of 8 or 4 bits."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, softmax

from kestrel_ops.experts.reference_int4 import dequantise_int4
from kestrel_ops.lora.reference import ExpertAdapters, add_low_rank
from kestrel_ops.norms.reference import to_float32


def mixture_of_experts(
    hidden: Tensor,  # [T, dim]
    router_logits: Tensor,  # [T, E]
    up: Tensor,  # [E, 2 * inner, dim]: first the activated half, then the gate half
    down: Tensor,  # [E, dim, inner]
    experts_per_token: int,
    up_scale: Tensor | None = None,  # [E, 2 * inner] float32, where `up` is float8
    down_scale: Tensor | None = None,  # [E, dim] float32, where `down` is float8
    adapters: ExpertAdapters | None = None,
    positions: Tensor | None = None,  # [T] int32 or int64: tokens at negative ones are padding
) -> Tensor:  # [T, dim]
    """Sums over the best experts of each token: weight * down(gelu(first half) * (second half + 1)).

    The weights are a softmax over the chosen logits alone, in float32; the GELU is the exact (erf) form. With
    `adapters`, both products of an expert have those of each token's slot added. Both stacks of experts may have 4
    bits, as `quantise_int4` gives them: `up` is uint8 [E, pairs, 2 * inner, 64] with scales bfloat16 [E, pairs,
    2 * inner, 2], `down` likewise with `dim` rows. Padding chooses no expert and gives zeros.
    """
    top = router_logits.float().topk(experts_per_token, dim=-1)
    weights = softmax(top.values, dim=-1).to(hidden.dtype)
    chosen = top.indices if positions is None else top.indices.masked_fill(positions[:, None] < 0, -1)
    total = torch.zeros_like(hidden)
    for expert in chosen[chosen >= 0].unique().tolist():
        rows, places = torch.nonzero(chosen == expert, as_tuple=True)
        own = hidden[rows]
        product = linear(own, weight_of_expert(up, up_scale, expert, own))
        if adapters is not None:
            add_low_rank(product, own, adapters.up.of_expert(expert), adapters.slots[rows])
        activated, gate = product.chunk(2, dim=-1)
        inner = gelu(activated) * (gate + 1)
        output = linear(inner, weight_of_expert(down, down_scale, expert, inner))
        if adapters is not None:
            add_low_rank(output, inner, adapters.down.of_expert(expert), adapters.slots[rows])
        total.index_add_(0, rows, output * weights[rows, places, None])
    return total


def weight_of_expert(stack: Tensor, scale: Tensor | None, expert: int, rows: Tensor) -> Tensor:
    """Returns the weight of an expert that multiplies rows [T, columns], in their type."""
    if scale is None:
        return stack[expert]
    if stack.dtype == torch.uint8:
        return dequantise_int4(stack[expert], scale[expert], rows.shape[-1]).to(rows.dtype)
    return (to_float32(stack[expert]) * scale[expert, :, None]).to(rows.dtype)
