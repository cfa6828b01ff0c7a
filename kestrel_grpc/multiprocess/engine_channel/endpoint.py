"""Defines the files of an engine core in the private folder of its server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CoreEndpoint:
    """The socket of the core of this index, and the file that the core leaves behind, in a private folder."""

    folder: Path
    index: int

    @property
    def path(self) -> Path:
        """The path of the Unix socket that front ends connect to."""
        return self.folder / f"core-{self.index}.socket"

    @property
    def flight_record(self) -> Path:
        """The file of the requests in flight, now or when the process ended (`engine.flight_record`)."""
        return self.folder / f"core-{self.index}.steps"
