import importlib
import importlib.util
import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from kestrel_ops import DeviceLimits
from kestrel_ops import prefill_attention as definition
from tests.kernels.implementations import (
    DEVICE,
    FLOAT8,
    implementation_name,
    implementations,
    in_pairs,
    relative_error,
)
from tests.kernels.paged import Heads, attend_chunk, padded, paged, visible_until

HEADS = (Heads(1, 1, 8), Heads(4, 4, 6), Heads(6, 2, 4), Heads(4, 1, 16), Heads(2, 1, 24), Heads(3, 3, 20))
# Weights are rounded to the type of the queries once, results a second time.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def front(length):
    """The span of BOS and an image of `length - 1` positions behind it."""
    return ((0, length),)


# The interpreter takes seconds for as many crops as an image has.
LONG = (
    [(front(730), 0, 741), (front(300), 0, 400)]
    if DEVICE == "cuda"
    else [(front(200), 0, 211), (front(60), 0, 130)]
)
MANY = [(front(193), 0, 250), ((), 0, 1), ((), 0, 100), (front(193), 0, 193)]
if DEVICE != "cuda":
    MANY = [(front(65), 0, 130), ((), 0, 1), ((), 0, 70), (front(65), 0, 65)]

every_implementation = pytest.mark.parametrize(
    "prefill_attention", implementations("prefill_attention"), ids=implementation_name
)


def some_chunk(draw):
    """(spans, start, end) of a legal chunk of a conversation: it begins and ends outside of every span."""
    spans, end = [], draw.choice((0, 0, 1, 4))  # with BOS in the first one, behind it, and behind text
    for length in draw.sample((1, 5, 9, 2), k=draw.randint(0, 3)):
        spans.append((end, end + length))
        end += length + draw.choice((0, 1, 7))
    edges = [0, *itertools.chain(*spans), end]
    start = 0 if draw.random() < 0.5 else draw.choice(edges) + draw.choice((0, 0, 3))
    start = next((first for first, last in spans if first < start < last), start)
    end = max(draw.choice(edges) + draw.choice((0, 8)), start + 1)
    end = next((last for first, last in spans if first < end < last), end)
    return tuple(spans), start, end


class Prompts:
    """Random contexts over odd pages, of which chunks (spans, start, end) are asked.

    What a chunk holds itself is garbage in the pages: it comes with the call.
    """

    def __init__(self, plans, heads, page_size, dtype=torch.float32, seed=0):
        torch.manual_seed(seed)
        self.plans, self.heads, self.page_size = plans, heads, page_size
        self.keys = [heads.context(end).to(dtype) for _, _, end in plans]
        self.values = [heads.context(end).to(dtype) for _, _, end in plans]
        self.queries = [heads.queries(end - start).to(dtype) for _, start, end in plans]

    def wanted(self):
        """Every row over what it may see, written out."""
        rows = [
            attend_chunk(query.float(), key.float(), value.float(), (start, end), spans)
            for query, key, value, (spans, start, end) in zip(
                self.queries, self.keys, self.values, self.plans, strict=True
            )
        ]
        return torch.cat(rows)

    def run(self, prefill_attention, page_dtype=None, scales=(None, None)):
        starts = [start for _, start, _ in self.plans]
        key_pages, value_pages, tables = paged(
            [key[:start] for key, start in zip(self.keys, starts, strict=True)],
            [value[:start] for value, start in zip(self.values, starts, strict=True)],
            self.page_size,
        )
        if scales[0] is not None:
            key_pages, value_pages = key_pages.clamp(-9, 9) / scales[0], value_pages.clamp(-9, 9) / scales[1]
        page_dtype = page_dtype or self.queries[0].dtype
        # The packed rows of a product hold queries, keys and values side by side.
        own_keys = torch.cat([key[start:] for key, (_, start, _) in zip(self.keys, self.plans, strict=True)])
        own_values = torch.cat(
            [value[start:] for value, (_, start, _) in zip(self.values, self.plans, strict=True)]
        )
        qkv = torch.cat((torch.cat(self.queries), own_keys, own_values), dim=1).to(DEVICE)
        groups = self.heads.num_groups
        counts = [end - start for _, start, end in self.plans]
        attended = prefill_attention(
            *qkv.split((self.heads.num_heads, groups, groups), dim=1),
            key_pages.to(DEVICE, page_dtype),
            value_pages.to(DEVICE, page_dtype),
            padded([torch.cat((table, torch.zeros(1, dtype=torch.int64))) for table in tables]).int().to(DEVICE),
            torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE),
            torch.tensor([end for _, _, end in self.plans]).int().to(DEVICE),
            torch.cat([visible_until(*plan) for plan in self.plans]).to(DEVICE),
            max(counts),
            *(None if scale is None else torch.tensor([scale], device=DEVICE) for scale in scales),
        )
        assert attended.is_contiguous()
        return attended.cpu()


def whole(prefix_length=5, length=13):
    return Prompts([(front(prefix_length), 0, length)], HEADS[2], 3)


@every_implementation
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), heads=st.sampled_from(HEADS), page_size=st.integers(1, 7))
def test_every_row_is_attention_written_out(prefill_attention, seed, heads, page_size):
    draw = random.Random(seed)
    prompts = Prompts([some_chunk(draw) for _ in range(draw.randint(1, 4))], heads, page_size, seed=seed)
    torch.testing.assert_close(prompts.run(prefill_attention), prompts.wanted(), rtol=1e-4, atol=1e-5)


@every_implementation
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "plan",
    [
        ((), 0, 75),
        (front(70), 0, 75),
        (front(70), 70, 75),
        (front(33), 40, 110),
        ((), 64, 129),
        (front(5), 128, 129),
        (((0, 32), (32, 64), (64, 70)), 0, 75),  # at the borders of blocks, without anything between them
        (((1, 31), (40, 97)), 0, 97),
        (((0, 20), (48, 112)), 48, 115),  # begins with a picture, mid-conversation
        (((5, 9), (33, 66), (70, 71)), 12, 80),
    ],
)
def test_contexts_of_many_tiles_are_attended_to(prefill_attention, plan, dtype):
    prompts = Prompts([plan, ((), 0, 3)], Heads(2, 1, 64), 16, dtype)
    attended = prompts.run(prefill_attention)
    assert attended.dtype == dtype
    assert relative_error(attended, prompts.wanted()) < TOLERANCES[dtype]


@every_implementation
@pytest.mark.parametrize(
    ("plans", "heads", "dtype"),
    in_pairs(
        [[(front(74), 0, 80)], MANY, LONG],
        [Heads(2, 2, 64), Heads(4, 2, 32), Heads(2, 1, 24)],
        [torch.bfloat16, torch.float16],
    ),
    ids=str,
)
def test_whole_prompts_are_attended_to(prefill_attention, plans, heads, dtype):
    prompts = Prompts(plans, heads, 16, dtype)
    assert relative_error(prompts.run(prefill_attention), prompts.wanted()) < TOLERANCES[dtype]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    "plan",
    [
        (((0, 128), (128, 130)), 0, 150),
        (((0, 5), (100, 140)), 0, 141),
        (((0, 20), (64, 256)), 64, 257),
        (((1, 129), (129, 193), (200, 230)), 0, 230),
    ],
    ids=str,
)
def test_spans_end_anywhere_in_the_tiles_of_hopper(plan):
    module = importlib.import_module("kestrel_ops.attention.triton_prefill_attention")
    tiles = module.tiling(746, torch.bfloat16, DeviceLimits.of_card((9, 0)))
    assert (tiles.queries, tiles.keys) == (128, 64)

    def tiled(query, key, value, key_pages, value_pages, table, starts, lengths, visible, longest, *_):
        pages, chunks = (key_pages, value_pages, None, None), (table, starts, lengths, visible)
        return module.attend(query, key, value, pages, chunks, longest, tiles)

    prompts = Prompts([plan, ((), 0, 3)], Heads(1, 1, 16), 16, torch.bfloat16)
    assert relative_error(prompts.run(tiled), prompts.wanted()) < TOLERANCES[torch.bfloat16]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_chunks_whose_own_keys_fit_in_a_tile_have_the_bits_of_longer_ones():
    module = importlib.import_module("kestrel_ops.attention.triton_prefill_attention")
    tiles = module.tiling(64, torch.bfloat16, DeviceLimits.of_card((9, 0)))
    assert tiles.masks_all_own_keys
    assert tiles.keys >= 64
    plans = [(front(130), 130, 146), ((), 0, 1), (((0, 5), (21, 60)), 5, 61), (front(40), 0, 64)]

    def tiled(masks_all_own_keys):
        own = replace(tiles, masks_all_own_keys=masks_all_own_keys)

        def run(query, key, value, key_pages, value_pages, table, starts, lengths, visible, longest, *_):
            pages, chunks = (key_pages, value_pages, None, None), (table, starts, lengths, visible)
            return module.attend(query, key, value, pages, chunks, longest, own)

        return run

    prompts = Prompts(plans, Heads(2, 1, 16), 16, torch.bfloat16)
    assert torch.equal(prompts.run(tiled(True)), prompts.run(tiled(False)))


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float8_pages_are_read_with_their_scales(prefill_attention, dtype):
    prompts = Prompts([(front(5), 20, 30), ((), 0, 9), ((), 7, 8)], Heads(4, 2, 16), 4, dtype)
    attended = prompts.run(prefill_attention, FLOAT8, (0.5, 0.25))
    assert attended.dtype == dtype
    assert 1e-4 < relative_error(attended, prompts.wanted()) < 0.06
    alone = slice(10, 19)  # a chunk that begins at 0 reads no page
    assert relative_error(attended[alone], prompts.wanted()[alone]) < TOLERANCES[dtype]


@every_implementation
@pytest.mark.parametrize("changed", [0, 4, 5, 9, 12])
def test_without_a_prefix_a_position_sees_none_that_comes_later(prefill_attention, changed):
    prompts = Prompts([((), 0, 13)], HEADS[2], 3)
    before = prompts.run(prefill_attention)
    prompts.keys[0][changed] += 1
    prompts.values[0][changed] -= 1
    differs = (prompts.run(prefill_attention) != before).flatten(1).any(dim=1)
    assert differs.tolist() == [position >= changed for position in range(13)]


@every_implementation
def test_positions_of_the_prefix_see_all_of_it_and_nothing_behind_it(prefill_attention):
    prompts = whole(prefix_length=5)
    before = prompts.run(prefill_attention)
    prompts.values[0][4] += 1  # the last of the prefix
    assert (prompts.run(prefill_attention) != before).flatten(1).any(dim=1).all()
    before = prompts.run(prefill_attention)
    prompts.values[0][5] += 1  # the first behind it
    differs = (prompts.run(prefill_attention) != before).flatten(1).any(dim=1)
    assert differs.tolist() == [False] * 5 + [True] * 8


@every_implementation
def test_positions_of_a_later_span_see_all_of_it_and_what_is_before_it(prefill_attention):
    prompts = Prompts([(((0, 3), (5, 9)), 0, 13)], HEADS[2], 3)
    before = prompts.run(prefill_attention)
    prompts.values[0][8] += 1  # the last of the span
    differs = (prompts.run(prefill_attention) != before).flatten(1).any(dim=1)
    assert differs.tolist() == [False] * 5 + [True] * 8
    before = prompts.run(prefill_attention)
    prompts.values[0][4] += 1  # the text before it
    differs = (prompts.run(prefill_attention) != before).flatten(1).any(dim=1)
    assert differs.tolist() == [False] * 4 + [True] * 9


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "plan", [(front(70), 0, 75), (front(33), 40, 110), (front(9), 0, 9), (front(4), 4, 5)], ids=str
)
def test_one_picture_at_the_front_has_the_bits_of_a_prefix_that_sees_itself(plan, dtype):
    """The attention of a prompt whose first positions attend to each other, as torch computes it with a mask."""
    ((_, prefix),), start, end = plan
    prompts = Prompts([plan], Heads(4, 2, 16), 16, dtype)
    places = torch.arange(end, device=DEVICE)
    queries = places[start:, None]
    query, key, value = (
        rows[0].to(DEVICE).transpose(0, 1) for rows in (prompts.queries, prompts.keys, prompts.values)
    )
    wanted = scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=(places <= queries) | ((places < prefix) & (queries < prefix)),
        enable_gqa=True,
    )[0].transpose(0, 1)
    assert torch.equal(prompts.run(definition), wanted.cpu())


@every_implementation
@pytest.mark.parametrize("spans", [front(5), ((1, 5),), ((0, 5), (7, 12)), ((2, 5), (12, 13))], ids=str)
@pytest.mark.parametrize("cuts", [(0, 5, 13), (0, 6, 7, 13), (0, 12, 13)])
def test_chunks_add_up_to_the_whole(prefill_attention, cuts, spans):
    prompts = Prompts([(spans, 0, 13)], HEADS[2], 3)
    wanted, queries = prompts.run(prefill_attention), prompts.queries[0]
    parts = []
    for start, end in itertools.pairwise(cuts):
        prompts.plans, prompts.queries = [(spans, start, end)], [queries[start:end]]
        keys, values = prompts.keys, prompts.values
        prompts.keys, prompts.values = [keys[0][:end]], [values[0][:end]]
        parts.append(prompts.run(prefill_attention))
        prompts.keys, prompts.values = keys, values
    torch.testing.assert_close(torch.cat(parts), wanted)


@every_implementation
def test_a_sequence_attends_the_same_in_any_company(prefill_attention):
    plans = [(front(3), 0, 7), ((), 2, 4), (front(5), 5, 11), (((1, 3), (4, 6)), 4, 8)]
    prompts = Prompts(plans, HEADS[1], 4)
    together = prompts.run(prefill_attention)
    offset = 0
    for row, plan in enumerate(plans):
        alone = Prompts([plan], HEADS[1], 4)
        alone.keys, alone.values = [prompts.keys[row]], [prompts.values[row]]
        alone.queries = [prompts.queries[row]]
        own = slice(offset, offset + len(prompts.queries[row]))
        torch.testing.assert_close(together[own], alone.run(prefill_attention), rtol=0, atol=1e-6)
        offset = own.stop
