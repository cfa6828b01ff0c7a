"""The sizes and types of a loaded model, from which the implementations of fused operations are chosen."""

from __future__ import annotations

import torch

from kestrel_ops import DeviceLimits, ModelShape, TextShape, VisionShape
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.models.moondream.config import TextConfig, VisionConfig
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.scheduling.limits import StepBounds

_FLOAT8 = torch.float8_e4m3fn


def model_shape(model: Moondream, config: EngineConfig, text_path: str, vision_path: str) -> ModelShape:
    """The sizes and types of `model` on its device, for these paths of text and images."""
    device = model.device
    return ModelShape(
        device_type=device.type,
        capability=DeviceLimits.of(device).capability,
        dtype=model.dtype,
        text=None if text_path == "plain" else _text(model, config, _weight_dtype(model, text_path)),
        vision=None if vision_path == "plain" else _vision(model.config.vision, vision_path, model.dtype),
    )


def _weight_dtype(model: Moondream, path: str) -> torch.dtype:
    return _FLOAT8 if path.endswith("float8") else model.dtype


def _text(model: Moondream, config: EngineConfig, weight_dtype: torch.dtype) -> TextShape:
    text: TextConfig = model.config.text
    moe = text.moe
    return TextShape(
        dim=text.dim,
        ff_dim=text.ff_dim,
        num_heads=text.n_heads,
        num_kv_heads=text.n_kv_heads,
        head_dim=text.head_dim,
        rotary_dim=text.rotary_dim,
        page_size=config.page_size,
        max_batch=StepBounds.of(config, model.device.type).max_batch_size,
        weight_dtype=weight_dtype,
        cache_dtype=_FLOAT8 if config.kv_dtype == "float8" else model.dtype,
        num_experts=0 if moe is None else moe.num_experts,
        experts_per_token=0 if moe is None else moe.experts_per_token,
    )


def _vision(vision: VisionConfig, path: str, dtype: torch.dtype) -> VisionShape:
    return VisionShape(
        dim=vision.enc_dim,
        ff_dim=vision.enc_ff_dim,
        num_heads=vision.enc_n_heads,
        num_patches=vision.num_image_tokens,
        projector_dim=max(2 * vision.enc_dim, vision.proj_inner_dim),
        weight_dtype=_FLOAT8 if path.endswith("float8") else dtype,
        has_fixed_scales=path == "calibrated-float8",
    )
