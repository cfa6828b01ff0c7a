"""An image between its decoding and the model that encodes it, as far as the scheduler knows it."""

from __future__ import annotations

from typing import Protocol


class PreparedImage(Protocol):
    """The pixels of one image, which the model family encodes tile by tile."""

    @property
    def num_tiles(self) -> int:
        """How many tiles the vision encoder takes for it."""
        ...
