import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel_ops import prefill_attention
from tests.kernels.paged import Heads, attend_chunk, paged

HEADS = (Heads(1, 1, 8), Heads(4, 4, 6), Heads(6, 2, 4), Heads(4, 1, 16))


def some_chunk(draw):
    """(prefix length, start, end) of a legal chunk: it begins behind the prefix or holds all of it."""
    prefix_length = draw.choice((0, 0, 1, 5, 9))
    start = 0 if draw.random() < 0.5 else draw.randint(prefix_length, prefix_length + 12)
    end = max(prefix_length, start) + draw.randint(1, 9)
    return prefix_length, start, end


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), heads=st.sampled_from(HEADS), page_size=st.integers(1, 7))
def test_every_row_is_attention_written_out(seed, heads, page_size):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    plans = [some_chunk(draw) for _ in range(draw.randint(1, 4))]
    keys = [heads.context(end) for _, _, end in plans]
    values = [heads.context(end) for _, _, end in plans]
    queries = [heads.queries(end - start) for _, start, end in plans]
    key_pages, value_pages, tables = paged(keys, values, page_size)
    attended = prefill_attention(
        torch.cat(queries),
        key_pages,
        value_pages,
        tables,
        [(start, end) for _, start, end in plans],
        [prefix_length for prefix_length, _, _ in plans],
    )
    wanted = [
        attend_chunk(query, key, value, (start, end), prefix_length)
        for query, key, value, (prefix_length, start, end) in zip(queries, keys, values, plans, strict=True)
    ]
    torch.testing.assert_close(attended, torch.cat(wanted), rtol=1e-4, atol=1e-5)


class Prompt:
    """One random context over odd pages; `run` attends to it in the chunks asked for."""

    def __init__(self, length=13, page_size=3, heads=HEADS[2]):
        torch.manual_seed(length)
        self.keys, self.values = heads.context(length), heads.context(length)
        self.queries = heads.queries(length)
        self.page_size = page_size

    def run(self, chunk, prefix_length):
        key_pages, value_pages, tables = paged([self.keys], [self.values], self.page_size)
        start, end = chunk
        return prefill_attention(self.queries[start:end], key_pages, value_pages, tables, [chunk], [prefix_length])


@pytest.mark.parametrize("changed", [0, 4, 5, 9, 12])
def test_without_a_prefix_a_position_sees_none_that_comes_later(changed):
    prompt = Prompt()
    before = prompt.run((0, 13), 0)
    prompt.keys[changed] += 1
    prompt.values[changed] -= 1
    differs = (prompt.run((0, 13), 0) != before).flatten(1).any(dim=1)
    assert differs.tolist() == [position >= changed for position in range(13)]


def test_positions_of_the_prefix_see_all_of_it_and_nothing_behind_it():
    prompt = Prompt()
    before = prompt.run((0, 13), 5)
    prompt.values[4] += 1  # the last of the prefix
    assert (prompt.run((0, 13), 5) != before).flatten(1).any(dim=1).all()
    before = prompt.run((0, 13), 5)
    prompt.values[5] += 1  # the first behind it
    differs = (prompt.run((0, 13), 5) != before).flatten(1).any(dim=1)
    assert differs.tolist() == [False] * 5 + [True] * 8


@pytest.mark.parametrize("cuts", [(0, 5, 13), (0, 6, 7, 13), (0, 12, 13)])
def test_chunks_add_up_to_the_whole(cuts):
    prompt = Prompt()
    parts = [prompt.run((start, end), 5) for start, end in itertools.pairwise(cuts)]
    torch.testing.assert_close(torch.cat(parts), prompt.run((0, 13), 5))


def test_a_sequence_attends_the_same_in_any_company():
    heads = HEADS[1]
    torch.manual_seed(0)
    keys, values = [heads.context(n) for n in (7, 4, 11)], [heads.context(n) for n in (7, 4, 11)]
    queries = [heads.queries(n) for n in (7, 2, 6)]
    chunks, prefixes = [(0, 7), (2, 4), (5, 11)], [3, 0, 5]
    key_pages, value_pages, tables = paged(keys, values, 4)
    together = prefill_attention(torch.cat(queries), key_pages, value_pages, tables, chunks, prefixes)
    alone = [
        prefill_attention(query, key_pages, value_pages, [table], [chunk], [prefix])
        for query, table, chunk, prefix in zip(queries, tables, chunks, prefixes, strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=0)


def test_the_type_of_the_queries_is_kept():
    prompt = Prompt()
    in_float32 = prompt.run((0, 13), 5)
    prompt.keys, prompt.values, prompt.queries = (
        prompt.keys.bfloat16(),
        prompt.values.bfloat16(),
        prompt.queries.bfloat16(),
    )
    key_pages, value_pages, tables = paged([prompt.keys], [prompt.values], prompt.page_size)
    in_bfloat16 = prefill_attention(
        prompt.queries, key_pages.bfloat16(), value_pages.bfloat16(), tables, [(0, 13)], [5]
    )
    assert in_bfloat16.dtype == torch.bfloat16
    torch.testing.assert_close(in_bfloat16.float(), in_float32, rtol=0.05, atol=0.05)
