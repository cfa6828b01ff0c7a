"""Which of the ways to the same answers an engine takes: resolved once, at start. Knows settings, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from kestrel_ops import Kernels
from kestrel_runtime.config import EngineConfig
from kestrel_runtime.errors import CheckpointError

TextPathName = Literal["plain", "fused", "fused-float8"]
VisionPathName = Literal["plain", "fused", "fused-float8", "calibrated-float8"]


@dataclass(frozen=True, slots=True)
class FastPaths:
    """How text and images go through the model, and whether what can be is recorded and replayed."""

    text: TextPathName
    vision: VisionPathName
    with_graphs: bool
    resizes_images: bool
    """Whether images are resized and cut on the device, and not before they come to it."""
    kernels: Kernels

    @classmethod
    def of(cls, config: EngineConfig, device_type: str) -> FastPaths:
        """What `config` asks for on this kind of device. Raises `CheckpointError` where it cannot be had."""
        is_cuda = device_type == "cuda"
        default = "fused" if is_cuda else "plain"
        text = cast("TextPathName", default if config.text_path == "auto" else config.text_path)
        vision = cast("VisionPathName", default if config.vision_path == "auto" else config.vision_path)
        could_record = is_cuda and text != "plain"
        if config.cuda_graphs and not could_record:
            raise CheckpointError("CUDA graphs need a CUDA device and a fused text path")
        try:
            kernels = Kernels.select(device_type, dict(config.kernels))
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        return cls(
            text=text,
            vision=vision,
            with_graphs=could_record if config.cuda_graphs is None else config.cuda_graphs,
            resizes_images=is_cuda if config.resize_on_device is None else config.resize_on_device,
            kernels=kernels,
        )
