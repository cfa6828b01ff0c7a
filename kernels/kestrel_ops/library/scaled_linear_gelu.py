"""A linear layer in float8 whose product applies GELU and rounding, by cuBLASLt."""

import torch
from torch import Tensor

from kestrel_ops.library.cublas_lt import cublas_lt, unsupported_fixed_scales
from kestrel_ops.shapes import ModelShape


def scaled_linear_gelu(
    x: Tensor,  # [T, K] float8_e4m3fn
    x_scale: Tensor,  # [1] float32
    weight: Tensor,  # [N, K] float8_e4m3fn
    weight_scale: Tensor,  # [1] float32
    bias: Tensor,  # [N] bfloat16 or float16
    out_factor: Tensor,  # [1] float32: factor of the result before rounding
) -> Tensor:  # [T, N] float8_e4m3fn
    """As the reference. Raises RuntimeError if cuBLASLt has no such product."""
    out = torch.empty(len(x), len(weight), dtype=torch.float8_e4m3fn, device=x.device)
    cublas_lt().multiply(x, x_scale, weight, weight_scale, bias, out, out_factor=out_factor, gelu=True)
    return out


def unsupported(model: ModelShape) -> str | None:
    """Why this cannot serve a model."""
    return unsupported_fixed_scales(model)
