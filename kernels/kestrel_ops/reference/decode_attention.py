"""Attention of one new token per sequence over the pages of its context."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kestrel_ops.reference.pages import gather_rows


def decode_attention(
    query: Tensor,  # [B, H, D]
    key_pages: Tensor,  # [P, G, S, D]
    value_pages: Tensor,  # [P, G, S, D]
    page_table: Tensor,  # [B, most pages of a sequence] integers; entries past a sequence's end are any valid page
    lengths: Tensor,  # [B] int64: positions to attend to, the new token's own included
    key_scale: Tensor | None = None,  # one element, float32, where the pages are float8: key = stored * scale
    value_scale: Tensor | None = None,
) -> Tensor:  # [B, H, D]
    """Row b attends to the first `lengths[b]` positions of its pages, with scale 1 / sqrt(D).

    Other positions of its pages have no effect, even if they contain NaN.
    """
    num_sequences, num_heads, head_dim = query.shape
    key = gather_rows(key_pages, page_table, key_scale, query.dtype)  # [B, G, context, D]
    value = gather_rows(value_pages, page_table, value_scale, query.dtype)
    places = torch.arange(key.shape[2], device=query.device)
    mask = (places < lengths[:, None])[:, None, None, :]  # [B, 1, 1, context]
    outside = ~mask.mT  # [B, 1, context, 1]
    key, value = key.masked_fill(outside, 0), value.masked_fill(outside, 0)
    attended = scaled_dot_product_attention(
        query[:, :, None, :], key, value, attn_mask=mask, enable_gqa=num_heads != key.shape[1]
    )
    return attended.reshape(num_sequences, num_heads, head_dim)
