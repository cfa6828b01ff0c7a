"""Chunks of sequences as the operations of a prefill take them, without a step runner."""

from collections.abc import Collection

import numpy as np
import torch

from kestrel_runtime.execution.step_inputs import PackedChunks
from kestrel_runtime.scheduling.batch import Chunk
from tests.kernels.paged import visible_until


def packed_chunks(chunks: Collection[Chunk], page_size: int, device: torch.device) -> PackedChunks:
    """Chunks one after the other; their sequences own the pages they need."""
    counts = [chunk.end - chunk.start for chunk in chunks]
    own_pages = [chunk.sequence.cache.pages for chunk in chunks]
    max_pages = max(map(len, own_pages))
    table = np.array([pages + pages[:1] * (max_pages - len(pages)) for pages in own_pages])
    positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
    own_row = np.repeat(np.arange(len(counts)), counts)
    slots = table[own_row, positions // page_size] * page_size + positions % page_size

    def small(values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    return PackedChunks(
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        page_table=small(table),
        query_starts=small(np.cumsum([0, *counts])),
        lengths=small([chunk.end for chunk in chunks]),
        visible_until=torch.cat(
            [visible_until(chunk.sequence.spans, chunk.start, chunk.end) for chunk in chunks]
        ).to(device),
        max_chunk=max(counts),
    )
