"""Where the tokens of several prompts stand when they are packed one after the other.

Knows positions, pages and rows; no keys, no model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel_runtime.sequence import Chunk
from kestrel_runtime.transfer import to_device


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Where the packed tokens of prompt chunks stand, and which pages they write and read."""

    positions: Tensor
    """[T] int64."""
    slots: Tensor
    """[T] int64: page * slots + place in the page."""
    page_table: Tensor
    """[B, most pages] int32; entries past a sequence's end are one of its pages."""
    query_starts: Tensor
    """[B + 1] int32: where each chunk begins in the packed rows."""
    lengths: Tensor
    """[B] int32: positions of each sequence up to its chunk's end."""
    prefix_lengths: Tensor
    """[B] int32: positions that see each other both ways."""
    max_chunk: int
    """Tokens of the longest chunk."""

    @classmethod
    def of(cls, chunks: Collection[Chunk], page_size: int, device: torch.device) -> PrefillPlan:
        """Lay out `chunks` one after the other; their sequences own the pages they need."""
        counts = [chunk.end - chunk.start for chunk in chunks]
        own_pages = [chunk.sequence.pages for chunk in chunks]
        most_pages = max(map(len, own_pages))
        table = torch.tensor([pages + pages[:1] * (most_pages - len(pages)) for pages in own_pages])
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        own_row = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        slots = table[own_row, positions // page_size] * page_size + positions % page_size
        ends = [chunk.end for chunk in chunks]
        prefixes = [chunk.sequence.prefix_length for chunk in chunks]
        # Laid out on the host, where tiny operations cost less, and sent without waiting for the device.
        return cls(
            positions=to_device(positions, torch.int64, device),
            slots=to_device(slots, torch.int64, device),
            page_table=to_device(table, torch.int32, device),
            query_starts=to_device(torch.tensor([0, *counts]).cumsum(0), torch.int32, device),
            lengths=to_device(ends, torch.int32, device),
            prefix_lengths=to_device(prefixes, torch.int32, device),
            max_chunk=max(counts),
        )
