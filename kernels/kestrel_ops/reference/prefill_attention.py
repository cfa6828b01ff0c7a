"""Attention of packed prompt chunks over the pages of their contexts."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def prefill_attention(
    query: Tensor,  # [T, H, D]: the chunks of all sequences, one after the other
    key_pages: Tensor,  # [P, G, S, D], the chunks' own keys already written
    value_pages: Tensor,  # [P, G, S, D]
    page_tables: list[Tensor],  # per sequence [its pages] int64
    chunks: list[tuple[int, int]],  # per sequence: the positions [start, end) that its queries hold
    prefix_lengths: list[int],  # per sequence: positions that see each other both ways; 0 for plain causal
) -> Tensor:  # [T, H, D]
    """Position i attends to every position up to i, and within the prefix to all of the prefix.

    A chunk that begins inside the prefix must reach its end: the prefix is one indivisible block.
    """
    num_groups = key_pages.shape[1]
    attended = torch.empty_like(query)
    offset = 0
    for pages, (start, end), prefix_length in zip(page_tables, chunks, prefix_lengths, strict=True):
        rows = slice(offset, offset + end - start)
        key = key_pages[pages].transpose(0, 1).flatten(1, 2)[None, :, :end]  # [1, G, end, D]
        value = value_pages[pages].transpose(0, 1).flatten(1, 2)[None, :, :end]
        places = torch.arange(end, device=query.device)
        queries = places[start:, None]
        mask = (places <= queries) | ((places < prefix_length) & (queries < prefix_length))
        attended[rows] = scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None],
            key,
            value,
            attn_mask=mask,
            enable_gqa=query.shape[1] != num_groups,
        )[0].transpose(0, 1)
        offset = rows.stop
    return attended
