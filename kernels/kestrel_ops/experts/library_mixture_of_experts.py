"""Computes a mixture of gated experts by grouped products of tokens sorted by expert. Does not synchronise."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, softmax

from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.experts.reference import weight_of_expert
from kestrel_ops.lora.library_add_low_rank import add_low_rank, of_own_slot
from kestrel_ops.lora.reference import ExpertAdapters, LowRank
from kestrel_ops.norms.reference import quantise_rows
from kestrel_ops.shapes import FLOAT8, ModelShape, has_float8_product

_WITH_GROUPED_PRODUCTS = (None, (9, 0), (10, 0))  # on other devices torch reads the sizes of groups on the host
_BFLOAT16_MULTIPLE = 8  # 16 bytes


def mixture_of_experts(
    hidden: Tensor,  # [T, dim]
    router_logits: Tensor,  # [T, E]
    up: Tensor,  # [E, 2 * inner, dim]: first the activated half, then the gate half
    down: Tensor,  # [E, dim, inner]
    experts_per_token: int,
    up_scale: Tensor | None = None,  # [E, 2 * inner] float32, where `up` is float8
    down_scale: Tensor | None = None,  # [E, dim] float32, where `down` is float8
    adapters: ExpertAdapters | None = None,
    positions: Tensor | None = None,
) -> Tensor:  # [T, dim]
    """Computes a mixture of experts, so that a CUDA graph can capture it.

    Same contract as `reference.mixture_of_experts`; the inputs of float8 experts are quantised to float8, too. If
    torch has no grouped product for the type, the sizes or the device, every expert computes every token; it has
    none for experts of 4 bits.
    """
    mixed = _mixed(hidden, router_logits, (up, up_scale), (down, down_scale), experts_per_token, adapters)
    return mixed if positions is None else mixed.masked_fill(positions[:, None] < 0, 0)


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model: it can serve any, see `mixture_of_experts`."""
    return None


def _mixed(
    hidden: Tensor,
    router_logits: Tensor,
    ups: tuple[Tensor, Tensor | None],
    downs: tuple[Tensor, Tensor | None],
    experts_per_token: int,
    adapters: ExpertAdapters | None,
) -> Tensor:
    (up, up_scale), (down, down_scale) = ups, downs
    top = router_logits.float().topk(experts_per_token, dim=-1)
    weights = softmax(top.values, dim=-1).to(hidden.dtype)
    if not _has_grouped_products(hidden, up, adapters):
        return _dense(hidden, top.indices, weights, (up, up_scale), (down, down_scale), adapters)
    # Indices of pairs (token, choice) in the order of their experts. The token of a pair is its index / choices.
    chosen = top.indices.flatten()
    order = chosen.argsort(stable=True)
    tokens = order // experts_per_token
    numbers = torch.arange(up.shape[0], device=hidden.device)
    ends = torch.searchsorted(chosen[order], numbers, right=True, out_int32=True)
    own = hidden[tokens]
    product = _grouped(own, up, up_scale, ends)
    if adapters is not None:
        product = product + _grouped_low_rank(own, adapters.up, adapters.slots[tokens], ends)
    activated, gate = product.chunk(2, dim=-1)
    inner = gelu(activated) * (gate + 1)
    output = _grouped(inner, down, down_scale, ends)
    if adapters is not None:
        output = output + _grouped_low_rank(inner, adapters.down, adapters.slots[tokens], ends)
    # Every token has the same number of pairs, so restoring the order and summing needs no atomic additions.
    places = torch.empty_like(output).index_copy_(0, order, output)
    shares = places.unflatten(0, (-1, experts_per_token)).float() * weights[..., None].float()
    return shares.sum(dim=1).to(hidden.dtype)


def _has_grouped_products(hidden: Tensor, up: Tensor, adapters: ExpertAdapters | None) -> bool:
    if hidden.dtype != torch.bfloat16 or up.dtype == torch.uint8:
        return False
    _, both_inner, dim = up.shape
    if adapters is not None and any(
        (low_rank.a.shape[0] * low_rank.a.shape[2]) % _BFLOAT16_MULTIPLE for low_rank in adapters[:2]
    ):
        return False
    if DeviceLimits.of(hidden.device).capability not in _WITH_GROUPED_PRODUCTS:
        return False
    if up.dtype == FLOAT8:
        return hidden.is_cuda and has_float8_product(dim, both_inner // 2)
    return dim % _BFLOAT16_MULTIPLE == (both_inner // 2) % _BFLOAT16_MULTIPLE == 0


def _grouped(rows: Tensor, stack: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
    """Rows up to ends[e] times the transpose of stack[e]."""
    if scale is None:
        return torch.ops.aten._grouped_mm(rows, stack.transpose(1, 2), offs=ends)
    quantised, row_scale = quantise_rows(rows)
    return torch.ops.aten._scaled_grouped_mm(
        quantised,
        stack.transpose(1, 2),
        row_scale[:, 0],
        scale,
        offs=ends,
        out_dtype=rows.dtype,
        use_fast_accum=True,
    )


def _grouped_low_rank(rows: Tensor, weights: LowRank, slots: Tensor, ends: Tensor) -> Tensor:
    """Returns the low-rank terms of the rows up to ends[e], which belong to expert e; slots: int64 [rows]."""
    num_slots = len(weights.a)
    a, b = (part.transpose(0, 1).flatten(1, 2) for part in weights[:2])  # [E, S * R, in] and [E, S * R, out]
    inner = torch.ops.aten._grouped_mm(rows, a.transpose(1, 2), offs=ends)
    return torch.ops.aten._grouped_mm(of_own_slot(inner, num_slots, slots), b, offs=ends)


def _dense(
    hidden: Tensor,
    chosen: Tensor,  # [T, choices]
    weights: Tensor,  # [T, choices]
    up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None],
    adapters: ExpertAdapters | None,
) -> Tensor:
    """Every expert computes every token; results count where the expert was chosen."""
    total = torch.zeros_like(hidden)
    for expert in range(up[0].shape[0]):
        product = linear(hidden, weight_of_expert(*up, expert, hidden))
        if adapters is not None:
            add_low_rank(product, hidden, adapters.up.of_expert(expert), adapters.slots)
        activated, gate = product.chunk(2, dim=-1)
        inner = gelu(activated) * (gate + 1)
        output = linear(inner, weight_of_expert(*down, expert, inner))
        if adapters is not None:
            add_low_rank(output, inner, adapters.down.of_expert(expert), adapters.slots)
        share = (weights * (chosen == expert)).sum(dim=-1, keepdim=True)
        # Results of experts that were not chosen are replaced by 0: infinity times 0 would be NaN.
        total += torch.where(share > 0, output * share, 0)
    return total
