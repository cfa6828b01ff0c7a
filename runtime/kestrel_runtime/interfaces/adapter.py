"""The adapter of a sequence."""

from __future__ import annotations

from typing import Protocol


class AdapterLease(Protocol):
    """Keeps one version of an adapter in its slot. For any thread."""

    @property
    def slot(self) -> int:
        """From 1."""
        ...

    @property
    def digest(self) -> bytes:
        """SHA-256 of the adapter's content."""
        ...

    def end(self) -> None:
        """The slot may be written again. Without effect the second time."""
        ...
