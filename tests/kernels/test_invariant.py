"""Attention of a row is the same bits however its sequence is divided, and what `prefill_attention` defines."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, linear, log_softmax, scaled_dot_product_attention, softmax

from kestrel_ops import InvariantMode, depends_on_chunks, depends_on_place, prefill_attention, reference
from tests.kernels.implementations import (
    DEVICE,
    FLOAT8,
    ROUNDING,
    implementation_name,
    implementations,
    relative_error,
)
from tests.kernels.paged import GARBAGE, Heads, padded, paged, visible_until

every_attention = pytest.mark.parametrize(
    "invariant_attention", implementations("invariant_attention"), ids=implementation_name
)
every_product = pytest.mark.parametrize(
    "invariant_linear", implementations("invariant_linear"), ids=implementation_name
)
HEADS = (Heads(1, 1, 8), Heads(6, 2, 4), Heads(3, 3, 20))


def is_interpreted(operation):
    """Whether it runs in Triton's interpreter, which takes a hundred times as long: then sizes are small."""
    return DEVICE == "cpu" and implementation_name(operation) != "reference"


class Context:
    """Sequences in shuffled pages, all their keys and values in place; the slots left over hold NaN."""

    def __init__(self, lengths, spans, heads, page_size, seed=0, dtype=torch.float32):
        torch.manual_seed(seed)
        self.lengths, self.spans, self.page_size, self.dtype = lengths, spans, page_size, dtype
        self.keys, self.values = ([heads.context(length).to(dtype).float() for length in lengths] for _ in range(2))
        self.queries = [heads.queries(length).to(dtype) for length in lengths]
        key_pages, value_pages, self.tables = paged(self.keys, self.values, page_size)
        self.key_pages, self.value_pages = (
            pages.masked_fill(pages == GARBAGE, float("nan")) for pages in (key_pages, value_pages)
        )

    def run(self, invariant_attention, chunks):
        """Attention of chunks (sequence, start, end), one after the other."""
        query = torch.cat([self.queries[index][start:end] for index, start, end in chunks])
        bounds = torch.tensor([0, *(end - start for _, start, end in chunks)], dtype=torch.int32).cumsum(0)
        return invariant_attention(
            query.to(DEVICE),
            self.key_pages.to(DEVICE, self.dtype),
            self.value_pages.to(DEVICE, self.dtype),
            padded([self.tables[index] for index, _, _ in chunks]).int().to(DEVICE),
            bounds.to(DEVICE, torch.int32),
            torch.tensor([end for _, _, end in chunks], dtype=torch.int32, device=DEVICE),
            torch.cat([visible_until(self.spans[index], start, end) for index, start, end in chunks]).to(DEVICE),
            max(end - start for _, start, end in chunks),
        ).cpu()


@every_attention
@pytest.mark.parametrize("heads", HEADS)
def test_it_is_the_attention_of_a_prompt(heads, invariant_attention):
    context = Context([71, 5, 33], [((0, 9), (16, 40), (65, 70)), (), ((0, 33),)], heads, 7)
    chunks = [(0, 0, 71), (1, 0, 5), (2, 0, 33)]
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
            visible_until(context.spans[index], start, end),
            end,
        )
        got = context.run(invariant_attention, [(index, start, end)])
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@every_attention
@pytest.mark.parametrize("seed", range(4))
def test_a_row_has_the_same_bits_however_its_sequence_is_divided(seed, invariant_attention):
    chance = random.Random(seed)
    heads = HEADS[seed % len(HEADS)]
    is_slow = is_interpreted(invariant_attention)
    if is_slow and seed > 1:
        pytest.skip("two are enough for the interpreter")
    lengths = [66, 19, 17, 40] if is_slow else [150, 41, 17, 300]
    spans = [((0, 40),), (), ((0, 17),), ((1, 3), (9, 35), (35, 38))]
    context = Context(lengths, spans, heads, 16, seed, (torch.float32, torch.bfloat16)[seed % 2])
    whole = [context.run(invariant_attention, [(index, 0, length)]) for index, length in enumerate(lengths)]
    for _ in range(1 if is_slow else 6):
        chunks, wanted = [], []
        for index in chance.sample(range(4), k=chance.randint(1, 3)):
            length = lengths[index]
            allowed = [
                cut for cut in range(1, length + 1) if not any(start < cut < end for start, end in spans[index])
            ]
            cuts = sorted({allowed[0], length, *chance.choices(allowed, k=3)})
            for start, end in itertools.pairwise([0, *cuts] if chance.random() < 0.5 else cuts):
                chunks.append((index, start, end))
                wanted.append(whole[index][start:end])
        if chunks:
            assert torch.equal(context.run(invariant_attention, chunks), torch.cat(wanted))


@every_attention
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_that_are_decoded_have_the_bits_of_their_prompt(dtype, invariant_attention):
    context = Context([140, 37], [((0, 5), (60, 139)), ()], Heads(2, 1, 20), 16, dtype=dtype)
    whole = [context.run(invariant_attention, [(index, 0, length)]) for index, length in enumerate((140, 37))]
    decoded = context.run(invariant_attention, [(0, 139, 140), (1, 36, 37)])
    assert torch.equal(decoded, torch.cat([whole[0][-1:], whole[1][-1:]]))


@every_attention
@pytest.mark.parametrize("page_dtype", [torch.float32, FLOAT8], ids=str)
def test_attention_that_depends_on_the_chunks_is_found(page_dtype, invariant_attention):
    num_pages = 2 if is_interpreted(invariant_attention) else 9
    pages = torch.zeros(2, num_pages, 1, 16, 20, device=DEVICE).to(page_dtype)
    scale = torch.tensor([0.5], device=DEVICE) if page_dtype == FLOAT8 else None
    arguments = (1, pages[0], pages[1], torch.float32, (scale, scale))

    def by_chunk(query, *others):
        return invariant_attention(query, *others) + len(query) * 1e-6

    assert not depends_on_chunks(invariant_attention, *arguments)
    assert depends_on_chunks(by_chunk, *arguments)


SIZES = [(37, 48), (128, 80), (77, 1), (1, 5), (1024, 40)]


@every_product
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_a_row_has_the_same_bits_alone_first_last_and_among_many(size, dtype, invariant_linear):
    torch.manual_seed(1)
    width, height = size
    shapes = ((139, width), (height, width), (height,))
    rows, weight, bias = (torch.randn(*shape).to(DEVICE, dtype) for shape in shapes)
    together = invariant_linear(rows, weight, bias)
    for count in (1, 17, 129) if is_interpreted(invariant_linear) else (1, 2, 15, 16, 17, 64, 99, 129):
        assert torch.equal(invariant_linear(rows[:count], weight, bias), together[:count])
        assert torch.equal(invariant_linear(rows[-count:], weight, bias), together[-count:])
    if not is_interpreted(invariant_linear):
        assert not depends_on_place(invariant_linear, weight)


@every_product
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_a_product(size, dtype, invariant_linear):
    torch.manual_seed(2)
    rows, weight = (torch.randn(*shape, size[0], device=DEVICE).to(dtype) for shape in ((3, 7), (size[1],)))
    got = invariant_linear(rows, weight)
    assert got.shape == (3, 7, size[1])
    assert got.dtype == dtype
    assert relative_error(got, linear(rows.double(), weight.double())) < ROUNDING[dtype]
    assert invariant_linear(rows[:0], weight).shape == (0, 7, size[1])


def some_experts(dtype, weight_dtype) -> tuple[Any, ...]:
    """Of three, with two for each of 33 tokens: more than a block of pairs for each expert."""
    torch.manual_seed(3)
    hidden, logits = torch.randn(33, 40).to(DEVICE, dtype), torch.randn(33, 3).to(DEVICE, dtype)
    up, down = torch.randn(3, 2 * 20, 40, device=DEVICE) / 6, torch.randn(3, 40, 20, device=DEVICE) / 4
    if weight_dtype != FLOAT8:
        return hidden, logits, up.to(weight_dtype), down.to(weight_dtype), 2
    scales = up.abs().amax(dim=-1) / 448, down.abs().amax(dim=-1) / 448
    stored = [(stack / scale[..., None]).to(FLOAT8) for stack, scale in zip((up, down), scales, strict=True)]
    return hidden, logits, *stored, 2, *scales


EXPERT_TYPES = [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, FLOAT8)]


@pytest.mark.parametrize("types", EXPERT_TYPES, ids=str)
def test_experts_give_a_token_the_same_bits_alone_and_among_any_others(types):
    (operation,) = implementations("invariant_experts", ("triton",))
    hidden, logits, *others = some_experts(*types)
    together = operation(hidden, logits, *others)
    wanted = reference.mixture_of_experts(hidden, logits, *others)
    assert relative_error(together, wanted) < (1e-5 if types[0] == torch.float32 else 0.02)
    for own in (slice(0, 1), slice(32, 33), slice(3, 9), slice(0, 0)):
        assert torch.equal(operation(hidden[own], logits[own], *others), together[own])


def test_a_product_that_depends_on_its_place_is_found():
    def by_row_number(rows, weight):
        return linear(rows, weight) + torch.arange(len(rows))[:, None] * 1e-6

    assert depends_on_place(by_row_number, torch.randn(8, 16))


def work(rows):
    """What the decoder is made of, at widths that are no multiple of a vector."""
    torch.manual_seed(0)
    layer, norm = nn.Linear(37, 101).to(DEVICE), nn.LayerNorm(37).to(DEVICE)
    inner = gelu(layer(norm(rows)), approximate="tanh")
    gate = torch.sigmoid(inner @ torch.randn(101, 37, device=DEVICE)) + gelu(rows).tanh()
    gate = log_softmax(softmax(gate, dim=-1), dim=-1)
    return gate.softmax(dim=-1).log_softmax(dim=-1) * gate.exp().sum(dim=-1, keepdim=True)


@torch.inference_mode()
def test_a_row_has_the_same_bits_with_any_others():
    rows = torch.randn(300, 37, device=DEVICE)
    linear = implementations("invariant_linear")[-1] if DEVICE == "cuda" else reference.invariant_linear
    with InvariantMode(linear):
        together = work(rows)
        for first, last in ((0, 1), (5, 8), (99, 300)):
            assert torch.equal(work(rows[first:last]), together[first:last])
    torch.testing.assert_close(together, work(rows), rtol=1e-4, atol=1e-4)


def test_products_that_it_cannot_replace_are_refused():
    rows = torch.randn(1, 2, 3, 4)
    with InvariantMode(reference.invariant_linear):
        for product in (
            lambda: scaled_dot_product_attention(rows, rows, rows),
            lambda: torch.mm(rows[0, 0], rows[0, 0].mT),
            lambda: rows @ rows.mT,
            lambda: torch.einsum("abij,abkj->abik", rows, rows),
        ):
            with pytest.raises(NotImplementedError, match="depend on the batch"):
                product()
