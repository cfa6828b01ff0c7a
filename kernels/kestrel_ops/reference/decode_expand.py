"""The first product of a decoder block for one token of each sequence, including the normalisation."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

_LARGEST_FLOAT16 = torch.finfo(torch.float16).max


def decode_expand(
    hidden: Tensor,  # [B, K] float32, changed in place where something is pending
    weight: Tensor,  # [N, K], the model's type or float8_e4m3fn
    weight_scale: Tensor | None,  # [N] float32 where the weight is float8: weight * scale is meant
    row_sums: Tensor,  # [N] float32: sums over K of what is meant
    bias: Tensor,  # [N] float32
    epsilon: float,
    num_plain: int,
    plain_out: Tensor,  # [B, num_plain] of any floating type, written
    activated_out: Tensor,  # [B, N - num_plain] of any floating type, rows may be strided, written; may be empty
    pending: Tensor | None = None,  # [S, B, K] float32: what `decode_contract` has deferred
) -> None:
    """out = ((hidden - mean) / sqrt(variance + epsilon)) @ weight.T + bias, row by row.

    Before that, hidden += pending[0], then pending[1] and so on. The first `num_plain` columns are stored
    unchanged, the others through the tanh form of GELU. Values beyond the range of float16 become its largest
    number. An implementation may use `row_sums` to subtract the mean afterwards.
    """
    for share in () if pending is None else pending:
        hidden += share
    wide = weight.float() if weight_scale is None else weight.float() * weight_scale[:, None]
    product = linear(layer_norm(hidden, hidden.shape[1:], eps=epsilon), wide, bias)
    plain_out.copy_(_held(product[:, :num_plain], plain_out.dtype))
    activated_out.copy_(_held(gelu(product[:, num_plain:], approximate="tanh"), activated_out.dtype))


def _held(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.clamp(-_LARGEST_FLOAT16, _LARGEST_FLOAT16) if dtype == torch.float16 else rows
