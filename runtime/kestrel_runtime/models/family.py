"""What a model family provides to generic code. Unlike `interfaces`, these types name tensors and images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.memory_plan import MemoryPlan
from kestrel_runtime.execution.step_runner import StepRunner
from kestrel_runtime.imaging.tiles import DecodedImage, Tiling
from kestrel_runtime.interfaces.family import ModelConfig, Skill
from kestrel_runtime.loading.checkpoint import Checkpoint
from kestrel_runtime.models.verification import Verification
from kestrel_runtime.scheduling.limits import StepBounds


class LoadedWeights(NamedTuple):
    """A model in memory."""

    model: Any
    """The family's own object, with the attributes `config`, `device` and `dtype`."""
    num_parameters: int


class PreparedModel(Protocol):
    """A model laid out to run under one configuration."""

    def tile_on_device(self) -> Callable[[DecodedImage], Tensor] | None:
        """A function for one thread that makes on the device what `Tiling.make_tiles` makes on the host.

        It returns uint8 [tiles, side, side, 3]. None where tiles are made on the host.
        """
        ...

    def plan_cache(self, host_image_bytes: int) -> tuple[int, MemoryPlan]:
        """How many pages the key-value cache gets, and how all memory is divided.

        `host_image_bytes`: what decoded images may take on the host. Raises `CheckpointError` where memory has no
        memory for the fewest pages.
        """
        ...

    def new_step_runner(self, num_pages: int, graph_bytes: int) -> StepRunner:
        """A step runner with a cache of so many pages; `graph_bytes` of device memory are for captured graphs.

        Raises `CheckpointError` where there is no memory for the cache.
        """
        ...


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

    def prepare(self, model: Any, config: EngineConfig, bounds: StepBounds, *, owns_model: bool) -> PreparedModel:
        """Lay a loaded model out to run as `config` says, in steps within `bounds`.

        With `owns_model` the model has no other user, so that weights of which the layout has a copy may be freed.
        Raises `CheckpointError` where the model cannot run so.
        """
        ...

    def verification(self, model: Any, config: EngineConfig) -> Verification:
        """How a loaded model, run as `config` says, is compared with a reference fixture."""
        ...


def config_of(model: Any) -> ModelConfig:
    """The configuration of a model that a family has loaded, as generic code sees it."""
    return model.config
