"""Where the tokens of several prompts stand when they are packed one after the other.

Knows positions, pages and rows; no keys, no model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kestrel_runtime.execution.transfer import to_device
from kestrel_runtime.scheduling.batch import Chunk

_ALIGNMENT_BYTES = 16
"""Kernels are compiled anew for operands that do not begin at a multiple of it."""


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
        # Laid out on the host, where tiny operations cost less, and sent without waiting for the device.
        counts = [chunk.end - chunk.start for chunk in chunks]
        own_pages = [chunk.sequence.pages for chunk in chunks]
        most_pages = max(map(len, own_pages))
        table = np.array([pages + pages[:1] * (most_pages - len(pages)) for pages in own_pages])
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        own_row = np.repeat(np.arange(len(counts)), counts)
        slots = table[own_row, positions // page_size] * page_size + positions % page_size
        ends = [chunk.end for chunk in chunks]
        prefixes = [chunk.sequence.prefix_length for chunk in chunks]
        own_positions, own_slots = _sent_together([positions, slots], torch.int64, device)
        page_table, query_starts, lengths, prefix_lengths = _sent_together(
            [table, np.cumsum([0, *counts]), np.array(ends), np.array(prefixes)], torch.int32, device
        )
        return cls(
            positions=own_positions,
            slots=own_slots,
            page_table=page_table,
            query_starts=query_starts,
            lengths=lengths,
            prefix_lengths=prefix_lengths,
            max_chunk=max(counts),
        )


def _sent_together(arrays: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Small arrays of whole numbers on the device, by one copy."""
    alignment = _ALIGNMENT_BYTES // dtype.itemsize
    room = [-(-array.size // alignment) * alignment for array in arrays]
    packed = np.zeros(sum(room), dtype=np.int64)
    starts = np.cumsum([0, *room])
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.size] = array.ravel()
    sent = to_device(packed, dtype, device)
    return [
        sent[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=False)
    ]
