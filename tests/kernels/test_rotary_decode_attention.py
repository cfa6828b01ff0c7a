import importlib.util
from functools import partial

import pytest
import torch
from torch import Tensor

from kestrel_ops import rotary
from tests.kernels.implementations import (
    DEVICE,
    FLOAT8,
    implementation_name,
    implementations,
    in_pairs,
    relative_error,
)
from tests.kernels.paged import Heads, attend, padded, paged

HEADS = [Heads(2, 2, 16), Heads(4, 2, 12), Heads(1, 1, 64), Heads(5, 1, 20), Heads(2, 1, 24)]
MOST_POSITIONS = 400
# The cache's type, and the relative errors of what is attended and of what is stored.
CACHES = [(torch.float32, 1e-5, 1e-6), (torch.bfloat16, 1e-2, 6e-3), (FLOAT8, 0.1, 0.05)]

every_implementation = pytest.mark.parametrize(
    "rotary_decode_attention", implementations("rotary_decode_attention"), ids=implementation_name
)


def triton_plans():
    """The kernel with launch configurations as two tiles and in steps."""
    if importlib.util.find_spec("triton") is None:
        return []
    module = importlib.import_module("kestrel_ops.attention.triton_rotary_decode_attention")
    configs = [module.AttentionConfig(16, 2, 1)]
    configs += [module.AttentionConfig(*cut, in_steps=True) for cut in ((32, 1, 1), (16, 2, 3), (16, 1, 4))]
    return [partial(module.rotary_decode_attention, config=config) for config in configs]


def plan_name(value):
    if not isinstance(value, partial):
        return str(value)
    config = value.keywords["config"]
    return f"{config.tile}x{config.num_warps}x{config.num_stages}{' in steps' if config.in_steps else ''}"


class Step:
    """Random contexts in pages, and a new token for each sequence; position -1 for rows without one."""

    def __init__(self, positions, heads=HEADS[0], page_size=16, cache_dtype=torch.float32, dtype=torch.float32):
        torch.manual_seed(len(positions))
        self.heads, self.page_size = heads, page_size
        lengths = [max(position, 0) + 1 for position in positions]  # the last place is the new token's
        self.keys, self.values = [heads.context(n) for n in lengths], [heads.context(n) for n in lengths]
        pages = paged(self.keys, self.values, page_size)
        is_float8 = cache_dtype == FLOAT8
        self.key_scale = torch.tensor([0.25], device=DEVICE) if is_float8 else None
        self.value_scale = torch.tensor([0.5], device=DEVICE) if is_float8 else None
        self.key_pages = (pages[0] / (0.25 if is_float8 else 1)).clamp(-448, 448).to(DEVICE, cache_dtype)
        self.value_pages = (pages[1] / (0.5 if is_float8 else 1)).clamp(-448, 448).to(DEVICE, cache_dtype)
        self.tables = pages[2]
        self.positions = torch.tensor(positions, device=DEVICE)
        angles = torch.arange(MOST_POSITIONS)[:, None] * torch.tensor([1.0, 0.3, 0.02])
        self.cosine, self.sine = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
        width = (heads.num_heads + 2 * heads.num_groups) * heads.head_dim
        self.qkv = torch.randn(len(positions), width).to(DEVICE, dtype)
        self.query_scale: Tensor | None = None
        self.value_factor: Tensor | None = None

    def run(self, rotary_decode_attention, num_parts=4):
        batch, heads = len(self.positions), self.heads
        counters = torch.zeros(batch, heads.num_heads, dtype=torch.int32, device=DEVICE)
        partials = torch.full((batch, heads.num_heads, num_parts, heads.head_dim + 2), torch.nan, device=DEVICE)
        storage = torch.full(
            (batch, heads.num_heads * heads.head_dim + 8), torch.nan, device=DEVICE, dtype=self.qkv.dtype
        )
        rotary_decode_attention(
            self.qkv,
            self.positions,
            self.cosine,
            self.sine,
            self.key_pages,
            self.value_pages,
            padded(self.tables).int().to(DEVICE),
            storage[:, :-8],
            self.key_scale,
            self.value_scale,
            self.query_scale,
            self.value_factor,
            partials,
            counters,
        )
        assert (counters == 0).all()
        assert storage[:, -8:].isnan().all()
        return storage[:, :-8].cpu()

    def token(self, row):
        """Query, key and value of a row's token, [1, heads, D] each, as they are attended with."""
        heads = self.heads
        parts = self.qkv[row].cpu().float().view(1, -1, heads.head_dim)
        query, key, value = parts.split((heads.num_heads, heads.num_groups, heads.num_groups), dim=1)
        if self.query_scale is not None:
            query = query * self.query_scale[row].cpu().float()[:, None]
        if self.value_factor is not None:
            value = value * self.value_factor[row].cpu().float()[:, None]
        position = self.positions[row].cpu()
        angles = self.cosine.cpu()[position][None], self.sine.cpu()[position][None]
        return rotary(query, *angles), rotary(key, *angles), value

    def wanted(self, row):
        """What a row attends to, written out."""
        query, key, value = self.token(row)
        keys, values = torch.cat((self.keys[row][:-1], key)), torch.cat((self.values[row][:-1], value))
        return attend(query[0], keys, values).flatten()

    def stored(self, row):
        """The key and the value that the cache holds of a row's token, [G, D] each."""
        position = int(self.positions[row])
        page, place = self.tables[row][position // self.page_size], position % self.page_size
        key, value = (pages[page, :, place].cpu().float() for pages in (self.key_pages, self.value_pages))
        scales = (1.0 if scale is None else scale.cpu() for scale in (self.key_scale, self.value_scale))
        return tuple(rows * scale for rows, scale in zip((key, value), scales, strict=True))


@every_implementation
@pytest.mark.parametrize(("heads", "cache", "num_parts"), in_pairs(HEADS, CACHES, [1, 3]), ids=str)
def test_tokens_are_stored_and_attend_to_all_before_them(rotary_decode_attention, heads, cache, num_parts):
    cache_dtype, tolerance, stored_tolerance = cache
    step = Step([0, 5, 64, 130], heads, cache_dtype=cache_dtype)
    attended = step.run(rotary_decode_attention, num_parts)
    for row in range(4):
        assert relative_error(attended[row], step.wanted(row)) < tolerance
        _, key, value = step.token(row)
        stored_key, stored_value = step.stored(row)
        assert relative_error(stored_key, key[0]) < stored_tolerance
        assert relative_error(stored_value, value[0]) < stored_tolerance


@every_implementation
@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_any_page_size_and_type_will_do(rotary_decode_attention, page_size, dtype):
    step = Step([70, 3], page_size=page_size, dtype=dtype)
    attended = step.run(rotary_decode_attention)
    assert attended.dtype == dtype
    for row in range(2):
        assert relative_error(attended[row], step.wanted(row)) < (1e-5 if dtype == torch.float32 else 1e-2)


@every_implementation
@pytest.mark.parametrize("num_parts", [1, 4])
def test_rows_without_a_token_write_nothing_and_give_zero(rotary_decode_attention, num_parts):
    step = Step([-1, 140, -1])
    before = step.key_pages.clone(), step.value_pages.clone()
    attended = step.run(rotary_decode_attention, num_parts)
    assert (attended[[0, 2]] == 0).all()
    assert relative_error(attended[1], step.wanted(1)) < 1e-5
    page, place = step.tables[1][140 // 16], 140 % 16
    for pages, old in zip((step.key_pages, step.value_pages), before, strict=True):
        old[page, :, place] = pages[page, :, place]
        assert torch.equal(pages, old)


@every_implementation
def test_queries_and_values_are_scaled_before_they_are_used(rotary_decode_attention):
    step = Step([90, 2])
    step.query_scale = (0.5 + torch.rand(2, 2)).to(DEVICE)
    step.value_factor = (0.5 + torch.rand(2, 2)).to(DEVICE)
    attended = step.run(rotary_decode_attention)
    for row in range(2):
        assert relative_error(attended[row], step.wanted(row)) < 1e-5
        assert relative_error(step.stored(row)[1], step.token(row)[2][0]) < 1e-6


@every_implementation
def test_what_float8_cannot_hold_is_stored_as_its_largest(rotary_decode_attention):
    step = Step([4], cache_dtype=FLOAT8)
    step.qkv[:, -16:] = 1e6
    attended = step.run(rotary_decode_attention)
    assert (step.stored(0)[1][1] == 0.5 * 448).all()
    assert attended.isfinite().all()


@every_implementation
def test_a_long_score_does_not_overflow(rotary_decode_attention):
    step = Step([150])
    step.qkv *= 1e3
    assert relative_error(step.run(rotary_decode_attention)[0], step.wanted(0)) < 1e-4


every_plan = pytest.mark.parametrize("rotary_decode_attention", triton_plans(), ids=plan_name)


@pytest.mark.parametrize(
    ("rotary_decode_attention", "heads", "cache_dtype", "split"),
    in_pairs(
        triton_plans(),
        [HEADS[1], Heads(4, 2, 64), Heads(2, 1, 24)],
        [torch.float32, torch.bfloat16, FLOAT8],
        [(16, 1), (32, 2), (3, 2)],
    ),
    ids=plan_name,
)
def test_every_plan_gives_what_the_usual_one_gives(rotary_decode_attention, heads, cache_dtype, split):
    page_size, num_parts = split
    step = Step([0, 33, 143, 64, -1], heads, page_size, cache_dtype)
    attended, usual = (step.run(way, num_parts) for way in (rotary_decode_attention, rotary_decode_attention.func))
    assert (attended[4] == 0).all()
    assert relative_error(attended, usual) < 1e-5


@every_plan
@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_no_plan_overflows_with_scores_of_any_size(rotary_decode_attention, factor):
    step = Step([150], Heads(2, 2, 64), cache_dtype=FLOAT8)
    step.query_scale = torch.full((1, 2), factor, device=DEVICE)
    attended = step.run(rotary_decode_attention)
    assert relative_error(attended, step.run(rotary_decode_attention.func)) < 1e-5


@every_plan
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FLOAT8], ids=str)
def test_what_an_owner_before_left_in_a_page_is_not_seen(rotary_decode_attention, cache_dtype):
    position, page_size = 37, 16
    step = Step([position], Heads(2, 2, 64), page_size, cache_dtype)
    attended = step.run(rotary_decode_attention)
    last = step.tables[0][position // page_size]
    for pages in (step.key_pages, step.value_pages):
        pages[last].view(torch.uint8).view(2, page_size, -1)[:, position % page_size + 1 :] = 0xFF  # not a number
    assert torch.equal(step.run(rotary_decode_attention), attended)
