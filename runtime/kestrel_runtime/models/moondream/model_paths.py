"""Builds the paths of text and images through the model, plain or fused, once.

A fused path holds the weights in a layout of its own. An engine that owns its model frees the originals while they
are converted, and the key-value cache is sized afterwards.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from kestrel_ops import InvariantMode, depends_on_chunks, depends_on_place
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.models.moondream.fused.calibrated_vision import CalibratedVision, calibration_crops
from kestrel_runtime.models.moondream.fused.vision import FusedVision
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.text.paths import FusedText, InvariantText, PlainText, TextPath
from kestrel_runtime.models.moondream.vision.encoder import InvariantVision, VisionModel

Vision = VisionModel | FusedVision | InvariantVision
_NUM_TRIED = 200
"""Positions of the context with which attention is tried: several blocks of keys, and a part of one."""
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

    @property
    def is_invariant(self) -> bool:
        """Whether a row has the same bits in any batch."""
        return isinstance(self.arithmetic, InvariantMode)

    @classmethod
    def of(
        cls, model: Moondream, paths: ExecutionConfig, *, max_batch_size: int, frees_originals: bool = False
    ) -> ModelPaths:
        """Build the selected paths, for decode steps of up to `max_batch_size` sequences.

        With `frees_originals` the weights that a fused path has copied are freed block by block, and no other paths
        can be built from `model` afterwards. Embedding, final norm, head, region part and experts stay in `model`.
        Raises `CheckpointError` if the model's dimensions do not fit the vision path.
        """
        is_invariant = paths.text == "invariant"
        return cls(
            _text(model, paths, max_batch_size, frees_originals=frees_originals),
            _vision(model, paths, frees_originals=frees_originals),
            captures_prefill=paths.text != "plain",
            captures_encode=paths.vision != "plain",
            arithmetic=InvariantMode(paths.kernels.invariant_linear) if is_invariant else nullcontext(),
        )


def require_invariance(model: Moondream, paths: ExecutionConfig, page_size: int, dtype: torch.dtype) -> None:
    """Try whether products and attention of the invariant paths depend on the batch, on this machine.

    One matrix of each size is tried, and pages of `dtype`. Raises `CheckpointError` if they do.
    """
    if paths.text != "invariant":
        return
    modules = (*model.text.modules(), *model.region.modules())
    layers = [part for part in modules if isinstance(part, nn.Linear) and not part.weight.is_meta]
    examples = {tuple(layer.weight.shape): layer.weight for layer in layers}.values()
    config = model.config.text
    cache = KVCache(replace(config, n_layers=1), -(-_NUM_TRIED // page_size), page_size, model.device, dtype)
    pages, attention = cache.layer(0), paths.kernels.invariant_attention
    scales = (pages.key_scale, pages.value_scale)
    if any(depends_on_place(paths.kernels.invariant_linear, weight) for weight in examples) or depends_on_chunks(
        attention, config.n_heads, pages.key_pages, pages.value_pages, model.dtype, scales
    ):
        raise CheckpointError(
            "--deterministic: with this version of torch on this machine, the bits of a row depend on its batch"
        )


def _text(model: Moondream, paths: ExecutionConfig, max_batch_size: int, *, frees_originals: bool) -> TextPath:
    if paths.text == "plain":
        return PlainText(model.text)
    if paths.text == "invariant":
        return InvariantText(model.text, paths.kernels.invariant(), frees_originals=frees_originals)
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
        if model.device.type == "cpu":
            return InvariantVision(model.vision)
        return FusedVision(model.vision, paths.kernels.invariant(), "model", frees_originals=frees_originals)
    if paths.vision != "calibrated-float8":
        return FusedVision(model.vision, paths.kernels, _PRECISIONS[paths.vision], frees_originals=frees_originals)
    crops = calibration_crops(model.config.vision, model.device)
    try:
        return CalibratedVision(model.vision, paths.kernels, crops, frees_originals=frees_originals)
    except ValueError as error:  # no float8 product supports these dimensions
        raise CheckpointError(f"vision path calibrated-float8: {error}") from error
