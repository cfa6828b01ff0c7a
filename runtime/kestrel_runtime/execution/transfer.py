"""Copies from the host to the device that do not make the host wait: single arrays, and several in one buffer.

Knows no step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT_BYTES = 16
"""Kernels are compiled anew for operands that do not begin at a multiple of it."""
_TORCH_TYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class PackedLayout:
    """Where each field stands in the buffer."""

    def __init__(self, fields: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """fields: name → (int32, int64 or float32; shape)."""
        self._fields = fields
        self._starts: dict[str, int] = {}
        self.num_bytes = 0
        for name, (dtype, shape) in fields.items():
            self._starts[name] = self.num_bytes
            size = math.prod(shape) * np.dtype(dtype).itemsize
            self.num_bytes += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._record = np.dtype(
            {
                "names": list(fields),
                "formats": list(fields.values()),
                "offsets": list(self._starts.values()),
                "itemsize": self.num_bytes,
            }
        )

    def arrays(self, buffer: Tensor) -> dict[str, NDArray[Any]]:
        """Views of a uint8 buffer on the host, which the caller fills."""
        records = buffer.numpy().view(self._record)
        return {name: records[name][0] for name in self._fields}

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Views of a uint8 buffer anywhere."""
        found: dict[str, Tensor] = {}
        for (name, (dtype, shape)), start in zip(self._fields.items(), self._starts.values(), strict=True):
            own = _TORCH_TYPES[dtype]
            found[name] = buffer[start : start + math.prod(shape) * own.itemsize].view(own).view(shape)
        return found


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """A uint8 buffer on the host for one copy to `device`.

    Pinned for a GPU: only such copies leave the host free, and torch keeps the buffer until its copy is over.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def to_device(data: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the host as a tensor of `dtype` on the device. Only copies from pinned memory are asynchronous."""
    tensor = torch.as_tensor(data, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
