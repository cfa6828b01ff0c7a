"""A LayerNorm and a small linear layer behind it, as a router of experts is."""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm


def layer_norm_linear(
    hidden: Tensor,  # [T, dim] float32
    norm_weight: Tensor,  # [dim]
    norm_bias: Tensor,  # [dim]
    epsilon: float,
    weight: Tensor,  # [N, dim]
    bias: Tensor,  # [N]
) -> tuple[Tensor, Tensor]:  # [T, dim] of the type of the weight, [T, N] float32 or, elsewhere, of that type
    """The normalised rows, and weight @ row + bias of these, summed in float32."""
    normed = layer_norm(hidden, hidden.shape[1:], norm_weight.float(), norm_bias.float(), epsilon).to(weight.dtype)
    return normed, torch.addmm(bias.float(), normed.float(), weight.float().T)
