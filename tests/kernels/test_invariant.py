"""Attention of a row is the same bits however its sequence is divided, and what `prefill_attention` defines."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from kestrel_ops import InvariantMode, depends_on_place, invariant_attention, invariant_linear, prefill_attention
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


SIZES = [(37, 48), (256, 96), (77, 1), (1, 5), (1024, 40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_a_row_has_the_same_bits_alone_first_last_and_among_many(size, dtype):
    torch.manual_seed(1)
    width, height = size
    rows, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((99, width), (height, width), (height,)))
    together = invariant_linear(rows, weight, bias)
    for count in (1, 2, 15, 16, 17, 98):
        assert torch.equal(invariant_linear(rows[:count], weight, bias), together[:count])
        assert torch.equal(invariant_linear(rows[-count:], weight, bias), together[-count:])
    assert not depends_on_place(invariant_linear, weight)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_a_product(size):
    torch.manual_seed(2)
    rows, weight = torch.randn(3, 7, size[0]), torch.randn(size[1], size[0])
    assert invariant_linear(rows, weight).shape == (3, 7, size[1])
    torch.testing.assert_close(invariant_linear(rows, weight), linear(rows, weight), rtol=1e-4, atol=1e-4)
    assert invariant_linear(rows[:0], weight).shape == (0, 7, size[1])


def test_a_product_that_depends_on_its_place_is_found():
    def by_row_number(rows, weight):
        return linear(rows, weight) + torch.arange(len(rows))[:, None] * 1e-6

    assert depends_on_place(by_row_number, torch.randn(8, 16))


def work(rows):
    """What the decoder is made of, at widths that are no multiple of a vector."""
    torch.manual_seed(0)
    layer, norm = nn.Linear(37, 101), nn.LayerNorm(37)
    inner = gelu(layer(norm(rows)), approximate="tanh")
    gate = torch.sigmoid(inner @ torch.randn(101, 37)) + gelu(rows).tanh()
    return gate.softmax(dim=-1).log_softmax(dim=-1) * gate.exp().sum(dim=-1, keepdim=True)


@torch.inference_mode()
def test_a_row_has_the_same_bits_with_any_others():
    rows = torch.randn(300, 37)
    with InvariantMode(invariant_linear):
        together = work(rows)
        for first, last in ((0, 1), (5, 8), (99, 300)):
            assert torch.equal(work(rows[first:last]), together[first:last])
    torch.testing.assert_close(together, work(rows), rtol=1e-4, atol=1e-4)


def test_products_that_it_cannot_replace_are_refused():
    rows = torch.randn(1, 2, 3, 4)
    with InvariantMode(invariant_linear):
        for product in (
            lambda: scaled_dot_product_attention(rows, rows, rows),
            lambda: torch.mm(rows[0, 0], rows[0, 0].mT),
            lambda: rows @ rows.mT,
            lambda: torch.einsum("abij,abkj->abik", rows, rows),
        ):
            with pytest.raises(NotImplementedError, match="depend on the batch"):
                product()
