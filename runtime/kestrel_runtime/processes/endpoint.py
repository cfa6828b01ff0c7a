"""Where an engine core listens, and what both ends of its sockets need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_WAITING_MESSAGES = 20_000
"""To one process that does not read; beyond that it is given up."""


@dataclass(frozen=True, slots=True)
class CoreEndpoint:
    """The sockets of the core of this index in a private folder."""

    folder: Path
    index: int

    @property
    def requests(self) -> str:
        """Where front ends send to."""
        return f"ipc://{self.folder}/core-{self.index}.in"

    @property
    def events(self) -> str:
        """Where front ends receive from."""
        return f"ipc://{self.folder}/core-{self.index}.out"

    @property
    def flight_record(self) -> Path:
        """Which requests are in flight, or were when the process ended (`engine.flight_record`)."""
        return self.folder / f"core-{self.index}.steps"
