"""Computes a linear layer by cuBLAS, in the type of the operands; for few rows of float8 by Triton."""

import functools
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import linear

from kestrel_ops.linear.library_cublas_lt import cublas_lt
from kestrel_ops.shapes import FLOAT8, ModelShape

_FEWEST_ROWS_WITH_BIAS = 64
_SHORT = (torch.bfloat16, torch.float16)
LAUNCHES_TRITON = True  # for few rows of float8


def scaled_linear(
    x: Tensor,  # [T, K]
    x_scale: Tensor | None,  # [T, 1] or [1, 1] float32 where `x` is float8_e4m3fn
    weight: Tensor,  # [N, K], of the type of `x`
    weight_scale: Tensor | None,  # [N] or, with one scale of `x`, [1] float32 where `weight` is float8_e4m3fn
    bias: Tensor | None,  # [N]
    out_dtype: torch.dtype,
) -> Tensor:  # [T, N] out_dtype
    """Computes (x * x_scale) @ (weight * weight_scale).T + bias. Same contract as `reference.scaled_linear`.

    float8 products sum with the tensor cores' fast accumulation, few rows in float32. Raises RuntimeError if K or N
    of a float8 product is no multiple of 16.
    """
    few_rows = _few_rows()
    only_compiles = few_rows is not None and few_rows.triton_compilations.only_compiles()
    if few_rows is not None and x_scale is not None and (x.is_cuda or only_compiles):
        operands = (x, x_scale, weight, weight_scale)
        if few_rows.serves(*operands):
            return few_rows.multiply_few(*operands, bias, out_dtype)
    if only_compiles:
        return torch.empty(len(x), len(weight), dtype=out_dtype, device=x.device)
    if x.dtype != torch.float8_e4m3fn:
        return linear(x, weight, None if bias is None else bias.to(x.dtype)).to(out_dtype)
    assert x_scale is not None, "a float8 operand comes with its scale"
    assert weight_scale is not None, "a float8 weight comes with its scale"
    has_one_scale = x_scale.numel() == weight_scale.numel() == 1
    is_large = x.is_cuda and len(x) >= _FEWEST_ROWS_WITH_BIAS
    if has_one_scale and is_large and bias is not None and bias.dtype == out_dtype in _SHORT:
        out = torch.empty(len(x), len(weight), dtype=out_dtype, device=x.device)
        cublas_lt().multiply(x, x_scale, weight, weight_scale, bias, out)
        return out
    # A product with float32 output, or with few rows of wide operands, cannot add the bias itself.
    inside = bias if out_dtype != torch.float32 and len(x) >= _FEWEST_ROWS_WITH_BIAS else None
    product = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale,
        scale_b=weight_scale[None, :],
        bias=None if inside is None else inside.to(out_dtype),
        out_dtype=out_dtype,
        use_fast_accum=True,
    )
    return (product + bias).to(out_dtype) if bias is not None and inside is None else product


@functools.cache
def _few_rows() -> ModuleType | None:
    """Returns the product of few rows; None where Triton is not installed."""
    try:
        from kestrel_ops.linear import triton_few_rows
    except ModuleNotFoundError:
        return None
    return triton_few_rows


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model. Matrices whose sizes no float8 product supports are not in float8."""
    if FLOAT8 not in model.weight_dtypes:
        return None
    reason = model.lacks((8, 9), "a float8 product")
    if reason is None and model.capability not in (None, (9, 0)) and model.dtype != torch.bfloat16:
        return f"float8 products with a scale for each row give bfloat16 on this device, not {model.dtype}"
    return reason
