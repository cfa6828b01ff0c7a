"""Attention within crops by cuDNN, or what torch has where cuDNN refuses."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kestrel_ops.shapes import ModelShape
from kestrel_ops.triton.concat_gelu import concat_gelu
from kestrel_ops.triton.requirements import unsupported_device, unsupported_rows

# cuDNN is the fastest at heads of 72 dimensions; what it refuses, float32 above all, goes to the next.
_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def crop_attention(
    packed: Tensor,  # [N * patches, 3 * H * D]: queries, keys and values side by side
    num_patches: int,
    num_heads: int,
    out_scale: float | None = None,
) -> Tensor:  # [N * patches, H * D] in the type of `packed`, or float8_e4m3fn with an `out_scale`
    """As the definition says; queries, keys and values are read where they lie."""
    query, key, value = packed.view(-1, num_patches, 3, num_heads, packed.shape[1] // (3 * num_heads)).permute(
        2, 0, 3, 1, 4
    )  # each [N, H, patches, D]
    with sdpa_kernel(_BACKENDS, set_priority=True):
        attended = scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(len(packed), -1)
    if out_scale is None:
        return attended
    rounded, _ = concat_gelu(None, attended, torch.float8_e4m3fn, False, out_scale=out_scale)
    return rounded


def unsupported(model: ModelShape) -> str | None:
    """Why this cannot serve a model: torch has attention for all heads, but Triton rounds its results to float8."""
    if model.vision is None or not model.vision.has_fixed_scales:
        return None
    return unsupported_device(model, model.vision.weight_dtype) or unsupported_rows(model)
