"""Kernels that are loaded while weights are copied."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from kestrel_ops import DeviceLimits, KeptFacts, meta_stands_for
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.models.moondream import kernel_compilation
from kestrel_runtime.models.moondream.early_kernels import EarlyKernels
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.models.moondream.kernel_compilation import kernel_needs, outline
from kestrel_runtime.models.moondream.weights.published import PUBLISHED
from kestrel_runtime.scheduling.limits import StepBounds

CONFIG, _ = PUBLISHED["moondream2"]
TOTAL, USED, WEIGHTS = 140 * 2**30, 2**30, 4 * 2**30
SETTINGS = EngineConfig(model="", device="cuda", text_backend="fused-float8", kv_dtype="float8")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A card without a driver; the needs of what is loaded onto it."""
    needs: list[Any] = []
    monkeypatch.setattr(DeviceLimits, "of", staticmethod(lambda device: DeviceLimits.of_card((9, 0))))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL - USED, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(
        kernel_compilation, "load_kernels", lambda own, device, may_fork: needs.append(own) or KeptFacts(None)
    )
    return needs


def test_they_are_those_that_the_model_needs_once_it_is_loaded(loaded: list[Any]):
    early = EarlyKernels(CONFIG, SETTINGS, torch.bfloat16, "model", WEIGHTS)
    early.load(threading.Event())
    found = early.loaded_for(SETTINGS)
    assert found is not None
    assert loaded == [found.needs]
    with meta_stands_for(DeviceLimits.of_card((9, 0))):
        model = outline(CONFIG, torch.bfloat16, torch.device("meta"), "model")
        execution = ExecutionConfig.of(SETTINGS, "cuda", model)
    bounds = StepBounds.of(SETTINGS, "cuda", SETTINGS.memory_utilization * TOTAL - USED - WEIGHTS)
    assert found.execution == execution
    assert found.needs == kernel_needs(CONFIG, SETTINGS, execution, bounds, model.dtype, model.expert_format)


def test_they_are_not_used_with_other_settings(loaded: list[Any]):
    early = EarlyKernels(CONFIG, SETTINGS, torch.bfloat16, "model", WEIGHTS)
    assert early.loaded_for(SETTINGS) is None
    early.load(threading.Event())
    assert early.loaded_for(replace(SETTINGS, kv_dtype="auto")) is None


def test_settings_that_the_card_does_not_allow_fail_the_start(loaded: list[Any]):
    settings = replace(SETTINGS, kernels=(("prefill_attention", "unknown"),))
    with pytest.raises(CheckpointError, match="no such kernels"):
        EarlyKernels(CONFIG, settings, torch.bfloat16, "model", WEIGHTS).load(threading.Event())
