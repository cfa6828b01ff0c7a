"""A mixture of gated experts, with full-precision or scaled 8-bit weights."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, softmax

from kestrel_ops.low_rank import ExpertAdapters
from kestrel_ops.reference.low_rank import add_low_rank


def mixture_of_experts(
    hidden: Tensor,  # [T, dim]
    router_logits: Tensor,  # [T, E]
    up: Tensor,  # [E, 2 * inner, dim]: first the activated half, then the gate half
    down: Tensor,  # [E, dim, inner]
    experts_per_token: int,
    up_scale: Tensor | None = None,  # [E, 2 * inner] float32, where `up` is float8
    down_scale: Tensor | None = None,  # [E, dim] float32, where `down` is float8
    adapters: ExpertAdapters | None = None,
) -> Tensor:  # [T, dim]
    """Sum over the best experts of each token: weight * down(gelu(first half) * (second half + 1)).

    The weights are a softmax over the chosen logits alone, in float32; the GELU is the exact (erf) form. With
    `adapters`, both products of an expert have those of each token's slot added.
    """
    top = router_logits.float().topk(experts_per_token, dim=-1)
    weights = softmax(top.values, dim=-1).to(hidden.dtype)
    total = torch.zeros_like(hidden)
    for expert in top.indices.unique().tolist():
        rows, places = torch.nonzero(top.indices == expert, as_tuple=True)
        own = hidden[rows]
        product = linear(own, _expert(up, up_scale, expert, hidden.dtype))
        if adapters is not None:
            add_low_rank(product, own, adapters.up.of_expert(expert), adapters.slots[rows])
        activated, gate = product.chunk(2, dim=-1)
        inner = gelu(activated) * (gate + 1)
        output = linear(inner, _expert(down, down_scale, expert, hidden.dtype))
        if adapters is not None:
            add_low_rank(output, inner, adapters.down.of_expert(expert), adapters.slots[rows])
        total = total.index_add(0, rows, output * weights[rows, places, None])
    return total


def _expert(stack: Tensor, scale: Tensor | None, expert: int, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return stack[expert]
    return (stack[expert].float() * scale[expert, :, None]).to(dtype)
