"""What settings come to on a device."""

from __future__ import annotations

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.models.device_defaults import device_defaults
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.scheduling.limits import StepBounds


def test_settings_that_are_given_are_left_out():
    found = device_defaults(EngineConfig(device="cpu", dtype="bfloat16", max_batch_size=3, num_kv_pages=100))
    assert found.keys() & {"device", "dtype", "max_batch_size", "num_kv_pages"} == set()


def test_defaults_are_those_that_an_engine_takes():
    config = EngineConfig(device="cpu")
    found = device_defaults(config)
    execution, bounds = ExecutionConfig.of(config, "cpu"), StepBounds.of(config, "cpu")
    assert (found["text_path"], found["vision_path"]) == (execution.text, execution.vision)
    assert found["cuda_graphs"] == ("on" if execution.with_graphs else "off")
    assert found["resize_on_device"] == ("on" if execution.resizes_images else "off")
    assert found["max_prefill_tokens"] == str(bounds.max_prefill_tokens)
    assert found["dtype"] == "float32"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_default_names_a_setting(device):
    assert all(hasattr(EngineConfig(), name) for name in device_defaults(EngineConfig(device=device)))
