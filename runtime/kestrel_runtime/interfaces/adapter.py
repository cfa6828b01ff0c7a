"""The adapter of a sequence."""

from __future__ import annotations

from typing import Protocol


class AdapterLease(Protocol):
    """Keeps one version of an adapter in its slot. For any thread."""

    @property
    def name(self) -> str:
        """The name that the request has for it."""
        ...

    @property
    def tenant(self) -> str:
        """Whose request it is; "" where tenants are not distinguished."""
        ...

    @property
    def is_reclaimed(self) -> bool:
        """Whether another tenant needs the slot: the request gives the lease back and asks for another one."""
        ...

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
