"""Wraps CUDA streams. The work of one stream runs in order, concurrently with other streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_URGENT = -2
"""Priorities go from 0 down to one below this: torch has no more, and takes the last one for what is below."""


class CudaStream:
    """A stream on a CUDA device. On other devices it does nothing: work is complete when its call returns.

    A process uses few of them: torch has 32 streams of each priority and hands the first one out again after the
    last.
    """

    def __init__(self, device: torch.device, *, is_urgent: bool = False) -> None:
        """Creates a stream; with `is_urgent`, its kernels start before those of other streams."""
        self.device = device
        self._is_entered = False
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=_URGENT if is_urgent else 0)

    @property
    def handle(self) -> int:
        """Returns the stream's handle for CUDA's own functions; 0 where there is none."""
        return 0 if self._stream is None else self._stream.cuda_stream

    def entered(self) -> AbstractContextManager[object]:
        """Launches of the thread within the context go into this stream, to which their memory belongs."""
        if self._stream is None:
            return nullcontext()
        # The stream's own context takes an eighth of the time, and can be entered once at a time.
        return torch.cuda.stream(self._stream) if self._is_entered else self._enter_once(self._stream)

    def entered_by_threads(self) -> AbstractContextManager[object]:
        """Does the same, for contexts of several threads at a time."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextmanager
    def _enter_once(self, stream: torch.cuda.Stream) -> Iterator[None]:
        self._is_entered = True
        try:
            with stream:
                yield
        finally:
            self._is_entered = False

    def record_event(self) -> torch.cuda.Event | None:
        """Returns an event after all that was launched here so far; None if that is complete already."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """Has work that is launched on this stream from now on start when the event is complete."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def synchronize(self) -> None:
        """Has the host wait until all is complete."""
        if self._stream is not None:
            self._stream.synchronize()


class SideStream:
    """A second stream for the current one, for the part of a step that does not depend on another part.

    There is one for each stream that has forked. Its kernels start before those of that stream when both wait for
    the device: it is for the part of many short kernels. Memory that is allocated on one of the two must be used on
    it alone, or on the other one only until the next `forked`. Elsewhere than on a CUDA device both parts run one
    after the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sides: dict[int, torch.cuda.Stream] = {}  # by the handle of the stream that forks

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Launches within the context go into the side, behind all that was launched on the current stream."""
        if self._device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(self._device)
        side = self._sides.get(current.cuda_stream)
        if side is None:
            side = torch.cuda.Stream(self._device, priority=current.priority - 1)
            self._sides[current.cuda_stream] = side
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield

    def join(self) -> None:
        """Has work that is launched on the current stream from now on wait for all work of its side stream."""
        if self._device.type == "cuda":
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._sides[current.cuda_stream])
