"""Copies from the host to the device that do not make the host wait: single arrays, and several in one buffer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT_BYTES = 16
"""Kernels are compiled anew for operands that do not begin at a multiple of it."""
_TORCH_TYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}

_NUM_UPLOADING_THREADS, _PIECE_BYTES = 6, 16 * 2**20
_NUM_TURNS = 8
"""More than the steps of a kind that are in flight at once."""


class PackedLayout:
    """The offset of each field in the buffer."""

    def __init__(self, fields: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Takes the fields: name → (int32, int64 or float32; shape)."""
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
        """Returns views of a uint8 buffer on the host, which the caller fills."""
        records = buffer.numpy().view(self._record)
        return {name: records[name][0] for name in self._fields}

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Returns views of a uint8 buffer on any device."""
        found: dict[str, Tensor] = {}
        for (name, (dtype, shape)), start in zip(self._fields.items(), self._starts.values(), strict=True):
            own = _TORCH_TYPES[dtype]
            found[name] = buffer[start : start + math.prod(shape) * own.itemsize].view(own).view(shape)
        return found


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Returns a uint8 buffer on the host for one copy to `device`.

    Pinned for a GPU: only such copies leave the host free, and torch keeps the buffer until its copy is complete.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def uploaded(
    tensors: Mapping[str, Tensor], device: torch.device, dtype_of: Callable[[str, Tensor], torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    """Begins to copy tensors to a CUDA device; the iterator has the copies in these types, in their order.

    Several threads make them, since one alone reads mapped files more slowly than the device takes them.
    """
    threads = threading.local()

    def upload(item: tuple[str, Tensor]) -> tuple[str, Tensor]:
        if not hasattr(threads, "pieces"):
            threads.pieces = _PinnedPieces(device)
        name, tensor = item
        return name, threads.pieces.upload(tensor).to(dtype_of(name, tensor))

    pool = ThreadPoolExecutor(_NUM_UPLOADING_THREADS)
    copies = pool.map(upload, tensors.items())
    pool.shutdown(wait=False)  # its threads end with the last copy
    return copies


class _PinnedPieces:
    """Pinned memory of one thread, through which its copies go piece by piece."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [host_buffer(_PIECE_BYTES, device) for _ in range(2)]

    @torch.no_grad()
    def upload(self, tensor: Tensor) -> Tensor:
        """Returns a copy on the device, complete when this returns."""
        source = tensor.contiguous()
        target = torch.empty_like(source, device=self._device)
        from_bytes, to_bytes = source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
        copied = [torch.cuda.Event(), torch.cuda.Event()]
        for number, start in enumerate(range(0, len(from_bytes), _PIECE_BYTES)):
            buffer, event = self._buffers[number % 2], copied[number % 2]
            event.synchronize()
            piece = from_bytes[start : start + _PIECE_BYTES]
            buffer[: len(piece)].copy_(piece)
            to_bytes[start : start + len(piece)].copy_(buffer[: len(piece)], non_blocking=True)
            event.record()
        for event in copied:
            event.synchronize()
        return target


class StagedCopies:
    """Copies packed fields from the host to one buffer on the device, each from memory that no copy still reads.

    A few pieces of host memory take turns, and views of them are kept: allocating memory and making views takes
    longer than the copy itself.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocates `num_bytes`, enough for the largest layout."""
        self._target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._device_index = self._target.device.index
        self._hosts = [host_buffer(num_bytes, device) for _ in range(_NUM_TURNS)]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_TURNS
        self._turn = 0
        self._views: dict[Hashable, _Views] = {}

    def send(
        self,
        key: Hashable,
        new_layout: Callable[[], PackedLayout],
        fill: Callable[[dict[str, NDArray[Any]]], None],
    ) -> dict[str, Tensor]:
        """Has `fill` write the fields of a layout, and copies them in stream order.

        Returns them on the device. A key stands for a layout and has a fixed place there.
        """
        views = self._views.get(key)
        if views is None:
            layout = new_layout()
            target = self._target[: layout.num_bytes]
            hosts = [host[: layout.num_bytes] for host in self._hosts]
            arrays = [layout.arrays(host) for host in hosts]
            views = self._views[key] = _Views(hosts, arrays, target, layout.tensors(target))
        turn = self._turn
        copied = self._copied[turn]
        if copied is not None and not copied.query():
            copied.synchronize()
        fill(views.arrays[turn])
        views.target.copy_(views.hosts[turn], non_blocking=True)
        if self._target.is_cuda:
            copied = self._copied[turn] = copied or torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self._device_index))  # torch takes long to find the device
        self._turn = (turn + 1) % _NUM_TURNS
        return views.tensors


class _Views(NamedTuple):
    """Views of one layout: on the host, by turn, and on the device."""

    hosts: list[Tensor]
    arrays: list[dict[str, NDArray[Any]]]
    target: Tensor
    tensors: dict[str, Tensor]


def to_device(data: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies numbers on the host to a tensor of `dtype` on the device.

    Only copies from pinned memory are asynchronous.
    """
    tensor = torch.as_tensor(data, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
