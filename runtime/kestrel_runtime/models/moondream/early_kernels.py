"""Selects and loads the kernels of a model while its weights are being copied to the device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from kestrel_ops import DeviceLimits, KeptFacts, meta_stands_for
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.memory.plan import MemoryReading
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.scheduling.limits import StepBounds

if TYPE_CHECKING:
    from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
    from kestrel_runtime.models.moondream.kernel_compilation import KernelNeeds
    from kestrel_runtime.models.moondream.text.decoder import ExpertFormat


class LoadedKernels(NamedTuple):
    """Kernels on the device, and what they were selected for."""

    execution: ExecutionConfig
    needs: KernelNeeds
    facts: KeptFacts


class EarlyKernels:
    """The kernels of one model on the first CUDA device, for `prepare`, which checks that it needs the same."""

    def __init__(
        self,
        config: MoondreamConfig,
        settings: EngineConfig,
        dtype: torch.dtype,
        expert_format: ExpertFormat,
        weight_bytes: int,
    ) -> None:
        self._config = config
        self._settings = settings
        self._dtype = dtype
        self._expert_format: ExpertFormat = expert_format
        self._weight_bytes = weight_bytes
        self._loaded: LoadedKernels | None = None

    def loaded_for(self, settings: EngineConfig) -> LoadedKernels | None:
        """Returns what `load` has loaded, if it was for these settings."""
        return self._loaded if settings == self._settings else None

    def load(self, may_fork: threading.Event) -> None:
        """Loads the kernels, or compiles them at first: in other processes, once `may_fork` is set.

        Raises `CheckpointError` as `prepare` would.
        """
        # All that `prepare` imports is imported now.
        from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
        from kestrel_runtime.models.moondream.kernel_compilation import kernel_needs, load_kernels, outline
        from kestrel_runtime.models.moondream.prepared import PreparedMoondream as PreparedMoondream

        settings, device = self._settings, torch.device("cuda")
        torch.cuda.set_device(torch.cuda.current_device())  # in a new thread libraries have no device yet
        with meta_stands_for(DeviceLimits.of(device)):
            model = outline(self._config, self._dtype, torch.device("meta"), self._expert_format)
            execution = ExecutionConfig.of(settings, device.type, model)
        bounds = StepBounds.of(settings, device.type, self._usable_bytes(device))
        needs = kernel_needs(self._config, settings, execution, bounds, self._dtype, self._expert_format)
        self._loaded = LoadedKernels(execution, needs, load_kernels(needs, device, may_fork))

    def _usable_bytes(self, device: torch.device) -> float:
        """Returns the bytes that the weights will leave."""
        reading = MemoryReading.of_cuda(device, self._settings.memory_limit)
        to_come = max(self._weight_bytes - reading.weight_bytes, 0)
        return reading.usable_bytes(self._settings.memory_utilization) - to_come
