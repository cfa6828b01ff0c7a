"""Defines the executor that a model family provides to run steps, and the resources that the engine lends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kestrel_runtime.execution.buckets import DecodeSize, PrefillSize
from kestrel_runtime.execution.graph_capture import StreamCapture
from kestrel_runtime.execution.graph_policy import GraphBudget
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.request_state import RequestState, RowNeeds
from kestrel_runtime.execution.sampling import TokenRules
from kestrel_runtime.execution.step_inputs import DecodeInputs, InputBuffers, PrefillInputs
from kestrel_runtime.scheduling.batch import EncodeItem
from kestrel_runtime.scheduling.limits import StepBounds
from kestrel_runtime.scheduling.sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class CaptureResources:
    """The resources of captures: a `StreamCapture` for each stream, and the memory that all graphs share."""

    prefill: StreamCapture
    decode: StreamCapture
    budget: GraphBudget


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The device memory that steps read and write. Its addresses stay valid for the life of the executor."""

    cache: KVCache
    state: RequestState
    rules: TokenRules
    embeddings: Tensor
    """Image embeddings [entries, positions, dim], an image in each entry."""
    crops: Tensor
    """The pool of encoded crops [places, *shape of one]."""
    inputs: InputBuffers
    bounds: StepBounds
    graphs: CaptureResources | None
    """None where steps run without captured graphs."""


class Executor(Protocol):
    """Runs the steps of one model. Engine thread only, in the CUDA stream that the step runner has entered.

    Enqueues and never waits for the device.
    """

    def encode(self, items: Sequence[EncodeItem]) -> None:
        """Encodes crops of images, copies them to their places in the pool, and completes images in their entries,
        also with crops that are in the pool.

        An image whose item is its first starts again, whatever has been encoded of it before.
        """
        ...

    def padded_decode(self, size: DecodeSize, needs: RowNeeds) -> DecodeSize:
        """Returns the size at which a decode step runs, whose captured graphs hold this one by padding.

        If no graph does, it is the size itself.
        """
        ...

    def padded_prefill(self, size: PrefillSize, value_kinds: int, *, uses_adapters: bool) -> PrefillSize:
        """Returns the same for a prefill step, whose tokens have values of these kinds."""
        ...

    def forward(self, inputs: PrefillInputs | DecodeInputs) -> Tensor:
        """Embeds the step's tokens, fills the cache, and returns hidden states before the final normalisation.

        They are float [N, dim] for a prefill step that samples, [B, dim] for a decode step.

        Valid until the next step of its kind, which comes after its `sample`.
        """
        ...

    def sample(self, hidden: Tensor, inputs: PrefillInputs | DecodeInputs) -> Tensor:
        """Samples after `forward` of the same inputs.

        Returns float32 [N or B, 3 + V]: id, number of values, values, score, and logprobs where a row needs them.
        Valid until the next step of its kind.
        """
        ...

    def prefill_hidden(self, inputs: PrefillInputs) -> Tensor:
        """Embeds packed tokens, fills the cache, and returns hidden states [N, dim] before the final norm."""
        ...

    def release(self, sequence: TokenSequence) -> None:
        """Forgets what is kept of a sequence's image before it is complete."""
        ...

    def forget_images(self) -> None:
        """Forgets the images of all sequences."""
        ...

    def capture(self) -> None:
        """Captures graphs that hold all usual traffic, by padding.

        Only for the start, since it waits for the device.
        """
        ...

    def capture_wanted(self) -> bool:
        """Captures one graph more, of a step that has run more than once or of usual traffic; returns False if
        none is left. Call it while there is no traffic: a request that arrives meanwhile waits for it.
        """
        ...

    def reset(self) -> None:
        """Drops all graphs: what they read and write is about to be allocated anew."""
        ...
