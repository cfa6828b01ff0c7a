"""One token of each sequence: rotary embedding, storing in the cache, and attention to all positions so far."""

import torch
from torch import Tensor

from kestrel_ops.reference.decode_attention import decode_attention
from kestrel_ops.reference.pages import store_rows
from kestrel_ops.reference.rotary import rotary

WAITS_FOR_DEVICE = True
"""Reads the number of rows on the host: no graph can capture it."""


def rotary_decode_attention(
    qkv: Tensor,  # [B, (H + 2 * G) * D] of any floating type: queries, keys, values
    positions: Tensor,  # [B] int32 or int64: the token's position, which is how many are cached; negative: no token
    cosine: Tensor,  # [longest context, R / 2] float32
    sine: Tensor,  # [longest context, R / 2] float32
    key_pages: Tensor,  # [P, G, S, D], written in place
    value_pages: Tensor,  # [P, G, S, D], written in place
    page_table: Tensor,  # [B, most pages of a sequence] int32; entries past a sequence's end are any valid page
    out: Tensor,  # [B, H * D] of any floating type, rows may be strided, written
    key_scale: Tensor | None,  # one element, float32, where the pages are float8: key = stored * scale
    value_scale: Tensor | None,
    query_scale: Tensor | None,  # [B, H]: multiplies queries before the rotation
    value_factor: Tensor | None,  # [B, G]: multiplies values before they are stored
    partials: Tensor,  # [B, H, most parts, D + 2] float32: workspace, one entry per part of a context
    counters: Tensor,  # [B, H] int32: workspace, 0 before and after
) -> None:
    """Write the token's key and value to its place and attend to all positions up to it, with scale 1 / sqrt(D).

    The token's own key and value are used as stored in the cache. A row without a token writes nothing; its result
    is 0.
    """
    num_groups, page_size, head_dim = key_pages.shape[1:]
    groups = num_groups * head_dim
    out.zero_()
    rows = torch.nonzero(positions >= 0)[:, 0]
    if len(rows) == 0:
        return
    own, table = positions[rows].long(), page_table[rows].long()
    parts = qkv[rows].float().split((qkv.shape[1] - 2 * groups, groups, groups), dim=1)
    query, key, value = (part.unflatten(1, (-1, head_dim)) for part in parts)
    if query_scale is not None:
        query = query * query_scale[rows, :, None].float()
    if value_factor is not None:
        value = value * value_factor[rows, :, None].float()
    slots = table.gather(1, own[:, None] // page_size)[:, 0] * page_size + own % page_size
    store_rows(rotary(key, cosine[own], sine[own]), key_pages, slots, key_scale)
    store_rows(value, value_pages, slots, value_scale)
    attended = decode_attention(
        rotary(query, cosine[own], sine[own]),
        key_pages,
        value_pages,
        table,
        own + 1,
        key_scale,
        value_scale,
    )
    out[rows] = attended.flatten(1).to(out.dtype)
