"""CUDA streams: work of one stream runs in order, and beside the work of other streams."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_URGENT = -5
"""Priorities go from 0 down to this; where a device has fewer, its own last one is meant."""


class CudaStream:
    """A stream on a CUDA device; elsewhere nothing, since there all work is complete when it returns.

    A process uses few of them: torch has 32 streams of each priority and hands the first one out again after the
    last.
    """

    def __init__(self, device: torch.device, *, is_urgent: bool = False) -> None:
        """With `is_urgent`, kernels of this stream start before those of others when both wait for the device."""
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=_URGENT if is_urgent else 0)

    @property
    def handle(self) -> int:
        """The stream's handle for CUDA's own functions; 0 where there is none."""
        return 0 if self._stream is None else self._stream.cuda_stream

    def entered(self) -> AbstractContextManager[object]:
        """Launches of the thread within the context go into this stream, to which their memory belongs."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def record_event(self) -> torch.cuda.Event | None:
        """An event that is complete when all that was launched here until now is; None where it already is."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """Work launched on this stream from now on starts when the event is complete."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def synchronize(self) -> None:
        """Have the host wait until all is complete."""
        if self._stream is not None:
            self._stream.synchronize()
