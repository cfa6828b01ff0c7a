"""Defines attention to crops and paged caches, rotary embedding, and writes of keys and values in plain torch."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention

from kestrel_ops.norms.reference import quantised_to_float8, to_float32


def store_rows(
    rows: Tensor,  # [T, G, D]
    pages: Tensor,  # [P, G, S, D], written in place
    slots: Tensor,  # [T] int64: page * S + place in the page; a negative slot stores nothing
    scale: Tensor | None,  # one element, float32, where the pages are float8: stored = row / scale, saturating
) -> None:
    """Writes row t of `rows` to slot `slots[t]`, unless that is negative."""
    rows, slots = rows[slots >= 0], slots[slots >= 0]
    if scale is not None:
        largest = torch.finfo(pages.dtype).max
        rows = (rows.float() / scale).clamp(-largest, largest)
    page_size = pages.shape[2]
    stored = rows.to(pages.dtype)
    if pages.dtype.itemsize == 1:  # torch cannot write parts of float8 tensors
        stored, pages = stored.view(torch.uint8), pages.view(torch.uint8)
    pages[slots // page_size, :, slots % page_size] = stored


def gather_rows(
    pages: Tensor,  # [P, G, S, D]
    page_table: Tensor,  # [B, n] integers
    scale: Tensor | None,  # as in `store_rows`
    dtype: torch.dtype,
    lengths: Tensor | None = None,  # [B] int64, at least 1: places from there on repeat the first one
) -> Tensor:  # [B, G, n * S, D] of `dtype`
    """Returns the contexts in the pages of each row of the table, in the order of its entries."""
    num_groups, page_size, head_dim = pages.shape[1:]
    # Rows of a matrix, in the order of the result: on the host to index dimensions and to transpose takes longer.
    places = torch.arange(page_size, device=pages.device)
    rows = (page_table.long()[:, :, None] * (num_groups * page_size) + places).flatten(1)  # [B, n * S]
    if lengths is not None:
        is_within = torch.arange(rows.shape[1], device=pages.device) < lengths[:, None]
        rows = torch.where(is_within, rows, rows[:, :1])
    rows = rows[:, None] + torch.arange(num_groups, device=pages.device)[:, None] * page_size  # [B, G, n * S]
    raw = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
    contexts = raw.view(-1, head_dim).index_select(0, rows.flatten()).view(pages.dtype).view(*rows.shape, head_dim)
    return contexts.to(dtype) if scale is None else (to_float32(contexts) * scale).to(dtype)


def write_kv(
    key: Tensor,  # [T, G, D]
    value: Tensor,  # [T, G, D]
    key_pages: Tensor,  # [P, G, S, D], written in place
    value_pages: Tensor,  # [P, G, S, D], written in place
    slots: Tensor,  # [T] int64: page * S + place in the page; a negative slot stores nothing
    key_scale: Tensor | None = None,  # one element, float32, where the pages are float8: stored = key / scale
    value_scale: Tensor | None = None,
) -> None:
    """Writes row t of `key` and `value` to slot `slots[t]`, unless that is negative.

    Values beyond the range of float8 become its largest number.
    """
    store_rows(key, key_pages, slots, key_scale)
    store_rows(value, value_pages, slots, value_scale)


def rotary(
    heads: Tensor,  # [T, H, D]
    cosine: Tensor,  # [T, R / 2] float32
    sine: Tensor,  # [T, R / 2] float32
) -> Tensor:  # [T, H, D], dtype of `heads`
    """Rotates dimensions i and i + R/2 of the first R by the angle of dimension i; the others are unchanged.

    Computed in float32. The public reference interleaves the rotated pairs. Here both halves keep their places:
    queries and keys are permuted in the same way, so their products do not change.
    """
    half = cosine.shape[-1]
    cosine, sine = cosine[:, None, :], sine[:, None, :]
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    rotated = torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
    return torch.cat((rotated.to(heads.dtype), heads[..., 2 * half :]), dim=-1)


def rotary_write_kv(
    qkv: Tensor,  # [T, (H + 2 * G) * D], rows may be strided; rotated in place
    positions: Tensor,  # [T] int64
    cosine: Tensor,  # [longest context, R / 2] float32
    sine: Tensor,  # [longest context, R / 2] float32
    key_pages: Tensor,  # [P, G, S, D] in the type of `qkv` or float8_e4m3fn, written in place
    value_pages: Tensor,  # [P, G, S, D], likewise
    slots: Tensor,  # [T] int64: page * S + place in the page; tokens with a negative one are not stored
    key_scale: Tensor | None = None,  # [1] float32: factor of stored keys when they are read
    value_scale: Tensor | None = None,  # [1] float32
    query_scale: Tensor | None = None,  # [T, H]: multiplies queries before the rotation
    value_factor: Tensor | None = None,  # [T, G]: multiplies values before they are stored
) -> tuple[Tensor, Tensor, Tensor]:  # query [T, H, D], key [T, G, D], value [T, G, D]: views of `qkv`
    """Rows of `qkv` hold queries, keys and values; see `rotary` for the rotation. Computed in float32.

    Float8 pages have scales: stored values are divided by them and clipped to the largest float8 value.
    """
    num_groups, head_dim = key_pages.shape[1], key_pages.shape[3]
    key_value = num_groups * head_dim
    parts = qkv.split((qkv.shape[1] - 2 * key_value, key_value, key_value), dim=1)
    query, key, value = (part.unflatten(1, (-1, head_dim)) for part in parts)
    turned = query.float()
    if query_scale is not None:
        turned = turned * query_scale[..., None].float()
    cosine, sine = cosine[positions], sine[positions]
    query.copy_(rotary(turned, cosine, sine))
    key.copy_(rotary(key.float(), cosine, sine))
    if value_factor is not None:
        value.copy_(value.float() * value_factor[..., None].float())
    store_rows(key, key_pages, slots, key_scale)
    store_rows(value, value_pages, slots, value_scale)
    return query, key, value


def decode_attention(
    query: Tensor,  # [B, H, D]
    key_pages: Tensor,  # [P, G, S, D]
    value_pages: Tensor,  # [P, G, S, D]
    page_table: Tensor,  # [B, most pages of a sequence] integers; entries past a sequence's end are any valid page
    lengths: Tensor,  # [B] int64: positions to attend to, the new token's own included
    key_scale: Tensor | None = None,  # one element, float32, where the pages are float8: key = stored * scale
    value_scale: Tensor | None = None,
) -> Tensor:  # [B, H, D]
    """Computes attention: row b attends to the first `lengths[b]` positions of its pages, with scale 1 / sqrt(D).

    Other positions of its pages have no effect, even if they contain NaN.
    """
    num_sequences, num_heads, head_dim = query.shape
    # A masked value still counts as 0 times itself, which NaN is not: the first position takes its place.
    key = gather_rows(key_pages, page_table, key_scale, query.dtype, lengths)  # [B, G, context, D]
    value = gather_rows(value_pages, page_table, value_scale, query.dtype, lengths)
    mask = (torch.arange(key.shape[2], device=query.device) < lengths[:, None])[:, None, None, :]
    attended = scaled_dot_product_attention(
        query[:, :, None, :], key, value, attn_mask=mask, enable_gqa=num_heads != key.shape[1]
    )
    return attended.reshape(num_sequences, num_heads, head_dim)


def prefill_attention(
    query: Tensor,  # [T, H, D]: the chunks of all sequences, one after the other; any strides over T
    key: Tensor,  # [T, G, D]: the chunks' own keys
    value: Tensor,  # [T, G, D]
    key_pages: Tensor,  # [P, G, S, D] in the type of `query` or float8_e4m3fn; read before a chunk's start alone
    value_pages: Tensor,  # [P, G, S, D], likewise
    page_table: Tensor,  # [B, most pages] int32; entries past a sequence's end are any valid page
    query_starts: Tensor,  # [B + 1] int32: first packed row of each chunk; rows after the last are padding
    lengths: Tensor,  # [B] int32: positions of each sequence up to its chunk's end
    visible_until: Tensor,  # [T] int32: the row attends to the positions below it; position + 1, or its span's end
    max_chunk: int,  # tokens of the longest chunk
    key_scale: Tensor | None = None,  # [1] float32: multiplies what `key_pages` holds
    value_scale: Tensor | None = None,  # [1] float32
) -> Tensor:  # [T, H, D], contiguous
    """Computes attention: every position attends to itself and those before it, and within a span, as that of an
    image, to all of the span.

    The last row of chunk b has position lengths[b] - 1. No span is divided: `visible_until` is at most lengths[b]
    in chunk b, and never falls within it. The scale of the scores is 1 / sqrt(D). Padding rows of the result, and
    their `visible_until`, are undefined.
    """
    attended = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    starts = query_starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        rows = slice(starts[row], starts[row + 1])
        start = length - (rows.stop - rows.start)
        table = page_table[row : row + 1, : -(-start // key_pages.shape[2])]
        before = gather_rows(key_pages, table, key_scale, key.dtype)[0, :, :start]
        keys = torch.cat((before, key[rows].transpose(0, 1)), dim=1)  # [G, length, D]
        before = gather_rows(value_pages, table, value_scale, value.dtype)[0, :, :start]
        values = torch.cat((before, value[rows].transpose(0, 1)), dim=1)
        mask = torch.arange(length, device=query.device) < visible_until[rows, None]
        attended[rows] = scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            enable_gqa=query.shape[1] != key.shape[1],
        )[0].transpose(0, 1)
    return attended


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
    """Writes the token's key and value to its place and attends to all positions up to it, with scale 1 / sqrt(D).

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


def crop_attention(
    packed: Tensor,  # [N * patches, 3 * H * D]: queries, keys and values side by side
    num_patches: int,
    num_heads: int,
    out_scale: float | None = None,
    crop_by_crop: bool = False,
) -> Tensor:  # [N * patches, H * D] in the type of `packed`, or float8_e4m3fn with an `out_scale`
    """Computes softmax(query @ key.T / sqrt(D)) @ value of each crop and head, computed in float32.

    With `out_scale` the result is divided by it and rounded to float8; larger values are clipped. With
    `crop_by_crop` a crop has the same bits among any number of crops.
    """
    if crop_by_crop:
        crops = packed.split(num_patches)
        return torch.cat([crop_attention(crop, num_patches, num_heads, out_scale) for crop in crops])
    query, key, value = (
        packed.float().view(-1, num_patches, 3, num_heads, packed.shape[1] // (3 * num_heads)).unbind(2)
    )
    scores = torch.einsum("nqhd,nkhd->nhqk", query, key) * query.shape[-1] ** -0.5
    attended = torch.einsum("nhqk,nkhd->nqhd", scores.softmax(dim=-1), value).reshape(len(packed), -1)
    return attended.to(packed.dtype) if out_scale is None else quantised_to_float8(attended / out_scale)


def tau_scales(
    packed: Tensor,  # [T, W]: query, key and value before their rotation; rows may be strided
    positions: Tensor,  # [T] int32 or int64, counted from 0; negative ones count as 0
    query_weight: Tensor,  # [H, W]
    value_weight: Tensor,  # [H, W]
    alpha: Tensor,  # [H]
) -> tuple[Tensor, Tensor]:  # [T, H] each, of the type of the weights: for queries and for values
    """Computes tanh(weight @ gelu(packed)) + sigmoid(alpha * ln(position + 1)) + 1/2; the GELU is the exact
    (erf) form."""
    activated = gelu(packed.to(query_weight.dtype))
    by_position = tau_positions(alpha, positions)
    query_scale = torch.tanh((activated @ query_weight.T).float()) + by_position
    value_scale = torch.tanh((activated @ value_weight.T).float()) + by_position
    return query_scale.to(query_weight.dtype), value_scale.to(query_weight.dtype)


def tau_positions(alpha: Tensor, positions: Tensor) -> Tensor:
    """Returns the position term of tau attention, sigmoid(alpha * ln(p + 1)) + 1/2: [tokens, heads], float32.

    alpha: [heads]; positions: [tokens], counted from 0. At position 0 it is 1 for any alpha.
    """
    steps = (positions.clamp(min=0) + 1).float().log()
    return torch.sigmoid(alpha.float()[None, :] * steps[:, None]) + 0.5
