"""Computes attention within crops by cuDNN, or by other implementations in torch for sizes and types without
cuDNN."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kestrel_ops.compilation.triton_requirements import unsupported_device, unsupported_rows
from kestrel_ops.norms.triton_concat_gelu import concat_gelu
from kestrel_ops.shapes import ModelShape

# cuDNN is the fastest with heads of 72 dimensions. It does not support float32, among others.
_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
LAUNCHES_TRITON = True  # where it rounds


def crop_attention(
    packed: Tensor,  # [N * patches, 3 * H * D]: queries, keys and values side by side
    num_patches: int,
    num_heads: int,
    out_scale: float | None = None,
    crop_by_crop: bool = False,
) -> Tensor:  # [N * patches, H * D] in the type of `packed`, or float8_e4m3fn with an `out_scale`
    """Computes attention within each crop. Same contract as `reference.crop_attention`. Queries, keys and values
    are not copied."""
    if crop_by_crop:  # libraries choose their kernels by the number of crops
        crops = packed.split(num_patches)
        return torch.cat([crop_attention(crop, num_patches, num_heads, out_scale) for crop in crops])
    query, key, value = packed.view(-1, num_patches, 3, num_heads, packed.shape[1] // (3 * num_heads)).permute(
        2, 0, 3, 1, 4
    )  # each [N, H, patches, D]
    with sdpa_kernel(_BACKENDS, set_priority=True):
        attended = scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(len(packed), -1)
    if out_scale is None:
        return attended
    quantised, _ = concat_gelu(None, attended, torch.float8_e4m3fn, False, out_scale=out_scale)
    return quantised


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model: torch supports all heads, but rounding to float8 needs Triton."""
    if model.vision is None or not model.vision.has_fixed_scales:
        return None
    return unsupported_device(model, model.vision.weight_dtype) or unsupported_rows(model)
