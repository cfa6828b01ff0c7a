"""Image embeddings on the device: an entry for each sequence with an image, at addresses that stay."""

from __future__ import annotations

import torch
from torch import Tensor


class EmbeddingSlab:
    """Entries of one image each. Host side: engine thread only."""

    def __init__(
        self, num_entries: int, num_positions: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """An entry is [num_positions, dim]."""
        # Not zeroed: on a host, memory is only taken where something is written.
        self.embeddings = torch.empty(num_entries, num_positions, dim, dtype=dtype, device=device)
        self._free = list(range(num_entries))[::-1]
        self._entry_of: dict[int, int] = {}  # by sequence id

    @property
    def rows(self) -> Tensor:
        """All positions of all entries, one after the other: [entries * positions, dim]."""
        return self.embeddings.flatten(0, 1)

    def acquire(self, sequence_id: int) -> int:
        """The sequence's entry, a new one if it has none."""
        if sequence_id not in self._entry_of:
            self._entry_of[sequence_id] = self._free.pop()
        return self._entry_of[sequence_id]

    def entry(self, sequence_id: int) -> int:
        """The entry of a sequence that has one. Raises `KeyError` elsewhere."""
        return self._entry_of[sequence_id]

    def release(self, sequence_id: int) -> None:
        """Free the sequence's entry, if it has one."""
        entry = self._entry_of.pop(sequence_id, None)
        if entry is not None:
            self._free.append(entry)

    def clear(self) -> None:
        """Free all entries."""
        self._free += self._entry_of.values()
        self._entry_of.clear()
