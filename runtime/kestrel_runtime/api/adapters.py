"""Adapters as users of the engine see them: their names, and what is known about those that are loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_NAME_CHARS = 128
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_NAME = re.compile(rf"(?P<path>{_PART}(?:/{_PART}){{0,3}})(?:@(?P<step>{_PART}))?")


@dataclass(frozen=True, slots=True)
class AdapterName:
    """A well-formed name: a path of up to four parts and, behind an @, the step of a training."""

    path: str
    step: str | None = None

    @classmethod
    def parse(cls, text: str) -> AdapterName | None:
        """None where `text` is no name of an adapter."""
        match = _NAME.fullmatch(text) if len(text) <= MAX_NAME_CHARS else None
        return None if match is None else cls(match["path"], match["step"])

    def __str__(self) -> str:
        return self.path if self.step is None else f"{self.path}@{self.step}"


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter in a slot."""

    name: str
    digest: str
    """SHA-256 of its files, in hexadecimal digits."""
    slot: int
    """The number of the slot, from 1."""
    num_requests: int
    """Requests that use it now."""
    is_current: bool
    """True if new requests that name it get it. Else only requests that run still use it."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """A reading of the slots. Counts are since the engine started."""

    num_slots: int = 0
    num_filled_slots: int = 0
    num_used_slots: int = 0
    """Slots that requests use now."""
    num_loads: int = 0
    num_failures: int = 0
    """Loads that failed."""
    num_evictions: int = 0
    """Adapters that were dropped for others."""
    num_waiting: int = 0
    """Adapters that requests wait for."""
