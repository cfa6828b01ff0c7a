"""Runs the steps that the scheduler has chosen: lays out inputs, enters a CUDA stream, calls the model's executor.

Only `StepHandle.wait` waits for the device.

Prefill steps (images and prompts) have one CUDA stream, decode steps another of higher priority. They share
weights, pages of the cache and request state, and nothing else: neither memory of steps nor captured graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kestrel_runtime.execution.buckets import DecodeSize, PrefillSize, batch_sizes, largest_prefill
from kestrel_runtime.execution.cuda_stream import CudaStream
from kestrel_runtime.execution.executor import CaptureResources, DeviceMemory, Executor
from kestrel_runtime.execution.graph_capture import StreamCapture
from kestrel_runtime.execution.graph_policy import GraphBudget
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.request_state import RequestState
from kestrel_runtime.execution.sampling import TokenRules
from kestrel_runtime.execution.step_inputs import (
    DecodeInputs,
    InputBuffers,
    PrefillInputs,
    fill_decode,
    fill_prefill,
    value_counts,
)
from kestrel_runtime.execution.transfer import to_device
from kestrel_runtime.output.embedding import ImageEmbeddings
from kestrel_runtime.output.output_parser import Grammar, Token
from kestrel_runtime.scheduling.batch import Batch, Chunk
from kestrel_runtime.scheduling.limits import StepBounds
from kestrel_runtime.scheduling.sequence import SequenceImage, TokenSequence

_EMBEDDING_TYPES: Mapping[str, torch.dtype] = MappingProxyType({"float16": torch.float16, "float32": torch.float32})
_NUM_SPARE_ROWS = 1
"""Rows for a probe, which is a request of the engine's own."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """The sizes of the device's state of a model's sequences."""

    vocab_size: int
    max_context: int
    values_per_token: int
    """The most values that a token carries."""
    positions_per_image: int
    embedding_dim: int
    embedding_dtype: torch.dtype
    value_kinds: Callable[[Grammar], int]
    """Bit n - 1: whether tokens with n values may be sampled under a grammar."""
    encoded_crop: tuple[int, ...] = ()
    """The shape of an encoded crop, in `embedding_dtype`; empty if crops are not cached."""


class EmbeddingsInFlight(NamedTuple):
    """The embeddings of an image that a step copies to the host."""

    mean: Tensor
    """float32 [dim + 1]: the mean, and 1.0 if all numbers are finite."""
    patches: Tensor | None
    """[patches, dim] in the format of the request; None if it wants the mean alone."""
    num_patches: int

    def on_host(self) -> ImageEmbeddings:
        """Returns the embeddings, once the copy is complete."""
        *mean, is_finite = self.mean.tolist()
        data = b"" if self.patches is None else self.patches.numpy().tobytes()
        return ImageEmbeddings(tuple(mean), self.num_patches, data, is_finite == 1.0)


class StepHandle:
    """A step in flight. Its sampled tokens stay on the device until `wait`."""

    def __init__(self, output: Tensor | None, stream: CudaStream, values_per_token: int) -> None:
        """Takes the output, float32 [sampled, 3 + V], or wider with logprobs (`TokenSampler.write`).

        It is valid in stream order; None where nothing is sampled, or not yet.
        """
        self._output: Tensor | None = None
        self._embeddings: list[EmbeddingsInFlight] = []
        self._num_columns = 3 + values_per_token
        self.add(output, stream)

    def add(self, output: Tensor | None, stream: CudaStream) -> None:
        """Records the end of what has been launched for the step, with this output."""
        self._output = output
        if output is not None:
            self._output = _copied_to_host(output)
        self.done = stream.record_event()

    def add_embeddings(self, embeddings: list[EmbeddingsInFlight]) -> None:
        """Records the embeddings that the step copies to the host, before its end."""
        self._embeddings = embeddings

    def embeddings(self) -> list[ImageEmbeddings]:
        """Returns the embeddings in the order of `Batch.read`, after `wait`."""
        return [item.on_host() for item in self._embeddings]

    def is_complete(self) -> bool:
        """Returns True if `wait` would return at once."""
        return self.done is None or self.done.query()

    def wait(self) -> list[Token]:
        """Waits for the step; returns its tokens in the order of `Batch.sampled`. Raises errors of the device."""
        if self.done is not None:
            self.done.synchronize()
        if self._output is None:
            return []
        count = self._num_columns
        if self._output.shape[1] > count:
            return [_token_with_logprobs(row, count) for row in self._output.tolist()]
        # Most tokens have no values. This runs for each token of each sequence, so the common case is kept short.
        return [_token_with_values(row, count) if row[1] else Token(int(row[0])) for row in self._output.tolist()]


class UnsampledStep(StepHandle):
    """A step that is launched up to its hidden states: `StepRunner.sample` launches the rest."""

    def __init__(
        self,
        hidden: Tensor,
        inputs: PrefillInputs | DecodeInputs,
        rows: Sequence[int],
        stream: CudaStream,
        values_per_token: int,
    ) -> None:
        """Takes `rows` of the request state, in the order of `Batch.sampled`."""
        super().__init__(None, stream, values_per_token)
        self.hidden, self.inputs, self.rows, self.stream = hidden, inputs, rows, stream


class StepRunner:
    """Runs steps on one model. Holds a sequence's row of state until `release`."""

    def __init__(
        self,
        new_executor: Callable[[DeviceMemory], Executor],
        cache: KVCache,
        shape: StateShape,
        bounds: StepBounds,
        *,
        max_graph_bytes: int | None = None,
        image_cache_bytes: int = 0,
        crop_cache_bytes: int = 0,
    ) -> None:
        """Reserves `image_cache_bytes` for image embeddings, in addition to the entries of sequences, and
        `crop_cache_bytes` for encoded crops.

        If `max_graph_bytes` is not None, steps are captured as CUDA graphs within this device memory.
        """
        self._new_executor = new_executor
        self._cache = cache
        self._shape = shape
        self._bounds = bounds
        self._device = cache.device
        self._is_cuda = self._device.type == "cuda"  # a device makes this text each time
        self.bytes_per_image = shape.positions_per_image * shape.embedding_dim * shape.embedding_dtype.itemsize
        """Embeddings of one image."""
        self.num_cached_images = image_cache_bytes // max(self.bytes_per_image, 1)
        """Entries for cached image embeddings, in addition to those that running sequences need."""
        self.bytes_per_crop = math.prod(shape.encoded_crop) * shape.embedding_dtype.itemsize
        """An encoded crop."""
        self.num_cached_crops = crop_cache_bytes // self.bytes_per_crop if shape.encoded_crop else 0
        """Places for encoded crops."""
        self._max_pages = -(-shape.max_context // cache.page_size)
        self._prefill_stream = CudaStream(self._device)
        self._decode_stream = CudaStream(self._device, is_urgent=True)
        self._graphs: CaptureResources | None = None
        if max_graph_bytes is not None:
            stream_captures = StreamCapture(self._prefill_stream), StreamCapture(self._decode_stream)
            self._graphs = CaptureResources(*stream_captures, GraphBudget(max_bytes=max_graph_bytes))
            self._decode_sizes = batch_sizes(bounds.max_batch_size)
            self._largest_prefill = largest_prefill(
                bounds.max_prefill_tokens,
                bounds.max_batch_size,
                self._max_pages,
                cuts_at_share_points=bounds.cuts_at_share_points,
            )
        self._set_up()

    @property
    def is_asynchronous(self) -> bool:
        """Returns True if a launched step runs while the caller continues."""
        return self._is_cuda

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures graphs that hold all usual traffic, if any. For the start alone: it waits for the device."""
        if self._graphs is not None:
            self._executor.capture()

    @torch.inference_mode()
    def capture_wanted(self) -> bool:
        """Captures one graph more, while there is no traffic; returns False if none is left or wanted."""
        return self._graphs is not None and self._executor.capture_wanted()

    def run(self, batch: Batch) -> list[Token]:
        """Runs a step that is not restricted to its end; returns its tokens, in the order of `Batch.sampled`."""
        return self.launch(batch).wait()

    @torch.inference_mode()
    def launch(self, batch: Batch, after: Iterable[StepHandle] = ()) -> StepHandle:
        """Begins a step, which runs after all earlier steps of its kind, and after the steps `after`.

        For a batch that `is_restricted` it returns an `UnsampledStep`, which `sample` must take next.
        """
        stream = self._decode_stream if batch.kind == "decode" else self._prefill_stream
        with stream.entered():
            for handle in after:
                stream.wait_for(handle.done)
            inputs = self._launch_images_and_lay_out(batch)
            embeddings = [self._read_embeddings(sequence) for sequence in batch.read]
            if inputs is None:
                handle = StepHandle(None, stream, self._shape.values_per_token)
            elif batch.is_restricted:
                hidden, rows = self._executor.forward(inputs), self._state.rows(batch.sampled)
                handle = UnsampledStep(hidden, inputs, rows, stream, self._shape.values_per_token)
            else:
                handle = StepHandle(self._run_whole(inputs), stream, self._shape.values_per_token)
            handle.add_embeddings(embeddings)
            return handle

    @torch.inference_mode()
    def sample(self, step: StepHandle, masks: Sequence[NDArray[np.int32] | None]) -> None:
        """Launches the rest of an `UnsampledStep`: samples under a mask [ceil(vocabulary / 32)] for each of
        `Batch.sampled`; None allows every token."""
        assert isinstance(step, UnsampledStep), "others are launched whole"
        with step.stream.entered():
            self._state.allowed.write(step.rows, masks)
            step.add(self._executor.sample(step.hidden, step.inputs)[: len(step.rows)], step.stream)

    @torch.inference_mode()
    def last_hidden(self, batch: Batch) -> Tensor:
        """Runs a prefill step without sampling: [prompts that end, dim], before the final LayerNorm."""
        with self._prefill_stream.entered():
            inputs = self._launch_images_and_lay_out(batch)
            assert isinstance(inputs, PrefillInputs), "a step with chunks"
            hidden = self._executor.prefill_hidden(inputs)
        self._prefill_stream.synchronize()  # the caller may read it on another stream
        return hidden

    def image_embeddings(self, sequence: TokenSequence) -> Tensor:
        """Returns the embeddings [positions, dim] of a sequence's first image, whose crops are all encoded.

        Raises `KeyError` where it has none.
        """
        if not sequence.images or (entry := sequence.images[0].entry) is None:
            raise KeyError(sequence.id)
        return self._embeddings[entry]

    def _read_embeddings(self, sequence: TokenSequence) -> EmbeddingsInFlight:
        """Launches the copy of a sequence's complete embeddings to the host, in the form that it wants."""
        form = sequence.request.embeddings
        assert form is not None, "others read no embeddings"
        rows = self.image_embeddings(sequence).float()
        mean, patches = rows.mean(0), None
        if form.normalize:
            mean, rows = functional.normalize(mean, dim=0), functional.normalize(rows, dim=1)
        is_finite = mean.isfinite().all()
        if form.patches:
            patches = rows.to(_EMBEDDING_TYPES[form.dtype])
            is_finite = is_finite & patches.isfinite().all()
            patches = _copied_to_host(patches)
        return EmbeddingsInFlight(_copied_to_host(torch.cat((mean, is_finite.float()[None]))), patches, len(rows))

    def release(self, sequence: TokenSequence) -> None:
        """Forgets a sequence."""
        self._state.close(sequence)
        self._executor.release(sequence)

    def close_row(self, sequence: TokenSequence) -> None:
        """Frees the row of a sequence that begins its prompt again before it is in another step."""
        self._state.close(sequence)

    def forget_images(self) -> None:
        """Forgets what has been encoded of images that are not complete."""
        self._executor.forget_images()

    def empty_device_cache(self) -> None:
        """Gives memory that is held for reuse back to the device, in the hope of larger pieces."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def restart(self) -> None:
        """Begins anew with the same weights: no images, a fresh cache. Sequences must begin their prompts again."""
        self.forget_images()
        self._executor.reset()
        self.empty_device_cache()
        self._cache.renew()
        self._set_up()

    def _set_up(self) -> None:
        shape, device, num_rows = self._shape, self._device, self._bounds.max_batch_size + _NUM_SPARE_ROWS
        rules = TokenRules(shape.vocab_size, device)
        self._state = RequestState(
            device,
            rules.row,
            shape.value_kinds,
            num_rows=num_rows,
            max_pages=self._max_pages,
            values_per_token=shape.values_per_token,
            vocab_size=shape.vocab_size,
        )
        # Preempted sequences keep their entries; there are never more of them and running ones than rows.
        # Not zeroed: on a host, memory is only taken where something is written.
        self._embeddings = torch.empty(
            (num_rows + self.num_cached_images, shape.positions_per_image, shape.embedding_dim),
            dtype=shape.embedding_dtype,
            device=device,
        )
        self._encoded_crops = torch.empty(
            (self.num_cached_crops, *shape.encoded_crop), dtype=shape.embedding_dtype, device=device
        )
        self._inputs = InputBuffers(device, shape.values_per_token)
        if self._graphs is not None:
            self._inputs.reserve(DecodeSize(self._bounds.max_batch_size, self._max_pages), self._largest_prefill)
        self._executor = self._new_executor(
            DeviceMemory(
                self._cache,
                self._state,
                rules,
                self._embeddings,
                self._encoded_crops,
                self._inputs,
                self._bounds,
                self._graphs,
            )
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # all of this was launched on no stream in particular

    def _launch_images_and_lay_out(self, batch: Batch) -> PrefillInputs | DecodeInputs | None:
        """Launches the page copies and crops of a step; returns the rest, or None if no prompt chunk is left."""
        if batch.kind == "decode":
            return self._decode_inputs(list(batch.decode))
        self._copy_and_encode(batch)
        return self._prefill_inputs(list(batch.prefill), list(batch.sampled)) if batch.prefill else None

    def _copy_and_encode(self, batch: Batch) -> None:
        if batch.copies:
            sources, targets = to_device(list(zip(*batch.copies, strict=True)), torch.int64, self._device)
            self._cache.copy_pages(sources, targets)
        if batch.encode:
            self._executor.encode(list(batch.encode))

    def _run_whole(self, inputs: PrefillInputs | DecodeInputs) -> Tensor | None:
        """Returns the sampled tokens, if there are any."""
        if isinstance(inputs, PrefillInputs) and not inputs.size.num_samples:
            self._executor.prefill_hidden(inputs)
            return None
        return self._executor.sample(self._executor.forward(inputs), inputs)[: inputs.num_sampled]

    def _prefill_inputs(self, chunks: list[Chunk], sampled: list[TokenSequence]) -> PrefillInputs:
        # Its pages may have changed since it started before, so that its row is written anew.
        self._state.open([chunk.sequence for chunk in chunks if chunk.is_first])
        lengths = [chunk.end - chunk.start for chunk in chunks]
        size = self._prefill_bucket(lengths)
        in_place = size is not None
        if size is None:
            max_pages = max(len(chunk.sequence.cache.pages) for chunk in chunks)
            size = PrefillSize(sum(lengths), len(chunks), max(lengths), len(sampled), max_pages)
        kinds = 0
        for count in value_counts(chunks):
            kinds |= 1 << (count - 1)
        uses_adapters = self._state.needs(chunk.sequence for chunk in chunks).uses_adapters
        if in_place:
            size = self._executor.padded_prefill(size, kinds, uses_adapters=uses_adapters)
        fields = self._inputs.prefill(
            size,
            lambda host: fill_prefill(
                host,
                chunks,
                sampled,
                self._state,
                self._first_embedding,
                self._cache.page_size,
            ),
            in_place=in_place,
        )
        needs = self._state.needs(sampled).sampling
        return PrefillInputs(fields, size, kinds, needs, len(sampled), in_place, uses_adapters)

    def _first_embedding(self, image: SequenceImage) -> int:
        """Returns the first of an image's rows among the embeddings of all entries, one after the other."""
        assert image.entry is not None, "an image that is computed has an entry"
        return image.entry * self._shape.positions_per_image

    def _prefill_bucket(self, lengths: list[int]) -> PrefillSize | None:
        """Returns the size of the captured graphs for a step; None where there are none for so large a one."""
        if self._graphs is None:
            return None
        largest = self._largest_prefill
        size = PrefillSize.bucket(sum(lengths), len(lengths), max(lengths), largest)
        fits = size.num_tokens <= largest.num_tokens and size.num_chunks <= largest.num_chunks
        return size if fits else None

    def _decode_inputs(self, sequences: list[TokenSequence]) -> DecodeInputs:
        needs = self._state.needs(sequences)
        if self._graphs is None:
            size = DecodeSize(len(sequences), max(len(sequence.cache.pages) for sequence in sequences))
        else:
            num_rows = next(size for size in self._decode_sizes if size >= len(sequences))
            size = self._executor.padded_decode(DecodeSize(num_rows, self._max_pages), needs)
        fields = self._inputs.decode(
            size,
            lambda host: fill_decode(host, sequences, self._state, self._cache.page_size),
            in_place=self._graphs is not None,
        )
        return DecodeInputs(fields, size, needs.sampling, len(sequences), needs.uses_adapters)


def _token_with_values(row: list[float], count: int) -> Token:
    """Returns a token from the first `count` columns of its row of a step's output, the last of them its score."""
    score = row[count - 1]
    return Token(int(row[0]), tuple(row[2 : 2 + int(row[1])]), score=score if score >= 0.0 else None)


def _copied_to_host(values: Tensor) -> Tensor:
    """Returns a tensor whose copy to the host is launched; on the host the tensor itself."""
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def _token_with_logprobs(row: list[float], first: int) -> Token:
    """Returns a token from its row of a step's output; its logprob is at column `first`, behind its score."""
    num_top = (len(row) - first - 1) // 2
    ids, logprobs = row[first + 1 : first + 1 + num_top], row[first + 1 + num_top :]
    top = tuple((int(token_id), logprob) for token_id, logprob in zip(ids, logprobs, strict=True))
    token = _token_with_values(row, first) if row[1] else Token(int(row[0]))
    return token._replace(logprob=row[first], top=top)
