"""Attention of one sequence without a cache, to compare others with."""

from collections.abc import Iterable

import torch
from torch import Tensor


class DenseAttend:
    """Attention of one sequence, written out: keeps all keys and values, position by position."""

    def __init__(self, prefix_length: int = 0, spans: Iterable[tuple[int, int]] = ()) -> None:
        """The first `prefix_length` positions and those of each span [start, end) attend to each other."""
        self.spans = [(0, prefix_length), *spans]
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys[layer] = torch.cat((self.keys[layer], key)) if layer in self.keys else key
        self.values[layer] = torch.cat((self.values[layer], value)) if layer in self.values else value
        length = len(self.keys[layer])
        heads_per_group = query.shape[1] // key.shape[1]
        keys = self.keys[layer].repeat_interleave(heads_per_group, dim=1)
        values = self.values[layer].repeat_interleave(heads_per_group, dim=1)
        rows = []
        for row, position in enumerate(range(length - len(query), length)):
            visible = max([position + 1, *(end for start, end in self.spans if start <= position < end)])
            scores = torch.einsum("hd,nhd->hn", query[row], keys[:visible]) / query.shape[-1] ** 0.5
            rows.append(torch.einsum("hn,nhd->hd", scores.softmax(dim=-1), values[:visible]))
        return torch.stack(rows)
