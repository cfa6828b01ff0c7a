"""Rows of a paged key/value cache, in the model's type or in float8 with one scale for all of them."""

import torch
from torch import Tensor


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
) -> Tensor:  # [B, G, n * S, D] of `dtype`
    """The contexts in the pages of each row of the table, in the order of its entries."""
    raw = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
    rows = raw[page_table.long()].view(pages.dtype).transpose(1, 2).flatten(2, 3)
    return rows.to(dtype) if scale is None else (rows.float() * scale).to(dtype)
