"""Computes a linear layer whose product adds to the residual stream, by cuBLASLt."""

from torch import Tensor

from kestrel_ops.linear.library_cublas_lt import cublas_lt, unsupported_fixed_scales
from kestrel_ops.shapes import ModelShape


def scaled_linear_add(
    x: Tensor,  # [T, K] float8_e4m3fn, bfloat16 or float16
    x_scale: Tensor | None,  # [1] float32 where `x` is float8
    weight: Tensor,  # [N, K], of the type of `x`
    weight_scale: Tensor | None,  # [1] float32 where `weight` is float8
    bias: Tensor,  # [N], of the type of `hidden`
    hidden: Tensor,  # [T, N] bfloat16 or float16, contiguous, changed in place
) -> None:
    """Adds a product to the residual stream. Same contract as `reference.scaled_linear_add`.

    Raises RuntimeError if cuBLASLt has no such product.
    """
    cublas_lt().multiply(x, x_scale, weight, weight_scale, bias, hidden, accumulate=True)


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    return unsupported_fixed_scales(model)
