"""What a model family provides to generic code. Unlike `interfaces`, these types name tensors and images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kestrel_runtime.imaging.tiles import DecodedImage, Tiling
from kestrel_runtime.interfaces.family import ModelConfig, Skill
from kestrel_runtime.loading.checkpoint import Checkpoint


class LoadedWeights(NamedTuple):
    """A model in memory."""

    model: Any
    """The family's own object, with the attributes `config`, `device` and `dtype`."""
    num_parameters: int


class ModelFamily(Protocol):
    """One architecture: how its checkpoints are read, and which tasks its models do."""

    def load(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> LoadedWeights:
        """Read the weights, check them and place them on the device. Raises `CheckpointError`."""
        ...

    def skills(self, config: Any) -> Mapping[str, Skill]:
        """The skills of a model of this configuration by name, in the order in which clients are told them."""
        ...

    def tiling(self, config: Any) -> Tiling:
        """How a model of this configuration divides images."""
        ...

    def tile_on_device(
        self, config: Any, device: torch.device, resample: Callable[[Tensor, Tensor, int], Tensor]
    ) -> Callable[[DecodedImage], Tensor]:
        """Makes on the device what `Tiling.make_tiles` makes on the host: uint8 [tiles, side, side, 3].

        `resample`: an implementation of the operation of that name.
        """
        ...


def config_of(model: Any) -> ModelConfig:
    """The configuration of a model that a family has loaded, as generic code sees it."""
    return model.config
