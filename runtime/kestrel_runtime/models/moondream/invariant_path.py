"""The paths of `--deterministic`: the same bits in any batch, chunking, state of the cache, and preemption."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kestrel_ops import invariant_attention, write_kv
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.step_inputs import PackedChunks
from kestrel_runtime.models.moondream.adapters.slabs import RowAdapters
from kestrel_runtime.models.moondream.text import TextModel
from kestrel_runtime.models.moondream.text_path import single_tokens
from kestrel_runtime.models.moondream.vision import VisionModel


class InvariantText:
    """The decoder block by block, with attention that does not depend on the step. Run it in an `InvariantMode`.

    A decode step is a prompt of one token for each sequence: what computes a token once computes it always.
    """

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
        assert adapters is None, "refused at the start"
        return self._text(embeddings, plan.positions, _Attention(cache, plan))[rows]

    def decode(
        self,
        embeddings: Tensor,
        positions: Tensor,
        page_table: Tensor,
        cache: KVCache,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """A negative position is padding: nothing is written, and its hidden state is undefined."""
        rows = torch.arange(len(positions), device=positions.device)
        plan = single_tokens(positions, page_table, cache.page_size)
        return self.prefill(embeddings, plan, rows, cache, adapters)


class InvariantVision:
    """The vision encoder, one tile and one image at a time: products of the same shapes for the same image."""

    def __init__(self, vision: VisionModel) -> None:
        self._vision = vision

    def encode(self, tiles: Tensor) -> Tensor:
        """uint8 tiles [N, side, side, channels] → features [N, patches, enc_dim]."""
        return torch.cat([self._vision.encode(tile) for tile in tiles.split(1)])

    def project_all(self, features: Iterable[Tensor], tilings: Iterable[tuple[int, int]]) -> Tensor:
        """Features of several images and their (rows, columns) → embeddings [images, patches, text dim]."""
        return self._vision.project_all(features, tilings)


class _Attention:
    """Writes keys and values to their pages and reads all of them from there, those of the step as well."""

    def __init__(self, cache: KVCache, plan: PackedChunks) -> None:
        self._cache = cache
        self._plan = plan

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        plan, pages = self._plan, self._cache.layer(layer)
        scales = (pages.key_scale, pages.value_scale)
        write_kv(key, value, pages.key_pages, pages.value_pages, plan.slots, *scales)
        return invariant_attention(
            query,
            pages.key_pages,
            pages.value_pages,
            plan.page_table,
            plan.query_starts,
            plan.lengths,
            plan.prefix_lengths,
            *scales,
        )
