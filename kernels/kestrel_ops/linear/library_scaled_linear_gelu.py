"""Computes a linear layer whose product applies GELU and rounding, by cuBLASLt."""

import torch
from torch import Tensor

from kestrel_ops.linear.library_cublas_lt import cublas_lt, unsupported_fixed_scales
from kestrel_ops.shapes import ModelShape


def scaled_linear_gelu(
    x: Tensor,  # [T, K] float8_e4m3fn, bfloat16 or float16
    x_scale: Tensor | None,  # [1] float32 where `x` is float8
    weight: Tensor,  # [N, K], of the type of `x`
    weight_scale: Tensor | None,  # [1] float32 where `weight` is float8
    bias: Tensor,  # [N] bfloat16 or float16
    out_factor: Tensor | None,  # [1] float32 where `x` is float8: factor of the result before rounding
) -> Tensor:  # [T, N], of the type of `x`
    """Computes a product and its GELU. Same contract as `reference.scaled_linear_gelu`.

    Raises RuntimeError if cuBLASLt has no such product.
    """
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    cublas_lt().multiply(x, x_scale, weight, weight_scale, bias, out, out_factor=out_factor, gelu=True)
    return out


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    return unsupported_fixed_scales(model)
