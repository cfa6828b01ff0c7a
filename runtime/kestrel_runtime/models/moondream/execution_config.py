"""Selects how an engine computes: paths, kernels and graphs, once at the start, from settings and dimensions."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, cast

from kestrel_ops import Kernels, ModelShape, has_float8_product
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.models.moondream.config import VisionConfig
from kestrel_runtime.models.moondream.kernel_shapes import model_shape
from kestrel_runtime.models.moondream.model import Moondream

TextPathName = Literal["plain", "invariant", "fused", "fused-float8"]
VisionPathName = Literal["plain", "invariant", "fused", "fused-float8", "calibrated-float8"]
UNFUSED = ("plain", "invariant")
"""The paths on plain torch."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """The paths of text and images through the model, the kernels, and whether CUDA graphs are used."""

    text: TextPathName
    vision: VisionPathName
    with_graphs: bool
    resizes_images: bool
    """Whether images are resized and tiled on the device instead of the host."""
    kernels: Kernels

    @classmethod
    def of(cls, config: EngineConfig, device_type: str, model: Moondream | None = None) -> ExecutionConfig:
        """The execution of `config` on this kind of device, with kernels that can serve `model`, if one is given.

        Where the model's dimensions do not allow a default, another path is selected and logged. Raises
        `CheckpointError` if the model or the device does not allow a setting that `config` names.
        """
        is_cuda = device_type == "cuda"
        if config.deterministic:
            return cls._invariant(config, device_type)
        default = "fused" if is_cuda else "plain"
        text = cast("TextPathName", default if config.text_path == "auto" else config.text_path)
        vision = cast("VisionPathName", default if config.vision_path == "auto" else config.vision_path)
        could_record = is_cuda and text != "plain"
        if config.cuda_graphs and not could_record:
            raise CheckpointError("CUDA graphs need a CUDA device and a fused text path")
        if model is not None and vision == "calibrated-float8":
            vision = _vision_in_float8(model.config.vision)
        shape = None if model is None else model_shape(model, config, text, vision)
        try:
            kernels = Kernels.select(device_type, dict(config.kernels), shape)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        return cls(
            text=text,
            vision=vision,
            with_graphs=could_record and _can_record(kernels, config, shape),
            resizes_images=is_cuda if config.resize_on_device is None else config.resize_on_device,
            kernels=kernels,
        )

    @classmethod
    def _invariant(cls, config: EngineConfig, device_type: str) -> ExecutionConfig:
        """The paths whose bits do not depend on the batch. Raises `CheckpointError` for what they cannot do."""
        if device_type == "cuda":
            raise CheckpointError(
                "--deterministic runs on a CPU alone: on a CUDA device no path of this version gives a request the "
                "same bits in every batch"
            )
        for option, path in (("--text-path", config.text_path), ("--vision-path", config.vision_path)):
            if path not in ("auto", "plain"):
                raise CheckpointError(f"--deterministic has a path of its own, which {option} {path} contradicts")
        if config.cuda_graphs:
            raise CheckpointError("--deterministic runs without CUDA graphs")
        if config.has_adapters:
            raise CheckpointError("--deterministic takes no adapters: their products depend on the batch")
        try:
            kernels = Kernels.select(device_type, dict(config.kernels))
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        return cls("invariant", "invariant", with_graphs=False, resizes_images=False, kernels=kernels)


def _vision_in_float8(config: VisionConfig) -> VisionPathName:
    """The float8 path whose products support the sizes of the encoder."""
    if has_float8_product(config.enc_dim, config.enc_ff_dim):
        return "calibrated-float8"
    _log.warning(
        "vision path fused-float8 instead of calibrated-float8: float8 products need multiples of 16, "
        "vision.enc_dim is %d and vision.enc_ff_dim %d",
        config.enc_dim,
        config.enc_ff_dim,
    )
    return "fused-float8"


def _can_record(kernels: Kernels, config: EngineConfig, shape: ModelShape | None) -> bool:
    """Whether CUDA graphs are enabled and can capture these kernels."""
    if config.cuda_graphs is False:
        return False
    has_experts = shape is None or (shape.text is not None and shape.text.num_experts > 0)
    waiting = [name for name in kernels.waiting_for_device() if has_experts or name != "mixture_of_experts"]
    if not waiting:
        return True
    reason = f"no CUDA graph captures kernels that wait for the device: {', '.join(waiting)}"
    if config.cuda_graphs:
        raise CheckpointError(reason)
    _log.warning("CUDA graphs are off: %s", reason)
    return False
