"""Attention of every patch of a crop to every patch of the same crop."""

import torch
from torch import Tensor

from kestrel_ops.reference.quantise_rows import rounded_to_float8


def crop_attention(
    packed: Tensor,  # [N * patches, 3 * H * D]: queries, keys and values side by side
    num_patches: int,
    num_heads: int,
    out_scale: float | None = None,
) -> Tensor:  # [N * patches, H * D] in the type of `packed`, or float8_e4m3fn with an `out_scale`
    """softmax(query @ key.T / sqrt(D)) @ value of each crop and head, computed in float32.

    With `out_scale` the result is divided by it and rounded to float8; larger values are clipped.
    """
    query, key, value = (
        packed.float().view(-1, num_patches, 3, num_heads, packed.shape[1] // (3 * num_heads)).unbind(2)
    )
    scores = torch.einsum("nqhd,nkhd->nhqk", query, key) * query.shape[-1] ** -0.5
    attended = torch.einsum("nhqk,nkhd->nqhd", scores.softmax(dim=-1), value).reshape(len(packed), -1)
    return attended.to(packed.dtype) if out_scale is None else rounded_to_float8(attended / out_scale)
