"""Attention of one new token per sequence over the pages of its context."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def decode_attention(
    query: Tensor,  # [B, H, D]
    key_pages: Tensor,  # [P, S, G, D]
    value_pages: Tensor,  # [P, S, G, D]
    page_table: Tensor,  # [B, most pages of a sequence] int64; entries past a sequence's end are any valid page
    lengths: Tensor,  # [B] int64: positions to attend to, the new token's own included
) -> Tensor:  # [B, H, D]
    """Row b attends to the first `lengths[b]` positions of its pages, with scale 1 / sqrt(D)."""
    num_sequences, num_heads, head_dim = query.shape
    key = key_pages[page_table].flatten(1, 2).transpose(1, 2)  # [B, G, context, D]
    value = value_pages[page_table].flatten(1, 2).transpose(1, 2)
    places = torch.arange(key.shape[2], device=query.device)
    mask = (places < lengths[:, None])[:, None, None, :]  # [B, 1, 1, context]
    attended = scaled_dot_product_attention(
        query[:, :, None, :], key, value, attn_mask=mask, enable_gqa=num_heads != key.shape[1]
    )
    return attended.reshape(num_sequences, num_heads, head_dim)
