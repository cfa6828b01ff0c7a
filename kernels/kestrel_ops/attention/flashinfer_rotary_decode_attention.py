"""Computes attention of one new token per sequence by FlashInfer, after `rotary_write_kv` has stored the token."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kestrel_ops.attention.flashinfer_plans import (
    USES_DEPENDENT_LAUNCH,
    PagedContexts,
    StepOfPlan,
    flashinfer,
    unsupported_attention,
    workspace,
)
from kestrel_ops.attention.triton_rotary_write_kv import rotary_write_kv
from kestrel_ops.attention.triton_rotary_write_kv import unsupported as cannot_write
from kestrel_ops.compilation.triton_compilations import only_compiles
from kestrel_ops.shapes import FLOAT8, ModelShape

LAUNCHES_TRITON = True  # where it rotates and stores
_FEWEST_HEADS_OF_TENSOR_CORES = 4
"""Query heads of a key/value head from which on FlashInfer's kernel for tensor cores is chosen."""


def rotary_decode_attention(
    qkv: Tensor,  # [B, (H + 2 * G) * D]: queries, keys, values; rotated in place
    positions: Tensor,  # [B] int32 or int64: the token's position, which is how many are cached; negative: no token
    cosine: Tensor,  # [longest context, R / 2] float32
    sine: Tensor,  # [longest context, R / 2] float32
    key_pages: Tensor,  # [P, G, S, D] in the type of `qkv` or float8_e4m3fn, written in place
    value_pages: Tensor,  # [P, G, S, D], likewise
    page_table: Tensor,  # [B, most pages] int32; the same tensor for all layers of a step, and for no other step
    out: Tensor,  # [B, H * D] of any floating type, rows may be strided, written
    key_scale: Tensor | None,  # one element, float32, where the pages are float8: key = stored * scale
    value_scale: Tensor | None,
    query_scale: Tensor | None,  # [B, H]: multiplies queries before the rotation
    value_factor: Tensor | None,  # [B, G]: multiplies values before they are stored
    partials: Tensor,  # not needed here
    counters: Tensor,  # not needed here
) -> None:
    """Writes the token's key and value to its place and attends to all positions up to it.

    Same contract as `reference.rotary_decode_attention`, in the type of `qkv`. Waits for the device at the first
    layer of a step.
    """
    head_dim = key_pages.shape[3]
    if only_compiles():
        known = positions.long()
        scales = (key_scale, value_scale, query_scale, value_factor)
        rotary_write_kv(qkv, known, cosine, sine, key_pages, value_pages, known, *scales)
        return
    num_groups = key_pages.shape[1]
    num_heads = qkv.shape[1] // head_dim - 2 * num_groups
    uses_tensor_cores = num_heads >= _FEWEST_HEADS_OF_TENSOR_CORES * num_groups
    decodes = _decodes(qkv.device, uses_tensor_cores)
    if not decodes.step.is_of(page_table, positions):
        decodes.plan(qkv.dtype, num_heads, key_pages, positions, page_table)
    query, _, _ = rotary_write_kv(
        qkv,
        decodes.known,
        cosine,
        sine,
        key_pages,
        value_pages,
        decodes.slots,
        key_scale,
        value_scale,
        query_scale,
        value_factor,
    )
    out.copy_(decodes.attended(query, key_pages, value_pages, key_scale, value_scale))


class _Decodes:
    """Attention of new tokens on one device."""

    def __init__(self, device: torch.device, *, uses_tensor_cores: bool) -> None:
        self._wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(
            workspace(device), "HND", use_tensor_cores=uses_tensor_cores
        )
        self.step = StepOfPlan()
        self.known = self.slots = torch.empty(0, dtype=torch.int64, device=device)
        self._has_token = torch.empty(0, 1, dtype=torch.bool, device=device)

    def plan(
        self, dtype: torch.dtype, num_heads: int, key_pages: Tensor, positions: Tensor, page_table: Tensor
    ) -> None:
        """Plans the attention of all layers of a step. A row without a token attends to one position."""
        num_groups, page_size, head_dim = key_pages.shape[1:]
        self.known = known = positions.long().clamp(min=0)
        pages = page_table.gather(1, (known // page_size)[:, None])[:, 0].long()
        self.slots = torch.where(positions >= 0, pages * page_size + known % page_size, -1)
        self._has_token = (positions >= 0)[:, None]
        numbers = torch.cat((known.int()[:, None] + 1, page_table), dim=1).cpu()  # waits for the device once
        contexts = PagedContexts.of(numbers[:, 1:], numbers[:, 0], page_size)
        self._wrapper.plan(
            contexts.starts,
            contexts.pages,
            contexts.last_lengths,
            num_heads,
            num_groups,
            head_dim,
            page_size,
            q_data_type=dtype,
            kv_data_type=key_pages.dtype,
        )
        self.step.set_to(page_table, positions)

    def attended(
        self,
        query: Tensor,  # [B, H, D]
        key_pages: Tensor,
        value_pages: Tensor,
        key_scale: Tensor | None,
        value_scale: Tensor | None,
    ) -> Tensor:  # [B, H * D]
        """Computes the attention of a layer of the step that was planned; 0 without a token."""
        if key_scale is not None:
            query = (query.float() * key_scale).to(query.dtype)
        attended = self._wrapper.run(
            query.contiguous(), (key_pages, value_pages), enable_pdl=USES_DEPENDENT_LAUNCH
        ).flatten(1)
        if value_scale is not None:
            attended = attended * value_scale
        return torch.where(self._has_token, attended, 0)


@functools.cache
def _decodes(device: torch.device, uses_tensor_cores: bool) -> _Decodes:
    return _Decodes(device, uses_tensor_cores=uses_tensor_cores)


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    return unsupported_attention(model, _query_dtype(model)) or cannot_write(model)


def prepare(model: ModelShape) -> None:
    """Compiles and loads the kernels of a model's decode steps, by attention of one token."""
    text = model.text
    if text is None:
        return
    device = torch.empty(0, device=model.device_type).device
    qkv = torch.zeros(1, text.qkv_dim, dtype=_query_dtype(model), device=device)
    pages = torch.zeros(1, text.num_kv_heads, text.page_size, text.head_dim, device=device).to(text.cache_dtype)
    angles, one = torch.zeros(1, text.rotary_dim // 2, device=device), torch.ones(1, device=device)
    scale = one if text.cache_dtype == FLOAT8 else None
    first = torch.zeros(1, dtype=torch.int64, device=device)
    out = torch.empty(1, text.num_heads * text.head_dim, dtype=qkv.dtype, device=device)
    rotary_decode_attention(
        *(qkv, first, angles, angles, pages, pages.clone(), first[None].int(), out),
        *(scale, scale, None, None, one, one),
    )


def _query_dtype(model: ModelShape) -> torch.dtype:
    """Returns the type of queries of decode steps, which is float16 where the weights are float8."""
    is_float8 = model.text is not None and model.text.weight_dtype == FLOAT8
    return torch.float16 if is_float8 else model.dtype
