"""Attention of packed prompt chunks over their own keys and the pages of the context before them."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kestrel_ops.reference.pages import gather_rows

WAITS_FOR_DEVICE = True
"""Reads the number of rows on the host: no graph can capture it."""


def prefill_attention(
    query: Tensor,  # [T, H, D]: the chunks of all sequences, one after the other; any strides over T
    key: Tensor,  # [T, G, D]: the chunks' own keys
    value: Tensor,  # [T, G, D]
    key_pages: Tensor,  # [P, G, S, D] in the type of `query` or float8_e4m3fn; read before a chunk's start alone
    value_pages: Tensor,  # [P, G, S, D], likewise
    page_table: Tensor,  # [B, most pages] int32; entries past a sequence's end are any valid page
    query_starts: Tensor,  # [B + 1] int32: first packed row of each chunk; rows after the last are padding
    lengths: Tensor,  # [B] int32: positions of each sequence up to its chunk's end
    prefix_lengths: Tensor,  # [B] int32: positions with bidirectional attention; 0 for causal attention
    max_chunk: int,  # tokens of the longest chunk
    key_scale: Tensor | None = None,  # [1] float32: multiplies what `key_pages` holds
    value_scale: Tensor | None = None,  # [1] float32
) -> Tensor:  # [T, H, D], contiguous
    """Position i attends to every position up to i, and within the prefix to all of the prefix.

    The last row of chunk b has position lengths[b] - 1. A chunk that begins inside the prefix must reach its end:
    the prefix is never divided. The scale of the scores is 1 / sqrt(D). Padding rows of the result are undefined.
    """
    attended = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    starts = query_starts.tolist()
    for row, (length, prefix_length) in enumerate(zip(lengths.tolist(), prefix_lengths.tolist(), strict=True)):
        rows = slice(starts[row], starts[row + 1])
        start = length - (rows.stop - rows.start)
        table = page_table[row : row + 1, : -(-start // key_pages.shape[2])]
        before = gather_rows(key_pages, table, key_scale, key.dtype)[0, :, :start]
        keys = torch.cat((before, key[rows].transpose(0, 1)), dim=1)  # [G, length, D]
        before = gather_rows(value_pages, table, value_scale, value.dtype)[0, :, :start]
        values = torch.cat((before, value[rows].transpose(0, 1)), dim=1)
        places = torch.arange(length, device=query.device)
        queries = places[start:, None]
        mask = (places <= queries) | ((places < prefix_length) & (queries < prefix_length))
        attended[rows] = scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            enable_gqa=query.shape[1] != key.shape[1],
        )[0].transpose(0, 1)
    return attended
