"""Prepares a Moondream to run with one configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kestrel_ops import KeptFacts
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import MemoryPlan
from kestrel_runtime.execution.step_runner import StepRunner
from kestrel_runtime.imaging.device_crops import DeviceOperations
from kestrel_runtime.memory.plan import MemoryReading, plan_memory
from kestrel_runtime.models.moondream.backends import Backends, require_invariance
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.models.moondream.executor import new_step_runner
from kestrel_runtime.models.moondream.kernel_compilation import kernel_needs, load_kernels
from kestrel_runtime.models.moondream.memory import cache_dtype, memory_needs, new_cache, step_bytes, weight_bytes
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from kestrel_runtime.models.moondream.vision.device_cropping import Cropper
from kestrel_runtime.scheduling.limits import StepBounds

if TYPE_CHECKING:
    from kestrel_runtime.models.moondream.adapters.target import MoondreamAdapters


class PreparedMoondream:
    """The family's `PreparedModel`."""

    def __init__(self, model: Moondream, config: EngineConfig, bounds: StepBounds, *, owns_model: bool) -> None:
        """Raises `CheckpointError` if the model cannot run with `config`."""
        self._model = model
        self._config = config
        self._bounds = bounds
        early = None if model.early_kernels is None else model.early_kernels.loaded_for(config)
        if early is None:
            self._execution = ExecutionConfig.of(config, model.device.type, model)
        else:
            self._execution = early.execution
        self._loaded_bytes = weight_bytes(model)
        self._adapters: MoondreamAdapters | None = None
        if config.has_adapters:  # what reads their files takes long to import
            from kestrel_runtime.models.moondream.adapters.target import MoondreamAdapters

            self._adapters = MoondreamAdapters(
                model.config.text, config.num_adapter_slots, config.max_adapter_rank, model.device, model.dtype
            )
        self._facts: KeptFacts | None = None
        if model.device.type == "cuda":
            needs = kernel_needs(model.config, config, self._execution, bounds, model.dtype, model.expert_format)
            if early is not None and early.needs == needs:
                self._facts = early.facts
            else:
                self._facts = load_kernels(needs, model.device)
            self._execution.prepare_kernels(model, config)
        require_invariance(model, self._execution, config.page_size, cache_dtype(model.dtype, config))
        # Backends are built before the cache is sized, which gets a part of the memory that they leave.
        self._backends = Backends.of(
            model, self._execution, max_batch_size=bounds.max_batch_size, frees_originals=owns_model
        )

    def crop_on_device(self) -> DeviceOperations | None:
        """Returns new operations for one thread."""
        if not self._execution.resizes_images:
            return None
        cropping = MoondreamCropping(self._model.config.vision)
        kernels = self._execution.kernels
        cropper = Cropper(cropping, self._model.device, kernels.resample)
        return DeviceOperations(cropper.make_crops, cropper.make_crops_now, kernels.hash_words)

    def plan_cache(self, host_image_bytes: int) -> tuple[int, MemoryPlan]:
        """Returns the number of pages of the cache, and the plan of all memory."""
        model, config, bounds = self._model, self._config, self._bounds
        # All slots are only allocated once the cache is sized.
        slabs = None if self._adapters is None else self._adapters.one_slot()
        step = step_bytes(
            model, self._backends, bounds, config.page_size, cache_dtype(model.dtype, config), slabs, self._facts
        )
        del slabs
        reading = MemoryReading.of(model.device, self._loaded_bytes, config.memory_limit)
        needs = memory_needs(
            model,
            config,
            bounds,
            step_bytes=step,
            available_bytes=reading.available_bytes,
            with_graphs=self._execution.with_graphs,
            host_image_bytes=host_image_bytes,
            adapter_bytes=0 if self._adapters is None else self._adapters.num_bytes,
        )
        return plan_memory(reading, needs, config.memory_utilization, config.num_kv_pages)

    def adapter_target(self) -> MoondreamAdapters | None:
        """Returns the slots, as many as are configured."""
        return self._adapters

    def new_step_runner(
        self, num_pages: int, graph_bytes: int, image_cache_bytes: int = 0, crop_cache_bytes: int = 0
    ) -> StepRunner:
        """Returns a step runner with a cache of `num_pages`."""
        return new_step_runner(
            self._model,
            new_cache(self._model, self._config, num_pages),
            self._execution,
            self._bounds,
            self._backends,
            graph_bytes=graph_bytes,
            image_cache_bytes=image_cache_bytes,
            crop_cache_bytes=crop_cache_bytes,
            adapters=None if self._adapters is None else self._adapters.allocate(),
            facts=self._facts,
        )
