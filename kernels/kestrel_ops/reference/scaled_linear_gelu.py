"""A linear layer in float8 with a GELU and a float8 result."""

import torch
from torch import Tensor
from torch.nn.functional import gelu

from kestrel_ops.reference.quantise_rows import rounded_to_float8
from kestrel_ops.reference.scaled_linear import scaled_linear


def scaled_linear_gelu(
    x: Tensor,  # [T, K] float8_e4m3fn
    x_scale: Tensor,  # [1] float32
    weight: Tensor,  # [N, K] float8_e4m3fn
    weight_scale: Tensor,  # [1] float32
    bias: Tensor,  # [N] bfloat16 or float16
    out_factor: Tensor,  # [1] float32: factor of the result before rounding
) -> Tensor:  # [T, N] float8_e4m3fn
    """gelu((x * x_scale) @ (weight * weight_scale).T + bias) * out_factor, the GELU in its tanh form.

    Values beyond the range of float8 are clipped. K and N are multiples of 16.
    """
    inner = scaled_linear(x, x_scale[:, None], weight, weight_scale, bias, torch.float32)
    return rounded_to_float8(gelu(inner, approximate="tanh") * out_factor)
