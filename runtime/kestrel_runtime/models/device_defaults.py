"""The values that `auto` resolves to on a device, before a model is loaded."""

from __future__ import annotations

import torch

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.scheduling.limits import StepBounds


def device_defaults(config: EngineConfig) -> dict[str, str]:
    """The values of the settings that `config` leaves to the device: text by field of `EngineConfig`."""
    is_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    device = "cuda" if is_cuda else "cpu"
    bounds = StepBounds.of(config, device)
    values = {
        "device": device,
        "dtype": "bfloat16" if is_cuda else "float32",
        "text_path": "fused" if is_cuda else "plain",
        "vision_path": "fused" if is_cuda else "plain",
        "cuda_graphs": "on" if is_cuda and config.text_path != "plain" else "off",
        "resize_on_device": "on" if is_cuda else "off",
        "max_batch_size": str(bounds.max_batch_size),
        "max_prefill_tokens": str(bounds.max_prefill_tokens),
        "max_tiles_per_step": str(bounds.max_tiles),
    }
    if config.num_kv_pages is None:
        values["num_kv_pages"] = "known when the model is loaded: see the log, or GetServerInfo"
    return {name: value for name, value in values.items() if getattr(config, name) in (None, "auto")}
