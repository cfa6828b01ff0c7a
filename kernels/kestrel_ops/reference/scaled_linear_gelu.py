"""A linear layer in eight bits with its GELU, its result in eight bits."""

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
    out_factor: Tensor,  # [1] float32: what the result is multiplied by before it is rounded
) -> Tensor:  # [T, N] float8_e4m3fn
    """gelu((x * x_scale) @ (weight * weight_scale).T + bias) * out_factor, the GELU in its tanh form.

    What does not fit into eight bits is cut. K and N are multiples of 16.
    """
    inner = scaled_linear(x, x_scale[:, None], weight, weight_scale, bias, torch.float32)
    return rounded_to_float8(gelu(inner, approximate="tanh") * out_factor)
