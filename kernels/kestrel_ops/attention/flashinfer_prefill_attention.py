"""Computes attention of packed prompt chunks by FlashInfer, over pages that hold the chunks' own keys as well.

Each query sees the positions before it and a range of its own, which here begins at 0 and ends where the query's
view ends.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kestrel_ops.attention.flashinfer_plans import (
    USES_DEPENDENT_LAUNCH,
    PagedContexts,
    StepOfPlan,
    flashinfer,
    sums_from_zero,
    unsupported_attention,
    workspace,
)
from kestrel_ops.shapes import ModelShape


def prefill_attention(
    query: Tensor,  # [T, H, D]: the chunks of all sequences, one after the other
    key: Tensor,  # [T, G, D]: not read; the chunks' own keys and values are in the pages
    value: Tensor,  # [T, G, D]: not read
    key_pages: Tensor,  # [P, G, S, D] in the type of `query` or float8_e4m3fn
    value_pages: Tensor,  # [P, G, S, D], likewise
    page_table: Tensor,  # [B, most pages] int32; the same tensor for all layers of a step, and for no other step
    query_starts: Tensor,  # [B + 1] int32: first packed row of each chunk, from 0 on; later rows are padding
    lengths: Tensor,  # [B] int32: positions of each sequence up to its chunk's end
    visible_until: Tensor,  # [T] int32: the row attends to the positions below it; position + 1, or its span's end
    max_chunk: int,  # tokens of the longest chunk; not needed here
    key_scale: Tensor | None = None,  # [1] float32: multiplies what `key_pages` holds
    value_scale: Tensor | None = None,  # [1] float32
) -> Tensor:  # [T, H, D], contiguous
    """Computes attention of packed prompt chunks, whose keys and values `rotary_write_kv` has stored.

    Differs from `reference.prefill_attention` in that a chunk's own keys are read as stored, in float8 where the
    pages are. Waits for the device at the first layer of a step. Padding rows of the result are undefined.
    """
    prefills = _prefills(query.device, query.dtype, key_pages.dtype, query.shape[2])
    if not prefills.step.is_of(page_table, lengths, visible_until):
        prefills.plan(query, key_pages, page_table, query_starts, lengths, visible_until)
    return prefills.attended(query, key_pages, value_pages, key_scale, value_scale)


class _Prefills:
    """Attention of prompts on one device, with queries and pages of one type."""

    def __init__(self, device: torch.device, dtype: torch.dtype, page_dtype: torch.dtype, head_dim: int) -> None:
        """Compiles the kernels, or loads what is compiled."""
        self._wrapper = flashinfer().BatchPrefillWithCausalBidirectionalRangesWrapper(
            workspace(device),
            "HND",
            q_data_type=dtype,
            kv_data_type=page_dtype,
            head_dim_qk=head_dim,
            head_dim_vo=head_dim,
        )
        self.step = StepOfPlan()
        self._ranges = torch.empty(0, 2, dtype=torch.int32, device=device)

    def plan(
        self,
        query: Tensor,
        key_pages: Tensor,
        page_table: Tensor,
        query_starts: Tensor,
        lengths: Tensor,
        visible_until: Tensor,
    ) -> None:
        """Plans the attention of all layers of a step."""
        num_groups, page_size, head_dim = key_pages.shape[1:]
        numbers = torch.cat((query_starts, lengths, page_table.flatten())).cpu()  # waits for the device once
        starts, ends, table = numbers.split((len(query_starts), len(lengths), page_table.numel()))
        counts = starts.diff()
        has_rows = counts > 0  # other chunks are padding
        if has_rows.any():
            contexts = PagedContexts.of(table.view(page_table.shape)[has_rows], ends[has_rows], page_size)
            self._wrapper.plan(
                sums_from_zero(counts[has_rows]),
                contexts.starts,
                contexts.pages,
                contexts.last_lengths,
                query.shape[1],
                num_groups,
                head_dim,
                page_size,
            )
        last = visible_until[: int(starts[-1])] - 1
        self._ranges = torch.stack((torch.zeros_like(last), last), dim=1)
        self.step.set_to(page_table, lengths, visible_until)

    def attended(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        key_scale: Tensor | None,
        value_scale: Tensor | None,
    ) -> Tensor:
        """Computes the attention of a layer of the step that was planned."""
        num_rows = len(self._ranges)
        rows = query[:num_rows]
        if key_scale is not None:
            rows = (rows.float() * key_scale).to(query.dtype)
        result = query.new_empty(query.shape)
        if num_rows:
            attended = self._wrapper.run(
                rows.contiguous(), (key_pages, value_pages), self._ranges, enable_pdl=USES_DEPENDENT_LAUNCH
            )
            result[:num_rows] = attended if value_scale is None else attended * value_scale
        return result


@functools.cache
def _prefills(device: torch.device, dtype: torch.dtype, page_dtype: torch.dtype, head_dim: int) -> _Prefills:
    return _Prefills(device, dtype, page_dtype, head_dim)


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model, or None if it can."""
    return unsupported_attention(model, model.dtype)


def prepare(model: ModelShape) -> None:
    """Compiles and loads the kernels of a model's prompts, by attention of one token."""
    text = model.text
    if text is None:
        return
    device = torch.empty(0, device=model.device_type).device
    query = torch.zeros(1, text.num_heads, text.head_dim, dtype=model.dtype, device=device)
    pages = torch.zeros(1, text.num_kv_heads, text.page_size, text.head_dim, device=device).to(text.cache_dtype)
    ones = torch.ones(1, dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    own = query[:, : text.num_kv_heads]
    prefill_attention(query, own, own, pages, pages, ones[None] - 1, starts, ones, ones, 1)
