"""The scales of queries and values in tau attention, from the token and its position."""

import torch
from torch import Tensor
from torch.nn.functional import gelu


def tau_scales(
    packed: Tensor,  # [T, W]: query, key and value before their rotation; rows may be strided
    positions: Tensor,  # [T] int32 or int64, counted from 0; negative ones count as 0
    query_weight: Tensor,  # [H, W]
    value_weight: Tensor,  # [H, W]
    alpha: Tensor,  # [H]
) -> tuple[Tensor, Tensor]:  # [T, H] each, of the type of the weights: for queries and for values
    """tanh(weight @ gelu(packed)) + sigmoid(alpha * ln(position + 1)) + 1/2; the GELU is the exact (erf) form."""
    activated = gelu(packed.to(query_weight.dtype))
    by_position = tau_positions(alpha, positions)
    query_scale = torch.tanh((activated @ query_weight.T).float()) + by_position
    value_scale = torch.tanh((activated @ value_weight.T).float()) + by_position
    return query_scale.to(query_weight.dtype), value_scale.to(query_weight.dtype)


def tau_positions(alpha: Tensor, positions: Tensor) -> Tensor:
    """The position term of tau attention, sigmoid(alpha * ln(p + 1)) + 1/2: [tokens, heads], float32.

    alpha: [heads]; positions: [tokens], counted from 0. At position 0 it is 1 for any alpha.
    """
    steps = (positions.clamp(min=0) + 1).float().log()
    return torch.sigmoid(alpha.float()[None, :] * steps[:, None]) + 0.5
