"""What the largest steps take of memory: which steps they are, and when they are measured."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream import largest_steps
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.models.moondream.largest_steps import (
    estimated_step_bytes,
    largest_encode,
    largest_prefill,
    peak_bytes,
    step_bytes,
)
from kestrel_runtime.models.moondream.memory_needs import new_cache
from kestrel_runtime.models.moondream.model_paths import ModelPaths
from kestrel_runtime.scheduling.limits import StepBounds

BOUNDS = StepBounds(max_batch_size=4, max_prefill_tokens=256, max_tiles=5)
FUSED = EngineConfig(text_path="fused", vision_path="fused")


def fused_paths(loaded: LoadedModel) -> ModelPaths:
    return ModelPaths.of(loaded.model, ExecutionConfig.of(FUSED, "cpu", loaded.model), max_batch_size=4)


class OnADevice:
    """A model that says to be on a CUDA device, whose tensors are on the CPU."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.config, self.dtype = loaded.model.config, loaded.model.dtype
        self.num_asked = 0

    @property
    def device(self) -> Any:
        self.num_asked += 1
        return SimpleNamespace(type="cuda") if self.num_asked == 1 else torch.device("cpu")


@torch.inference_mode()
def test_the_largest_prefill_has_as_many_tokens_as_a_step_may_carry_and_needs_one_page(
    moondream2: LoadedModel,
) -> None:
    paths: Any = fused_paths(moondream2)
    seen: list[int] = []
    prefill = paths.text.prefill

    def look(embeddings: Tensor, *rest: Any) -> Tensor:
        seen.append(len(embeddings))
        return prefill(embeddings, *rest)

    paths.text.prefill = look
    cache = new_cache(moondream2.model, FUSED, 1)
    hidden = largest_prefill(moondream2.model, paths, cache, BOUNDS)()
    assert seen == [256]
    assert hidden.isfinite().all()
    assert not cache.key_pages.any()
    assert not cache.value_pages.any()


@torch.inference_mode()
def test_the_largest_encoding_has_as_many_tiles_as_one_image_or_one_step(moondream2: LoadedModel) -> None:
    vision, paths = moondream2.model.config.vision, fused_paths(moondream2)
    most_of_image = 1 + vision.max_crops
    for max_tiles in (5, most_of_image + 3):
        images = largest_encode(moondream2.model, paths, StepBounds(4, 256, max_tiles))()
        num_tiles = max(max_tiles, most_of_image)
        assert len(images) == -(-num_tiles // 2)
        assert images.shape[1:] == (vision.num_image_tokens, moondream2.model.config.text.dim)


@pytest.mark.parametrize(("allocated", "reserved"), [((7, 1007), (50, 1030)), ((7, 907), (50, 1050))])
def test_the_peak_is_the_larger_of_what_tensors_fill_and_what_the_allocator_takes(
    monkeypatch: pytest.MonkeyPatch, allocated: tuple[int, int], reserved: tuple[int, int]
) -> None:
    order: list[str] = []
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: order.append(name))
    for name, value in (
        ("memory_allocated", allocated[0]),
        ("max_memory_allocated", allocated[1]),
        ("memory_reserved", reserved[0]),
        ("max_memory_reserved", reserved[1]),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)

    def work() -> Tensor:
        order.append("work")
        return torch.zeros(1)

    assert peak_bytes(work) == 1000
    assert order == ["work", "synchronize", "empty_cache", "reset_peak_memory_stats", "work", "synchronize"]


def test_on_a_gpu_the_larger_of_prefill_and_encoding_is_what_a_step_takes(
    moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = iter([1009, 2003])
    monkeypatch.setattr(largest_steps, "peak_bytes", lambda _: next(figures))
    model: Any = OnADevice(moondream2)
    assert step_bytes(model, fused_paths(moondream2), BOUNDS, 16, torch.float32) == 2003


def test_a_measurement_that_fails_leaves_the_estimate(
    moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory\nand a page of advice")

    monkeypatch.setattr(largest_steps, "peak_bytes", fail)
    model: Any = OnADevice(moondream2)
    with caplog.at_level(logging.WARNING):
        got = step_bytes(model, fused_paths(moondream2), BOUNDS, 16, torch.float32)
    assert got == estimated_step_bytes(moondream2.model.config, BOUNDS, 4)
    assert caplog.messages == ["activations are estimated, not measured: CUDA out of memory"]


def test_on_the_host_it_is_estimated(moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest_steps, "peak_bytes", lambda _: pytest.fail("measured"))
    estimate = estimated_step_bytes(moondream2.model.config, BOUNDS, 4)
    assert step_bytes(moondream2.model, fused_paths(moondream2), BOUNDS, 16, torch.float32) == estimate > 0
    config = EngineConfig(deterministic=True)
    paths = ModelPaths.of(moondream2.model, ExecutionConfig.of(config, "cpu", moondream2.model), max_batch_size=4)
    assert step_bytes(moondream2.model, paths, BOUNDS, 16, torch.float32) > estimate, "attention has its own memory"


@pytest.mark.parametrize("larger", [StepBounds(3, 777_777, 5), StepBounds(3, 256, 5_555)], ids=["prompts", "tiles"])
def test_a_step_that_carries_more_is_estimated_to_need_more(moondream3: LoadedModel, larger: StepBounds) -> None:
    config = moondream3.model.config
    assert estimated_step_bytes(config, larger, 2) > estimated_step_bytes(config, BOUNDS, 2)
