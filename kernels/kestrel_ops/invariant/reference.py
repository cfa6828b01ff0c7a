"""Operations that give a row the same bits in any batch and any division into steps, for `--deterministic`."""

import itertools

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kestrel_ops.attention.reference import gather_rows
from kestrel_ops.experts.reference import mixture_of_experts
from kestrel_ops.lora.reference import ExpertAdapters

_NUM_QUERIES = 16
_NUM_ITEMS = 8
_NUM_KEYS = 128
_BLOCK_ROWS = 16


def invariant_attention(
    query: Tensor,  # [T, H, D]: the chunks of all sequences, one after the other
    key_pages: Tensor,  # [P, G, S, D] in the type of `query` or float8_e4m3fn; the chunks' own keys are in them
    value_pages: Tensor,  # [P, G, S, D], likewise
    page_table: Tensor,  # [B, most pages] integers; entries past a sequence's end are any valid page
    query_starts: Tensor,  # [B + 1] int32: first packed row of each chunk; rows after the last are padding
    lengths: Tensor,  # [B] int32: positions of each sequence up to its chunk's end; not needed here
    visible_until: Tensor,  # [T] int32: the row attends to the positions below it; position + 1, or its span's end
    max_chunk: int,  # tokens of the longest chunk; not needed here
    key_scale: Tensor | None = None,  # [1] float32: multiplies what `key_pages` holds
    value_scale: Tensor | None = None,  # [1] float32
) -> Tensor:  # [T, H, D], contiguous
    """Computes `prefill_attention` with all keys read from the pages. A decoded token is a chunk of one.

    Keys are taken in blocks of 128 from position 0 on, with a running maximum and sum in float32. A block that a
    row does not see leaves its bits alone. All products have the same shape: 16 queries of a chunk by 128 keys, for
    8 such pieces at a time, filled up with nothing. Padding rows of the result are undefined.
    """
    num_heads, head_dim = query.shape[1:]
    attended = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    pieces = _pieces(query_starts.tolist())
    for first in range(0, len(pieces), _NUM_ITEMS):
        some = pieces[first : first + _NUM_ITEMS]
        queries = torch.zeros(_NUM_ITEMS, _NUM_QUERIES, num_heads, head_dim, device=query.device)
        visible = torch.ones(_NUM_ITEMS, _NUM_QUERIES, dtype=torch.int64, device=query.device)
        for place, (_, row, count) in enumerate(some):
            queries[place, :count] = query[row : row + count].float()
            visible[place, :count] = visible_until[row : row + count]
        chunks = torch.tensor([piece[0] for piece in some] + [some[0][0]] * (_NUM_ITEMS - len(some)))
        tables = page_table[chunks.to(query.device)].long()
        result = _attend(queries, visible, key_pages, value_pages, tables, key_scale, value_scale)
        for place, (_, row, count) in enumerate(some):
            attended[row : row + count] = result[place, :count].to(query.dtype)
    return attended


def invariant_attention_bytes(num_heads: int, head_dim: int, page_size: int) -> int:
    """Memory that a call takes in addition to its result: keys and values of a block as they are gathered, masked,
    spread over heads and transposed, and its scores, all of them float32."""
    num_keys = max(1, _NUM_KEYS // page_size) * page_size
    keys = 2 * 4 * num_keys * head_dim
    queries = _NUM_QUERIES * (6 * num_keys + 4 * head_dim)
    return _NUM_ITEMS * num_heads * (keys + queries) * torch.float32.itemsize


def _pieces(starts: list[int]) -> list[tuple[int, int, int]]:
    """Returns 16 rows of a chunk at a time: the chunk, the first packed row, how many rows."""
    return [
        (chunk, row, min(_NUM_QUERIES, end - row))
        for chunk, (start, end) in enumerate(itertools.pairwise(starts))
        for row in range(start, end, _NUM_QUERIES)
    ]


def _attend(
    queries: Tensor,  # [N, Q, H, D] float32
    visible: Tensor,  # [N, Q] int64: each query sees the positions below it, at least 1
    key_pages: Tensor,
    value_pages: Tensor,
    tables: Tensor,  # [N, most pages] int64
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> Tensor:  # [N, Q, H, D] float32
    num_pieces, num_queries, num_heads, head_dim = queries.shape
    num_groups, page_size = key_pages.shape[1:3]
    pages_per_block = max(1, _NUM_KEYS // page_size)
    num_keys = pages_per_block * page_size
    queries = (queries * head_dim**-0.5).transpose(1, 2).flatten(0, 1)  # [N * H, Q, D]
    highest = queries.new_full((len(queries), num_queries, 1), float("-inf"))
    total = torch.zeros_like(highest)
    weighted = torch.zeros_like(queries)
    limits = visible.repeat_interleave(num_heads, 0)[:, :, None]  # [N * H, Q, 1]
    longest = visible.amax(dim=1)[:, None]  # [N, 1]
    for first in range(0, int(visible.max()), num_keys):
        columns = torch.arange(first // page_size, first // page_size + pages_per_block, device=tables.device)
        own = tables[:, columns.clamp(max=tables.shape[1] - 1)]
        places = torch.arange(first, first + num_keys, device=tables.device)
        unseen = (places >= longest)[:, None, :, None]  # pages hold anything there, NaN as well
        keys, values = (
            gather_rows(pages, own, scale, torch.float32)
            .masked_fill(unseen, 0.0)
            .repeat_interleave(num_heads // num_groups, 1)
            .flatten(0, 1)
            for pages, scale in ((key_pages, key_scale), (value_pages, value_scale))
        )  # each [N * H, K, D]
        scores = torch.bmm(queries, keys.mT.contiguous()).masked_fill(places >= limits, float("-inf"))
        raised = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
        weights, shrink = (scores - raised).exp(), (highest - raised).exp()
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        weighted = weighted * shrink + torch.bmm(weights, values)
        highest = raised
    return (weighted / total).unflatten(0, (num_pieces, num_heads)).transpose(1, 2)


def invariant_linear(
    rows: Tensor,  # [..., in]
    weight: Tensor,  # [out, in]
    bias: Tensor | None = None,  # [out]
) -> Tensor:  # [..., out]
    """Computes `linear` in products of exactly 16 rows, the last of which is filled up with zeros.

    Libraries choose their kernels, and with them the order of their sums, by the number of rows. Here it is always
    the same. That the place of a row among the 16 does not matter either is a property of the library, which
    `kestrel_ops.depends_on_place` checks.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    result = flat.new_empty(len(flat), len(weight))
    for first in range(0, len(flat), _BLOCK_ROWS):
        block = flat[first : first + _BLOCK_ROWS]
        padded = pad(block, (0, 0, 0, _BLOCK_ROWS - len(block)))
        result[first : first + len(block)] = linear(padded, weight, bias)[: len(block)]
    return result.unflatten(0, rows.shape[:-1])


def invariant_experts(
    hidden: Tensor,  # [T, dim]
    router_logits: Tensor,  # [T, E]
    up: Tensor,  # [E, 2 * inner, dim]: first the activated half, then the gate half
    down: Tensor,  # [E, dim, inner]
    experts_per_token: int,
    up_scale: Tensor | None = None,  # [E, 2 * inner] float32, where `up` is float8
    down_scale: Tensor | None = None,  # [E, dim] float32, where `down` is float8
    adapters: ExpertAdapters | None = None,
    positions: Tensor | None = None,  # [T] int32 or int64: tokens at negative ones are padding
) -> Tensor:  # [T, dim]
    """`mixture_of_experts`, whose products are invariant in an `InvariantMode`. Takes no adapters."""
    assert adapters is None, "--deterministic takes no adapters"
    return mixture_of_experts(
        hidden, router_logits, up, down, experts_per_token, up_scale, down_scale, positions=positions
    )
