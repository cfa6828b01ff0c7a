"""The interface of a prepared model for the loader of adapters."""

from __future__ import annotations

from typing import Any, Protocol

from kestrel_runtime.adapters.files import AdapterFiles


class AdapterTarget(Protocol):
    """Checks adapters and writes them to slots of the device. For one thread at a time, beside running steps."""

    @property
    def max_file_bytes(self) -> int:
        """No file of an adapter that fits is larger."""
        ...

    def check(self, files: AdapterFiles) -> Any:
        """The weights of an adapter, on the host. Raises `AdapterInvalid` with every problem."""
        ...

    def write(self, slot: int, weights: Any) -> None:
        """Put what `check` has returned into a slot, from 1, which no request uses. Returns when it is there."""
        ...
