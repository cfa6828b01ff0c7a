"""Counts the frames of streams, since the start of this process, for the metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FrameCounts:
    """Holds the counts. The event loop of the calls writes them; any thread may read them."""

    num_streams: int = 0
    """Streams that are open now."""
    num_answered: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    """Frames that were read and not looked at, since newer ones came."""
