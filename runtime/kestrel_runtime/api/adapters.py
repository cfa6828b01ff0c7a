"""Defines the names of adapters, and the facts that an engine reports about its adapters."""

from __future__ import annotations

import re
from dataclasses import dataclass

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
CHECKPOINT = "checkpoint-"
"""The beginning of the names that trainers give to the folders of steps."""
MAX_NAME_CHARS = 128
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_NAME = re.compile(rf"(?P<path>{_PART}(?:/{_PART}){{0,3}})(?:@(?P<step>{_PART}))?")


@dataclass(frozen=True, slots=True)
class AdapterName:
    """A well-formed name of an adapter: a path of up to four parts and, after an "@", the step of a training."""

    path: str
    step: str | None = None

    @classmethod
    def parse(cls, text: str) -> AdapterName | None:
        """Returns the name that `text` spells, or None if `text` is not the name of an adapter."""
        match = _NAME.fullmatch(text) if len(text) <= MAX_NAME_CHARS else None
        return None if match is None else cls(match["path"], match["step"])

    def folders(self) -> tuple[str, ...]:
        """Returns the folders that the name may mean, relative to that of all adapters, in order of preference.

        Trainers name the folders of steps like this.
        """
        if self.step is None:
            return (self.path,)
        return f"{self.path}@{self.step}", f"{self.path}/{self.step}", f"{self.path}/{CHECKPOINT}{self.step}"

    def __str__(self) -> str:
        return self.path if self.step is None else f"{self.path}@{self.step}"


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that is loaded into a slot."""

    name: str
    """The name that requests give."""
    digest: str
    """SHA-256 of the adapter's files, as hexadecimal digits."""
    slot: int
    """The number of its slot, from 1."""
    num_requests: int
    """Running requests that use the adapter."""
    is_current: bool
    """True if new requests for this name get this adapter; if False, only running requests still use it."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """A reading of the adapter slots. Counts start at the start of the engine."""

    num_slots: int = 0
    """Slots that adapters can be loaded into; 0 if requests may not use adapters."""
    num_filled_slots: int = 0
    """Slots that hold an adapter."""
    num_used_slots: int = 0
    """Slots that running requests use."""
    num_loads: int = 0
    """Loads of adapters that succeeded."""
    num_failures: int = 0
    """Loads of adapters that failed."""
    num_evictions: int = 0
    """Adapters that were dropped to free their slots for others."""
    num_waiting: int = 0
    """Adapters that requests are waiting for."""
