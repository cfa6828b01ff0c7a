"""Builds the backends that compute text and images, once, when the engine starts.

A plain backend runs the modules of the model one operation after the other. A fused backend runs fused kernels and
holds the weights in a layout of its own: an engine that owns its model frees the originals while it converts them,
and sizes the key-value cache afterwards. An invariant backend, for `--deterministic`, gives each row the same bits
in any batch.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from kestrel_ops import InvariantMode, Kernels, depends_on_chunks, depends_on_place
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.step_inputs import PackedChunks
from kestrel_runtime.models.moondream.adapters.slabs import RowAdapters
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.models.moondream.fused.calibrated_vision import CalibratedVision, calibration_crops
from kestrel_runtime.models.moondream.fused.decode import FusedDecoder
from kestrel_runtime.models.moondream.fused.prefill import FusedPrefill
from kestrel_runtime.models.moondream.fused.vision import FusedVision
from kestrel_runtime.models.moondream.fused.weights import fused_blocks, prompt_blocks
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.text.decoder import TextModel
from kestrel_runtime.models.moondream.vision.encoder import InvariantVision, VisionModel

_log = logging.getLogger(__name__)

VisionBackend = VisionModel | FusedVision | InvariantVision
_NUM_TRIED = 200
"""Positions of the context with which attention is tried: several blocks of keys, and a part of one."""
_PRECISIONS: dict[str, Literal["model", "float8"]] = {"fused": "model", "fused-float8": "float8"}


class TextBackend(Protocol):
    """Interface of the decoder. Hidden states are those of the last block, before the final LayerNorm."""

    def prefill(
        self,
        embeddings: Tensor,
        plan: PackedChunks,
        rows: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """Computes packed tokens [T, dim] → hidden states of `rows` [n] int64: [n, dim]."""
        ...

    def decode(
        self,
        embeddings: Tensor,
        positions: Tensor,
        page_table: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """Computes a token of each sequence [B, dim], at positions [B] int64, pages [B, most] int32 → [B, dim]."""
        ...


class PlainText:
    """The decoder block by block, one operation after the other."""

    def __init__(self, text: TextModel) -> None:
        self._text = text

    def prefill(
        self,
        embeddings: Tensor,
        plan: PackedChunks,
        rows: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        return self._text(embeddings, plan.positions, cache.prefill(plan), adapters)[rows]

    def decode(
        self,
        embeddings: Tensor,
        positions: Tensor,
        page_table: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        return self._text(embeddings, positions, cache.decode(positions, page_table), adapters)


def single_tokens(positions: Tensor, page_table: Tensor, page_size: int) -> PackedChunks:
    """Returns a decode step as prompts of one token each; a negative position is padding, which writes nothing."""
    known = positions.clamp(min=0)
    lengths = (known + 1).to(torch.int32)
    pages = page_table.gather(1, (known // page_size)[:, None].to(torch.int64))[:, 0].to(torch.int64)
    return PackedChunks(
        positions=known,
        slots=torch.where(positions >= 0, pages * page_size + known % page_size, -1),
        page_table=page_table,
        query_starts=torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device),
        lengths=lengths,
        visible_until=lengths,
        max_chunk=1,
    )


class FusedText:
    """The decoder on fused operations. `decode` does not synchronise, so it can be captured."""

    def __init__(
        self,
        text: TextModel,
        kernels: Kernels,
        precision: Literal["model", "float8"],
        *,
        max_batch_size: int,
        frees_originals: bool = False,
    ) -> None:
        """Copies the weights of the blocks in the layout of the fused operations.

        With `frees_originals` the matrices of `text.blocks` are freed block by block, so that only one copy of them
        is in memory. `text` keeps its embedding and its head.
        """
        blocks = fused_blocks(text, precision, frees_originals=frees_originals)
        matrices = [matrix for block in blocks for matrix in (block.up, block.down)]
        if precision == "float8" and (num_kept := sum(matrix.scale is None for matrix in matrices)):
            _log.warning(
                "%d of %d text matrices stay in %s: float8 products need multiples of 16",
                num_kept,
                len(matrices),
                text.wte.dtype,
            )
        self._prefill = FusedPrefill(text, prompt_blocks(text, blocks, frees_originals=frees_originals), kernels)
        self._decoder = FusedDecoder(text, blocks, kernels)
        self._workspace = self._decoder.workspace(max_batch_size)

    def prefill(
        self,
        embeddings: Tensor,
        plan: PackedChunks,
        rows: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        return self._prefill.forward(embeddings, plan, cache, rows, adapters)

    def decode(
        self,
        embeddings: Tensor,
        positions: Tensor,
        page_table: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """Computes a decode step; a negative position is padding: no write, an undefined hidden state."""
        return self._decoder.forward(embeddings, positions, page_table, cache, self._workspace, adapters)


class InvariantText:
    """The decoder with fused weights, and kernels of which each row has the same bits in any step.

    Run it in an `InvariantMode`. A decode step is a prompt of one token for each sequence: what computes a token
    once computes it always.
    """

    def __init__(self, text: TextModel, kernels: Kernels, *, frees_originals: bool = False) -> None:
        """Takes the kernels of `Kernels.invariant()`. With `frees_originals` the matrices of `text` are freed."""
        blocks = fused_blocks(text, "model", frees_originals=frees_originals)
        blocks = prompt_blocks(text, blocks, frees_originals=frees_originals)
        self._prefill = FusedPrefill(text, blocks, kernels)

    def prefill(
        self,
        embeddings: Tensor,
        plan: PackedChunks,
        rows: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        assert adapters is None, "refused at the start"
        return self._prefill.forward(embeddings, plan, cache, rows)

    def decode(
        self,
        embeddings: Tensor,
        positions: Tensor,
        page_table: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """Computes a decode step; a negative position is padding: no write, an undefined hidden state."""
        rows = torch.arange(len(positions), device=positions.device)
        plan = single_tokens(positions, page_table, cache.page_size)
        return self.prefill(embeddings, plan, rows, cache, adapters)


@dataclass(frozen=True, slots=True)
class Backends:
    """The backends of text and images of one model on its device."""

    text: TextBackend
    vision: VisionBackend
    captures_prefill: bool
    """True if CUDA graphs can capture prefill steps."""
    captures_encode: bool
    arithmetic: AbstractContextManager[Any]
    """Entered for every step of text: an `InvariantMode`, or nothing."""

    @property
    def is_invariant(self) -> bool:
        """Returns True if a row has the same bits in any batch."""
        return isinstance(self.arithmetic, InvariantMode)

    @classmethod
    def of(
        cls, model: Moondream, execution: ExecutionConfig, *, max_batch_size: int, frees_originals: bool = False
    ) -> Backends:
        """Builds the selected backends, for decode steps of up to `max_batch_size` sequences.

        With `frees_originals` the weights that a fused backend has copied are freed block by block, and no other
        backends can be built from `model` afterwards. Embedding, final norm, head, region part and experts stay.
        Raises `CheckpointError` if the model's dimensions do not fit the vision backend.
        """
        is_invariant = execution.text == "invariant"
        return cls(
            _text(model, execution, max_batch_size, frees_originals=frees_originals),
            _vision(model, execution, frees_originals=frees_originals),
            captures_prefill=execution.text != "plain" and execution.captures_prefill,
            captures_encode=execution.vision != "plain",
            arithmetic=InvariantMode(execution.kernels.invariant_linear) if is_invariant else nullcontext(),
        )


def require_invariance(model: Moondream, execution: ExecutionConfig, page_size: int, dtype: torch.dtype) -> None:
    """Tries whether products and attention of the invariant backends depend on the batch, on this machine.

    One matrix of each size is tried, and pages of `dtype`. Raises `CheckpointError` if they do.
    """
    if execution.text != "invariant":
        return
    modules = (*model.text.modules(), *model.region.modules())
    layers = [part for part in modules if isinstance(part, nn.Linear) and not part.weight.is_meta]
    examples = {tuple(layer.weight.shape): layer.weight for layer in layers}.values()
    config = model.config.text
    cache = KVCache(replace(config, n_layers=1), -(-_NUM_TRIED // page_size), page_size, model.device, dtype)
    pages, attention = cache.layer(0), execution.kernels.invariant_attention
    scales = (pages.key_scale, pages.value_scale)
    if any(
        depends_on_place(execution.kernels.invariant_linear, weight) for weight in examples
    ) or depends_on_chunks(attention, config.n_heads, pages.key_pages, pages.value_pages, model.dtype, scales):
        raise CheckpointError(
            "--deterministic: with this version of torch on this machine, the bits of a row depend on its batch"
        )


def _text(
    model: Moondream, execution: ExecutionConfig, max_batch_size: int, *, frees_originals: bool
) -> TextBackend:
    text, kernels = model.text, execution.kernels
    if execution.text == "plain":
        return PlainText(text)
    if execution.text == "invariant":
        return InvariantText(text, kernels.invariant(), frees_originals=frees_originals)
    precision = _PRECISIONS[execution.text]
    return FusedText(text, kernels, precision, max_batch_size=max_batch_size, frees_originals=frees_originals)


def _vision(model: Moondream, execution: ExecutionConfig, *, frees_originals: bool) -> VisionBackend:
    vision, kernels = model.vision, execution.kernels
    if execution.vision == "plain":
        return vision
    if execution.vision == "invariant":
        if model.device.type == "cpu":
            return InvariantVision(vision)
        return FusedVision(vision, kernels.invariant(), "model", frees_originals=frees_originals)
    if execution.vision != "calibrated-float8":
        return FusedVision(vision, kernels, _PRECISIONS[execution.vision], frees_originals=frees_originals)
    crops = calibration_crops(model.config.vision, model.device)
    try:
        return CalibratedVision(vision, kernels, crops, frees_originals=frees_originals)
    except ValueError as error:  # no float8 product supports these dimensions
        raise CheckpointError(f"vision backend calibrated-float8: {error}") from error
