"""Builds the paths of text and images through the model, plain or fused, once.

A fused path holds the weights in a layout of its own. An engine that owns its model frees the originals while they
are converted, and the key-value cache is sized afterwards.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from kestrel_ops import InvariantMode, depends_on_place, invariant_linear
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.models.moondream.execution_config import UNFUSED, ExecutionConfig
from kestrel_runtime.models.moondream.fused.calibrated_vision import CalibratedVision, calibration_tiles
from kestrel_runtime.models.moondream.fused.vision import FusedVision
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.text.paths import FusedText, InvariantText, PlainText, TextPath
from kestrel_runtime.models.moondream.vision.encoder import InvariantVision, VisionModel

Vision = VisionModel | FusedVision | InvariantVision
_PRECISIONS: dict[str, Literal["model", "float8"]] = {"fused": "model", "fused-float8": "float8"}


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """The paths of text and images through one model on its device."""

    text: TextPath
    vision: Vision
    captures_prefill: bool
    """Whether CUDA graphs can capture prefill steps."""
    captures_encode: bool
    arithmetic: AbstractContextManager[Any]
    """Entered for every step of text: an `InvariantMode`, or nothing."""

    @classmethod
    def of(
        cls, model: Moondream, paths: ExecutionConfig, *, max_batch_size: int, frees_originals: bool = False
    ) -> ModelPaths:
        """Build the selected paths, for decode steps of up to `max_batch_size` sequences.

        With `frees_originals` the weights that a fused path has copied are freed block by block, and no other paths
        can be built from `model` afterwards. Embedding, final norm, head, region part and experts stay in `model`.
        Raises `CheckpointError` if the model's dimensions do not fit the vision path.
        """
        return cls(
            _text(model, paths, max_batch_size, frees_originals=frees_originals),
            _vision(model, paths, frees_originals=frees_originals),
            captures_prefill=paths.text not in UNFUSED,
            captures_encode=paths.vision not in UNFUSED,
            arithmetic=_arithmetic(model, paths),
        )


def _arithmetic(model: Moondream, paths: ExecutionConfig) -> AbstractContextManager[Any]:
    if paths.text != "invariant":
        return nullcontext()
    layers = [part for part in (*model.text.modules(), *model.region.modules()) if isinstance(part, nn.Linear)]
    examples = {tuple(layer.weight.shape): layer.weight for layer in layers}.values()
    if any(depends_on_place(invariant_linear, weight) for weight in examples):
        raise CheckpointError(
            "--deterministic: with this version of torch on this machine, a product depends on the place of its row"
        )
    return InvariantMode(invariant_linear)


def _text(model: Moondream, paths: ExecutionConfig, max_batch_size: int, *, frees_originals: bool) -> TextPath:
    if paths.text == "plain":
        return PlainText(model.text)
    if paths.text == "invariant":
        return InvariantText(model.text)
    return FusedText(
        model.text,
        paths.kernels,
        _PRECISIONS[paths.text],
        max_batch_size=max_batch_size,
        frees_originals=frees_originals,
    )


def _vision(model: Moondream, paths: ExecutionConfig, *, frees_originals: bool) -> Vision:
    if paths.vision == "plain":
        return model.vision
    if paths.vision == "invariant":
        return InvariantVision(model.vision)
    if paths.vision != "calibrated-float8":
        return FusedVision(model.vision, paths.kernels, _PRECISIONS[paths.vision], frees_originals=frees_originals)
    tiles = calibration_tiles(model.config.vision, model.device)
    try:
        return CalibratedVision(model.vision, paths.kernels, tiles, frees_originals=frees_originals)
    except ValueError as error:  # no float8 product supports these dimensions
        raise CheckpointError(f"vision path calibrated-float8: {error}") from error
