"""Attention of a row is the same bits however its sequence is divided, and what `prefill_attention` defines."""

import itertools
import random

import pytest
import torch

from kestrel_ops import invariant_attention, prefill_attention
from tests.kernels.paged import GARBAGE, Heads, padded, paged

HEADS = (Heads(1, 1, 8), Heads(6, 2, 4), Heads(3, 3, 20))


class Context:
    """Sequences in shuffled pages, all their keys and values in place; the slots left over hold NaN."""

    def __init__(self, lengths, prefixes, heads, page_size, seed=0):
        torch.manual_seed(seed)
        self.lengths, self.prefixes, self.page_size = lengths, prefixes, page_size
        self.keys, self.values = ([heads.context(length) for length in lengths] for _ in range(2))
        self.queries = [heads.queries(length) for length in lengths]
        key_pages, value_pages, self.tables = paged(self.keys, self.values, page_size)
        self.key_pages, self.value_pages = (
            pages.masked_fill(pages == GARBAGE, float("nan")) for pages in (key_pages, value_pages)
        )

    def run(self, chunks):
        """Attention of chunks (sequence, start, end), one after the other."""
        query = torch.cat([self.queries[index][start:end] for index, start, end in chunks])
        bounds = torch.tensor([0, *(end - start for _, start, end in chunks)], dtype=torch.int32).cumsum(0)
        return invariant_attention(
            query,
            self.key_pages,
            self.value_pages,
            padded([self.tables[index] for index, _, _ in chunks]),
            bounds.to(torch.int32),
            torch.tensor([end for _, _, end in chunks], dtype=torch.int32),
            torch.tensor([self.prefixes[index] for index, _, _ in chunks], dtype=torch.int32),
        )


@pytest.mark.parametrize("heads", HEADS)
def test_it_is_the_attention_of_a_prompt(heads):
    context = Context([201, 5, 33], [9, 0, 33], heads, 7)
    chunks = [(0, 0, 201), (1, 0, 5), (2, 0, 33)]
    empty = torch.zeros(1, heads.num_groups, 7, heads.head_dim)
    for index, start, end in chunks:
        wanted = prefill_attention(
            context.queries[index],
            context.keys[index],
            context.values[index],
            empty,
            empty,
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([0, end], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            torch.tensor([context.prefixes[index]], dtype=torch.int32),
            end,
        )
        torch.testing.assert_close(context.run([(index, start, end)]), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_a_row_has_the_same_bits_however_its_sequence_is_divided(seed):
    chance = random.Random(seed)
    heads = HEADS[seed % len(HEADS)]
    lengths = [150, 41, 17, 300]
    context = Context(lengths, [40, 0, 17, 3], heads, 16, seed)
    whole = [context.run([(index, 0, length)]) for index, length in enumerate(lengths)]
    for _ in range(6):
        chunks, wanted = [], []
        for index in chance.sample(range(4), k=chance.randint(1, 4)):
            prefix, length = context.prefixes[index], lengths[index]
            cuts = sorted({prefix or 1, length, *(chance.randint(prefix or 1, length) for _ in range(3))})
            for start, end in itertools.pairwise([0, *cuts] if chance.random() < 0.5 else cuts):
                chunks.append((index, start, end))
                wanted.append(whole[index][start:end])
        if chunks:
            assert torch.equal(context.run(chunks), torch.cat(wanted))


def test_tokens_that_are_decoded_have_the_bits_of_their_prompt():
    context = Context([140, 77], [5, 0], HEADS[1], 16)
    whole = [context.run([(index, 0, length)]) for index, length in enumerate(context.lengths)]
    decoded = context.run([(0, 139, 140), (1, 76, 77)])
    assert torch.equal(decoded, torch.cat([whole[0][-1:], whole[1][-1:]]))
