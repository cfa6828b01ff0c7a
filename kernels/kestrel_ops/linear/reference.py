"""Defines linear layers: with float8 operands, and for one token of each sequence."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from kestrel_ops.lora.reference import BlockLowRank, add_down_terms, add_up_terms, write_normed
from kestrel_ops.norms.reference import quantised_to_float8

_LARGEST_FLOAT16 = torch.finfo(torch.float16).max


def scaled_linear(
    x: Tensor,  # [T, K]
    x_scale: Tensor | None,  # [T, 1] or [1, 1] float32 where `x` is float8_e4m3fn
    weight: Tensor,  # [N, K], of the type of `x`
    weight_scale: Tensor | None,  # [N] or, with one scale of `x`, [1] float32 where `weight` is float8_e4m3fn
    bias: Tensor | None,  # [N]
    out_dtype: torch.dtype,
) -> Tensor:  # [T, N] out_dtype
    """Computes (x * x_scale) @ (weight * weight_scale).T + bias, summed in float32.

    float8 operands need K and N to be multiples of 16. A bias in `out_dtype` costs nothing.
    """
    product = x.float() @ weight.float().T
    if x_scale is not None:
        product = product * x_scale
    if weight_scale is not None:
        product = product * weight_scale
    if bias is not None:
        product = product + bias.float()
    return product.to(out_dtype)


def scaled_linear_add(
    x: Tensor,  # [T, K]
    x_scale: Tensor | None,  # [1] float32 where `x` is float8_e4m3fn
    weight: Tensor,  # [N, K], of the type of `x`
    weight_scale: Tensor | None,  # [1] float32 where `weight` is float8_e4m3fn
    bias: Tensor,  # [N], of the type of `hidden`
    hidden: Tensor,  # [T, N], changed in place; of the type of `x` where that is not float8
) -> None:
    """Computes hidden += (x * x_scale) @ (weight * weight_scale).T + bias, rounded once.

    float8 operands need K and N to be multiples of 16.
    """
    delta = scaled_linear(x, x_scale, weight, weight_scale, bias, torch.float32)
    hidden.copy_(hidden.float() + delta)


def scaled_linear_gelu(
    x: Tensor,  # [T, K]
    x_scale: Tensor | None,  # [1] float32 where `x` is float8_e4m3fn
    weight: Tensor,  # [N, K], of the type of `x`
    weight_scale: Tensor | None,  # [1] float32 where `weight` is float8_e4m3fn
    bias: Tensor,  # [N] bfloat16 or float16, of the type of `x` where that is not float8
    out_factor: Tensor | None,  # [1] float32 where `x` is float8_e4m3fn: factor of the result before rounding
) -> Tensor:  # [T, N], of the type of `x`
    """Computes gelu((x * x_scale) @ (weight * weight_scale).T + bias) * out_factor, the GELU in its tanh form.

    Values beyond the range of float8 are clipped. float8 operands need K and N to be multiples of 16.
    """
    activated = gelu(scaled_linear(x, x_scale, weight, weight_scale, bias, torch.float32), approximate="tanh")
    return activated.to(x.dtype) if out_factor is None else quantised_to_float8(activated * out_factor)


def layer_norm_linear(
    hidden: Tensor,  # [T, dim] float32
    norm_weight: Tensor,  # [dim]
    norm_bias: Tensor,  # [dim]
    epsilon: float,
    weight: Tensor,  # [N, dim]
    bias: Tensor,  # [N]
    delta: Tensor | None = None,  # [T, dim] of any floating type: added to `hidden` before all else
) -> tuple[Tensor, Tensor]:  # [T, dim] of the type of the weight, [T, N] float32 or, elsewhere, of that type
    """Returns the normalised rows, and weight @ row + bias of these, summed in float32."""
    if delta is not None:
        hidden = hidden + delta
    normed = layer_norm(hidden, hidden.shape[1:], norm_weight.float(), norm_bias.float(), epsilon).to(weight.dtype)
    return normed, torch.addmm(bias.float(), normed.float(), weight.float().T)


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
    low_rank: BlockLowRank | None = None,
    delta: Tensor | None = None,  # [B, K] of any floating type
) -> None:
    """Computes out = ((hidden - mean) / sqrt(variance + epsilon)) @ weight.T + bias, row by row, and the terms of
    adapters.

    Before that, hidden += pending[0], then pending[1] and so on; or, which leaves `hidden` as it is, hidden + delta
    stands in its place. The first `num_plain` columns are stored
    unchanged, the others through the tanh form of GELU. Values beyond the range of float16 become its largest
    number. An implementation may use `row_sums` to subtract the mean afterwards.
    """
    for part in () if pending is None else pending:
        hidden += part
    if delta is not None:
        hidden = hidden + delta
    wide = weight.float() if weight_scale is None else weight.float() * weight_scale[:, None]
    normed = layer_norm(hidden, hidden.shape[1:], eps=epsilon)
    product = linear(normed, wide, bias)
    if low_rank is not None:
        write_normed(normed, low_rank)
        add_up_terms(product, low_rank)
    plain_out.copy_(_held(product[:, :num_plain], plain_out.dtype))
    activated_out.copy_(_held(gelu(product[:, num_plain:], approximate="tanh"), activated_out.dtype))


def _held(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.clamp(-_LARGEST_FLOAT16, _LARGEST_FLOAT16) if dtype == torch.float16 else rows


def decode_contract(
    activations: Tensor,  # [B, K] of any floating type
    weight: Tensor,  # [N, K], the model's type or float8_e4m3fn
    weight_scale: Tensor | None,  # [N] float32 where the weight is float8: weight * scale is meant
    bias: Tensor,  # [N] float32
    hidden: Tensor,  # [B, N] float32, changed in place without a `total`
    may_defer: bool = False,
    low_rank: BlockLowRank | None = None,
    delta: Tensor | None = None,  # [B, N] of any floating type: added as well
    total: Tensor | None = None,  # [B, N] float32, written in the place of `hidden`
) -> Tensor | None:  # [S, B, N] float32
    """Computes hidden += activations @ weight.T + bias, and the terms of adapters. The order of each sum is the
    same in every run. The first columns of the activations are the attention's result.

    With `may_defer` an implementation may leave `hidden` unchanged and return the terms to add, in the order of S,
    for `decode_expand`. None: nothing is deferred. The reference defers nothing.
    """
    wide = weight.float() if weight_scale is None else weight.float() * weight_scale[:, None]
    product = linear(activations.float(), wide, bias)
    if low_rank is not None:
        add_down_terms(product, activations, None, low_rank)
    if delta is not None:
        product = product + delta
    torch.add(hidden, product, out=hidden if total is None else total)
    return None
