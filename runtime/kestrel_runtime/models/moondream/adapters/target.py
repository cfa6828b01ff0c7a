"""Checks adapters of one Moondream and writes them to its slots."""

from __future__ import annotations

import torch

from kestrel_runtime.adapters.files import AdapterFiles
from kestrel_runtime.models.moondream.adapters.formats import read_adapter
from kestrel_runtime.models.moondream.adapters.slabs import AdapterSlabs, AdapterWeights, slot_bytes
from kestrel_runtime.models.moondream.config import TextConfig

_MAX_HEADER_BYTES = 2**20


class MoondreamAdapters:
    """The family's `AdapterTarget`. `slabs` is there once `allocate` was called."""

    def __init__(
        self, config: TextConfig, num_slots: int, max_rank: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._config = config
        self._num_slots = num_slots
        self._max_rank = max_rank
        self._device = device
        self._dtype = dtype
        self._slabs: AdapterSlabs | None = None

    @property
    def num_bytes(self) -> int:
        """Returns the memory of all slots."""
        return self._num_slots * slot_bytes(self._config, self._max_rank, self._dtype.itemsize)

    @property
    def max_file_bytes(self) -> int:
        """Returns the bytes of an adapter of the largest rank in float32."""
        return slot_bytes(self._config, self._max_rank, torch.float32.itemsize) + _MAX_HEADER_BYTES

    def allocate(self) -> AdapterSlabs:
        """Takes the memory, the first time."""
        if self._slabs is None:
            self._slabs = AdapterSlabs(self._config, self._num_slots, self._max_rank, self._device, self._dtype)
        return self._slabs

    def one_slot(self) -> AdapterSlabs:
        """Returns slabs with a single slot of the same size, for a measurement before all slots are allocated."""
        return AdapterSlabs(self._config, 1, self._max_rank, self._device, self._dtype)

    def check(self, files: AdapterFiles) -> AdapterWeights:
        """Returns the weights, on the host. Raises `AdapterInvalid` with every problem."""
        return read_adapter(files, self._config, self._max_rank, self._dtype)

    def write(self, slot: int, weights: AdapterWeights) -> None:
        """Puts them into a slot. Returns when they are there."""
        self.allocate().write(slot, weights)
