"""The class that a published checkpoint names. Its methods are those of the inner model."""

import importlib
from pathlib import Path
from typing import Any

from torch import nn


class HfMoondream(nn.Module):
    """The outer model."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model = importlib.import_module(".moondream", __package__).MoondreamModel(folder)

    @property
    def encode_image(self) -> Any:
        """That of the inner model, and so are the others."""
        return self.model.encode_image

    @property
    def query(self) -> Any:
        return self.model.query

    @property
    def caption(self) -> Any:
        return self.model.caption

    @property
    def point(self) -> Any:
        return self.model.point

    @property
    def detect(self) -> Any:
        return self.model.detect
