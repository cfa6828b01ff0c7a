"""Contexts laid out in pages, and attention written out position by position: what the operations must equal."""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

GARBAGE = 1e4
"""Content of slots without an owner: finite, and visible in any result that reads it."""


@dataclass(frozen=True)
class Heads:
    """Query heads, key/value heads, and the width of each."""

    num_heads: int
    num_groups: int
    head_dim: int

    def queries(self, count: int) -> Tensor:
        return torch.randn(count, self.num_heads, self.head_dim)

    def context(self, length: int) -> Tensor:
        return torch.randn(length, self.num_groups, self.head_dim)


def paged(keys: list[Tensor], values: list[Tensor], page_size: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Spread contexts [length, G, D] over shuffled pages; the slots left over hold garbage."""
    counts = [-(-len(context) // page_size) for context in keys]
    num_pages = sum(counts) + 2
    order = list(range(num_pages))
    random.Random(num_pages).shuffle(order)
    num_groups, head_dim = keys[0].shape[1:]
    shape = (num_pages, num_groups, page_size, head_dim)
    key_pages, value_pages = torch.full(shape, GARBAGE), torch.full(shape, GARBAGE)
    tables = []
    for count, key, value in zip(counts, keys, values, strict=True):
        table = [order.pop() for _ in range(count)]
        for position in range(len(key)):
            page, slot = table[position // page_size], position % page_size
            key_pages[page, :, slot], value_pages[page, :, slot] = key[position], value[position]
        tables.append(torch.tensor(table))
    return key_pages, value_pages, tables


def padded(tables: list[Tensor]) -> Tensor:
    """Page tables of several lengths as one, filled up with some valid page."""
    most = max(len(table) for table in tables)
    return torch.stack([torch.cat((table, table[:1].expand(most - len(table)))) for table in tables])


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query [H, D] over the positions it may see [n, G, D], head by head."""
    heads_per_group = query.shape[0] // keys.shape[1]
    rows = []
    for head, vector in enumerate(query.double()):
        group = head // heads_per_group
        scores = keys[:, group].double() @ vector / math.sqrt(len(vector))
        weights = torch.exp(scores - scores.max())
        rows.append((weights / weights.sum()) @ values[:, group].double())
    return torch.stack(rows).float()


def sees(position: int, other: int, spans: Iterable[tuple[int, int]]) -> bool:
    """Whether one position attends to another: to those before it, and to those of its own span [start, end)."""
    return other <= position or any(start <= position < end and start <= other < end for start, end in spans)


def visible_until(spans: Iterable[tuple[int, int]], start: int, end: int) -> Tensor:
    """The same for positions [start, end), as the operations take it: each sees the positions below a number."""
    ends = {position: span_end for span_start, span_end in spans for position in range(span_start, span_end)}
    return torch.tensor([ends.get(position, position + 1) for position in range(start, end)], dtype=torch.int32)


def attend_chunk(
    queries: Tensor, keys: Tensor, values: Tensor, chunk: tuple[int, int], spans: Iterable[tuple[int, int]]
) -> Tensor:
    """The queries of positions [start, end), each over what it may see."""
    rows = []
    for row, position in enumerate(range(*chunk)):
        visible = [other for other in range(len(keys)) if sees(position, other, spans)]
        rows.append(attend(queries[row], keys[visible], values[visible]))
    return torch.stack(rows)
