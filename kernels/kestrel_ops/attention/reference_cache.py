"""The pages of the key-value cache, and the rotary embedding of the keys that are written to them."""

import torch
from torch import Tensor

from kestrel_ops.norms.reference import widened


def store_rows(
    rows: Tensor,  # [T, G, D]
    pages: Tensor,  # [P, G, S, D], written in place
    slots: Tensor,  # [T] int64: page * S + place in the page; a negative slot stores nothing
    scale: Tensor | None,  # one element, float32, where the pages are float8: stored = row / scale, saturating
) -> None:
    """Write row t of `rows` to slot `slots[t]`, unless that is negative."""
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
    """The contexts in the pages of each row of the table, in the order of its entries."""
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
    return contexts.to(dtype) if scale is None else (widened(contexts) * scale).to(dtype)


def write_kv(
    key: Tensor,  # [T, G, D]
    value: Tensor,  # [T, G, D]
    key_pages: Tensor,  # [P, G, S, D], written in place
    value_pages: Tensor,  # [P, G, S, D], written in place
    slots: Tensor,  # [T] int64: page * S + place in the page; a negative slot stores nothing
    key_scale: Tensor | None = None,  # one element, float32, where the pages are float8: stored = key / scale
    value_scale: Tensor | None = None,
) -> None:
    """Write row t of `key` and `value` to slot `slots[t]`, unless that is negative.

    Values beyond the range of float8 become its largest number.
    """
    store_rows(key, key_pages, slots, key_scale)
    store_rows(value, value_pages, slots, value_scale)


def rotary(
    heads: Tensor,  # [T, H, D]
    cosine: Tensor,  # [T, R / 2] float32
    sine: Tensor,  # [T, R / 2] float32
) -> Tensor:  # [T, H, D], dtype of `heads`
    """Rotate dimensions i and i + R/2 of the first R by the angle of dimension i; the others are unchanged.

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
