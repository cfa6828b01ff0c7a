"""Loads the model of an engine's configuration: device, dtype, checkpoint, family, tokenizer."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import torch

from kestrel_ops import prepare_compilations
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.loading.checkpoint import Checkpoint, find_checkpoint
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.memory.host_limits import available_processors
from kestrel_runtime.models.family import Meanwhile, ModelFamily, config_of
from kestrel_runtime.models.registry import family_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, its tokenizer and its source."""

    family: ModelFamily
    model: Any
    """The family's own object; see `LoadedWeights`."""
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    num_parameters: int
    """Elements of all weights."""

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        checkpoint: Checkpoint | None = None,
        tokenizer: Tokenizer | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> LoadedModel:
        """Reads and places the checkpoint, by default the one of `config`; finds it and reads its tokenizer first.

        `meanwhile` is given to the family's `load`. Raises `CheckpointError`.
        """
        device = _device(config)
        dtype = getattr(torch, config.resolved(device.type).dtype)
        if device.type == "cuda" and meanwhile is None:
            threading.Thread(target=prepare_compilations, daemon=True).start()
        if device.type == "cuda" and config.memory_limit is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(config.memory_limit / total, 1.0))
        # If a container has more threads than its quota of processors, the kernel pauses all of them repeatedly.
        torch.set_num_threads(min(torch.get_num_threads(), available_processors()))
        if checkpoint is None:
            checkpoint = find_checkpoint(config.model, config.revision)
        family = family_of(checkpoint)
        model, num_parameters = family.load(checkpoint, config, device, dtype, meanwhile)
        tokenizer = tokenizer or Tokenizer.from_file(checkpoint.tokenizer_file)
        if tokenizer.vocab_size > config_of(model).vocab_size:
            raise CheckpointError(
                f"{checkpoint.tokenizer_file} has {tokenizer.vocab_size} tokens, "
                f"the model only {config_of(model).vocab_size}"
            )
        _log.info("loaded %s on %s as %s", checkpoint.name, device, model.dtype)
        return cls(family, model, tokenizer, checkpoint, num_parameters)

    @property
    def device_uuid(self) -> str | None:
        """Returns the UUID of its GPU, such as "1a2b3c4d-…"; None on the host."""
        device = self.model.device
        return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None

    @property
    def device_name(self) -> str:
        """Returns the name of its GPU, such as "NVIDIA H200"; empty on the host."""
        device = self.model.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def device_type(config: EngineConfig) -> str:
    """Returns "cpu" or "cuda": as configured, or what this machine has."""
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def pci_address(config: EngineConfig) -> str | None:
    """Returns the address of the GPU that an engine will use, such as "0000:1b:00.0"; None if it uses none, or if
    this version of torch does not report it.
    """
    if device_type(config) != "cuda" or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.device("cuda"))
    numbers = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in numbers:
        return None
    # A GPU is the first function of its device.
    return "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def _device(config: EngineConfig) -> torch.device:
    kind = device_type(config)
    if kind == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("device cuda was asked for, and torch finds none")
    return torch.device(kind)
