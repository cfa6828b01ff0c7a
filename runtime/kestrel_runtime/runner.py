"""Runs one step's batch on the model: crops to features, prompts into the cache, a new token for whoever is due.

Knows tensors and the model; decides nothing about who runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kestrel_runtime.kv_cache import KVCache
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.sampling import Sampler
from kestrel_runtime.sequence import Batch, Chunk, CropRange, Sequence
from kestrel_runtime.tokens import Token


@dataclass(slots=True)
class _Image:
    """What is known of a sequence's image: features of its crops, and once all are there its embeddings."""

    features: list[Tensor] = field(default_factory=list)
    embeddings: Tensor | None = None


class ModelRunner:
    """Model and cache behind one method. Holds a sequence's image embeddings until `release`."""

    def __init__(self, model: Moondream, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._sampler = Sampler(model)
        self._images: dict[int, _Image] = {}

    @torch.inference_mode()
    def run(self, batch: Batch) -> dict[int, Token]:
        """Run a step; returns the new token of each sequence that is due one, by sequence id."""
        hidden = self.last_hidden(batch)
        return self._sampler.draw(hidden, batch.due) if batch.due else {}

    def last_hidden(self, batch: Batch) -> Tensor:
        """Run a step up to the drawing: [sequences in `batch.due`, dim], before the final LayerNorm."""
        if batch.encode:
            self._encode(batch.encode)
        rows: list[Tensor] = []
        if batch.prefill:
            hidden = self._prefill(batch.prefill)
            ends = torch.tensor([chunk.end - chunk.start for chunk in batch.prefill]).cumsum(0) - 1
            last = [place for place, chunk in enumerate(batch.prefill) if chunk.is_last]
            rows.append(hidden[ends[last].to(hidden.device)])
        if batch.decode:
            rows.append(self._decode(batch.decode))
        return torch.cat(rows) if rows else torch.empty(0)

    def image_embeddings(self, sequence: Sequence) -> Tensor:
        """The embeddings [image tokens, dim] of a sequence whose crops are all encoded."""
        embeddings = self._images[sequence.id].embeddings
        assert embeddings is not None, "the scheduler prefills an image after its crops"
        return embeddings

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence's image."""
        self._images.pop(sequence.id, None)

    def forget_images(self) -> None:
        """Forget everybody's images; they must be encoded again before they are prefilled."""
        self._images.clear()

    def empty_device_cache(self) -> None:
        """Give memory that is held for reuse back to the device, in the hope of larger pieces."""
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def restart(self) -> None:
        """Begin anew with the same weights: no images, a fresh cache."""
        self.forget_images()
        self.empty_device_cache()
        self._cache.renew()
        self._sampler = Sampler(self._model)

    def _encode(self, ranges: list[CropRange]) -> None:
        pixels = [self._pixels(crop_range) for crop_range in ranges]
        features = self._model.vision.encode(torch.cat(pixels)).split([len(part) for part in pixels])
        for crop_range, part in zip(ranges, features, strict=True):
            image = self._images.setdefault(crop_range.sequence.id, _Image())
            image.features.append(part)
            crops = crop_range.sequence.crops
            assert crops is not None, "only sequences with an image have crops to encode"
            if crop_range.end == crops.num_crops:
                image.embeddings = self._model.vision.project(torch.cat(image.features), crops.rows, crops.columns)
                image.features.clear()

    def _pixels(self, crop_range: CropRange) -> Tensor:
        crops = crop_range.sequence.crops
        assert crops is not None, "only sequences with an image have crops to encode"
        return torch.from_numpy(crops.pixels[crop_range.start : crop_range.end]).to(self._model.device)

    def _prefill(self, chunks: list[Chunk]) -> Tensor:
        attend = self._cache.prefill(chunks)
        embeddings = torch.cat([part for chunk in chunks for part in self._embeddings(chunk)])
        return self._model.text(embeddings, attend.positions, attend)

    def _decode(self, sequences: list[Sequence]) -> Tensor:
        attend = self._cache.decode(sequences)
        embeddings = self._model.embed([sequence.tokens[-1] for sequence in sequences])
        return self._model.text(embeddings, attend.positions, attend)

    def _embeddings(self, chunk: Chunk) -> list[Tensor]:
        sequence, start, end = chunk
        num_image = sequence.num_image_tokens
        parts: list[Tensor] = []
        if start == 0:
            parts.append(self._model.embed(sequence.tokens[:1]))
            if num_image:
                parts.append(self.image_embeddings(sequence))
        first, last = max(start - num_image, 1), end - num_image
        if last > first:
            parts.append(self._model.embed(sequence.tokens[first:last]))
        return parts
