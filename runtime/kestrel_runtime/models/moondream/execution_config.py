"""Selects how an engine computes: backends, kernels and graphs, once at the start, from settings and dimensions."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, cast

import torch

from kestrel_ops import DeviceLimits, Kernels, ModelShape, TextShape, VisionShape, has_float8_product
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.models.moondream.config import TextConfig, VisionConfig
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.scheduling.limits import StepBounds

TextBackendName = Literal["plain", "invariant", "fused", "fused-float8"]
VisionBackendName = Literal["plain", "invariant", "fused", "fused-float8", "calibrated-float8"]
_FLOAT8 = torch.float8_e4m3fn
_PREFILL = "prefill_attention"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """The backends of text and images, the kernels, and whether CUDA graphs are used."""

    text: TextBackendName
    vision: VisionBackendName
    with_graphs: bool
    captures_prefill: bool
    """True if CUDA graphs can capture the attention of prefill steps."""
    resizes_images: bool
    """True if images are resized and divided into crops on the device instead of the host."""
    kernels: Kernels

    @classmethod
    def of(cls, config: EngineConfig, device_type: str, model: Moondream | None = None) -> ExecutionConfig:
        """Returns the execution of `config` on this kind of device, with kernels that can serve `model`, if one is
        given.

        Where the model's dimensions do not allow a default, another backend is selected and logged. Raises
        `CheckpointError` if the model or the device does not allow a setting that `config` names.
        """
        if problems := tuple(config.contradictions(device_type)):
            raise CheckpointError("; ".join(problems))
        chosen = config.resolved(device_type)
        text, vision = (
            cast("TextBackendName", chosen.text_backend),
            cast("VisionBackendName", chosen.vision_backend),
        )
        if model is not None and vision == "calibrated-float8":
            vision = _vision_in_float8(model.config.vision)
        shape = None if model is None else model_shape(model, config, text, vision)
        if shape is not None:
            _require_float8(shape, config, text, vision)
        try:
            kernels = Kernels.select(device_type, dict(config.kernels), shape)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        return cls(
            text=text,
            vision=vision,
            with_graphs=bool(chosen.cuda_graphs) and _can_record(kernels, config, shape),
            captures_prefill=config.deterministic or _PREFILL not in kernels.waiting_for_device(),
            resizes_images=bool(chosen.resize_on_device),
            kernels=kernels,
        )

    def prepare_kernels(self, model: Moondream, config: EngineConfig) -> None:
        """Compiles and loads what libraries would compile at the first step. Raises `CheckpointError` if they
        cannot."""
        try:
            self.kernels.prepare(model_shape(model, config, self.text, self.vision))
        except ValueError as error:
            raise CheckpointError(str(error)) from error


def _require_float8(shape: ModelShape, config: EngineConfig, text: str, vision: str) -> None:
    """Raises `CheckpointError` for backends and caches in float8 on a CUDA device that has no such products.

    Definitions in torch would serve them, several times as slowly as bfloat16.
    """
    reason = shape.lacks((8, 9), "float8")
    settings = {"--text-backend": text, "--vision-backend": vision, "--kv-dtype": config.kv_dtype}
    named = [f"{option} {value}" for option, value in settings.items() if value.endswith("float8")]
    if named and reason is not None:
        raise CheckpointError(f"{', '.join(named)}: {reason}; --precision bfloat16 does not need it")


def _vision_in_float8(config: VisionConfig) -> VisionBackendName:
    """Returns the float8 backend whose products support the sizes of the encoder."""
    if has_float8_product(config.enc_dim, config.enc_ff_dim):
        return "calibrated-float8"
    _log.warning(
        "vision backend fused-float8 instead of calibrated-float8: float8 products need multiples of 16, "
        "vision.enc_dim is %d and vision.enc_ff_dim %d",
        config.enc_dim,
        config.enc_ff_dim,
    )
    return "fused-float8"


def _can_record(kernels: Kernels, config: EngineConfig, shape: ModelShape | None) -> bool:
    """Returns True if CUDA graphs can capture these kernels, or all but the attention of prefill steps.

    Raises `CheckpointError` if not and `config` has them on.
    """
    has_experts = shape is None or (shape.text is not None and shape.text.num_experts > 0)
    normal, invariant, experts = (
        {_PREFILL, "rotary_decode_attention", "mixture_of_experts"},
        {"invariant_attention", "invariant_experts"},
        {"mixture_of_experts", "invariant_experts"},
    )
    unused = (normal if config.deterministic else invariant) | (set() if has_experts else experts)
    waiting = [name for name in kernels.waiting_for_device() if name not in unused]
    if waiting == [_PREFILL]:
        _log.warning("no CUDA graph captures prefill steps: %s waits for the device", _PREFILL)
    if waiting in ([], [_PREFILL]):
        return True
    reason = f"no CUDA graph captures kernels that wait for the device: {', '.join(waiting)}"
    if config.cuda_graphs:
        raise CheckpointError(reason)
    _log.warning("CUDA graphs are off: %s", reason)
    return False


def model_shape(model: Moondream, config: EngineConfig, text_backend: str, vision_backend: str) -> ModelShape:
    """Returns the sizes and types of `model` on its device, for these backends of text and images."""
    device = model.device
    return ModelShape(
        device_type=_type(device),
        capability=DeviceLimits.of(device).capability,
        dtype=model.dtype,
        text=None if text_backend == "plain" else _text(model, config, _weight_dtype(model, text_backend)),
        vision=None
        if vision_backend == "plain"
        else vision_shape(model.config.vision, vision_backend, model.dtype),
    )


def _type(device: torch.device) -> str:
    """Returns the type of a device; `meta` stands for a CUDA device (`meta_stands_for`)."""
    return "cuda" if device.type == "meta" else device.type


def _weight_dtype(model: Moondream, backend: str) -> torch.dtype:
    return _FLOAT8 if backend.endswith("float8") else model.dtype


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
        max_batch=StepBounds.of(config, _type(model.device)).max_batch_size,
        weight_dtype=weight_dtype,
        cache_dtype=_FLOAT8 if config.kv_dtype == "float8" else model.dtype,
        num_experts=0 if moe is None else moe.num_experts,
        experts_per_token=0 if moe is None else moe.experts_per_token,
    )


def vision_shape(vision: VisionConfig, backend: str, dtype: torch.dtype) -> VisionShape:
    """Returns the sizes and types of the vision part of a model of `dtype`, for this backend."""
    return VisionShape(
        dim=vision.enc_dim,
        ff_dim=vision.enc_ff_dim,
        num_heads=vision.enc_n_heads,
        num_patches=vision.num_image_tokens,
        projector_dim=max(2 * vision.enc_dim, vision.proj_inner_dim),
        weight_dtype=_FLOAT8 if backend.endswith("float8") else dtype,
        has_fixed_scales=backend == "calibrated-float8",
    )
