import cmath

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel_ops import rotary, write_kv
from tests.kernels.implementations import (
    DEVICE,
    FLOAT8,
    ROUNDING,
    implementation_name,
    implementations,
    relative_error,
)

FREQUENCIES = torch.tensor([1.0, 0.31, 0.07])  # six of eight dimensions are rotated


def angles(positions, frequencies=FREQUENCIES):
    table = torch.as_tensor(positions, dtype=torch.float32)[:, None] * frequencies
    return table.cos(), table.sin()


def rotated(heads, positions):
    return rotary(heads, *angles(positions))


def interleaved(heads, positions):
    """The other convention: neighbours are written out as pairs (first, second, first, second …)."""
    half = len(FREQUENCIES)
    turned = rotated(heads, positions)
    pairs = torch.stack((turned[..., :half], turned[..., half : 2 * half]), dim=-1).flatten(-2)
    return torch.cat((pairs, turned[..., 2 * half :]), dim=-1)


def test_lanes_turn_in_pairs_as_complex_numbers():
    torch.manual_seed(0)
    heads, positions = torch.randn(4, 2, 8), [0, 1, 5, 700]
    turned = rotated(heads, positions)
    for token, position in enumerate(positions):
        for head in range(2):
            for dim, frequency in enumerate(FREQUENCIES.tolist()):
                pair = complex(heads[token, head, dim], heads[token, head, dim + 3])
                wanted = pair * cmath.exp(1j * position * frequency)
                assert turned[token, head, dim].item() == pytest.approx(wanted.real, abs=1e-3)
                assert turned[token, head, dim + 3].item() == pytest.approx(wanted.imag, abs=1e-3)


def test_lanes_behind_the_rotated_ones_pass_through():
    heads = torch.randn(3, 2, 8)
    assert torch.equal(rotated(heads, [1, 2, 3])[..., 6:], heads[..., 6:])


def test_position_zero_turns_nothing():
    heads = torch.randn(1, 2, 8)
    assert torch.equal(rotated(heads, [0]), heads)


@settings(max_examples=50)
@given(
    query_at=st.integers(0, 300),
    key_at=st.integers(0, 300),
    shift=st.integers(0, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_scores_depend_on_the_distance_alone(query_at, key_at, shift, seed):
    torch.manual_seed(seed)
    query, key = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    here = (rotated(query, [query_at]) * rotated(key, [key_at])).sum()
    there = (rotated(query, [query_at + shift]) * rotated(key, [key_at + shift])).sum()
    torch.testing.assert_close(here, there, rtol=0, atol=2e-3)


def test_scores_do_depend_on_the_distance():
    query = key = torch.ones(1, 1, 8)
    near = (rotated(query, [4]) * rotated(key, [4])).sum()
    far = (rotated(query, [4]) * rotated(key, [1])).sum()
    assert near == pytest.approx(8.0, abs=1e-5)
    assert far < near - 1


def test_interleaved_and_half_split_pairs_give_equal_scores():
    torch.manual_seed(1)
    queries, keys, positions = torch.randn(9, 2, 8), torch.randn(9, 2, 8), list(range(9))
    halves = torch.einsum("qhd,khd->hqk", rotated(queries, positions), rotated(keys, positions))
    pairs = torch.einsum("qhd,khd->hqk", interleaved(queries, positions), interleaved(keys, positions))
    torch.testing.assert_close(halves, pairs)
    assert not torch.equal(interleaved(queries, positions), rotated(queries, positions))


def test_a_short_type_is_kept_but_turned_in_float32():
    torch.manual_seed(2)
    heads = torch.randn(6, 2, 8).bfloat16()
    turned = rotated(heads, range(6))
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotated(heads.float(), range(6)).bfloat16())


FLOAT8_TOLERANCE = 0.04

every_implementation = pytest.mark.parametrize(
    "rotary_write_kv", implementations("rotary_write_kv"), ids=implementation_name
)
every_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


class Tokens:
    """Packed queries, keys and values in rows that are wider than they, and a cache full of other things."""

    def __init__(self, heads=(3, 3, 16), half=4, dtype=torch.float32, page_dtype=None, count=5, page_size=4):
        torch.manual_seed(0)
        self.num_heads, self.num_groups, self.head_dim = heads
        self.width = (self.num_heads + 2 * self.num_groups) * self.head_dim
        self.rows = torch.randn(count, self.width + 16).to(DEVICE, dtype)
        self.positions = torch.randint(0, 50, (count,)).to(DEVICE)
        angles = torch.randn(50, half, device=DEVICE)
        self.cosine, self.sine = angles.cos(), angles.sin()
        pages = (6, self.num_groups, page_size, self.head_dim)
        self.pages = [torch.randn(pages).to(DEVICE, page_dtype or dtype) for _ in range(2)]
        self.slots = torch.randperm(6 * page_size)[:count].to(DEVICE)

    def run(self, rotary_write_kv, *more):
        arguments = (self.positions, self.cosine, self.sine, *self.pages, self.slots, *more)
        return rotary_write_kv(self.rows[:, : self.width], *arguments)

    def parts(self):
        """Queries, keys and values as they are now, in float32."""
        sizes = (self.num_heads * self.head_dim, *[self.num_groups * self.head_dim] * 2)
        rows = self.rows[:, : self.width].to(torch.float32, copy=True).split(sizes, dim=1)
        return [part.unflatten(1, (-1, self.head_dim)) for part in rows]

    def turned(self, heads):
        return rotary(heads, self.cosine[self.positions], self.sine[self.positions])

    def stored(self):
        """What the pages hold at the slots of the tokens."""
        size = self.pages[0].shape[2]
        return [pages.float()[self.slots // size, :, self.slots % size] for pages in self.pages]


@every_implementation
@every_type
@pytest.mark.parametrize(
    ("heads", "half"),
    [((3, 3, 16), 4), ((4, 2, 8), 4), ((2, 1, 64), 16), ((1, 1, 12), 3), ((2, 2, 24), 6), ((5, 1, 20), 10)],
    ids=str,
)
def test_queries_and_keys_turn_and_values_stay(rotary_write_kv, heads, half, dtype):
    tokens = Tokens(heads, half, dtype)
    query, key, value = tokens.parts()
    turned = tokens.run(rotary_write_kv)
    for got, wanted in zip(turned, (tokens.turned(query), tokens.turned(key), value), strict=True):
        assert got.dtype == dtype
        assert relative_error(got, wanted) < ROUNDING[dtype]


@every_implementation
@every_type
def test_the_cache_holds_the_turned_keys_and_the_values(rotary_write_kv, dtype):
    tokens = Tokens(dtype=dtype)
    _, key, value = tokens.run(rotary_write_kv)
    for got, wanted in zip(tokens.stored(), (key, value), strict=True):
        assert torch.equal(got, wanted.float())


@every_implementation
def test_nothing_else_is_written(rotary_write_kv):
    tokens = Tokens()
    behind, before = tokens.rows[:, tokens.width :].clone(), [pages.clone() for pages in tokens.pages]
    tokens.run(rotary_write_kv)
    assert torch.equal(tokens.rows[:, tokens.width :], behind)
    for pages, earlier in zip(tokens.pages, before, strict=True):
        changed = (pages != earlier).flatten(3).any(dim=3).any(dim=1).flatten().nonzero().flatten()
        assert set(changed.tolist()) == set(tokens.slots.tolist())


@every_implementation
def test_the_results_are_the_rows_themselves(rotary_write_kv):
    tokens = Tokens()
    query, key, value = tokens.run(rotary_write_kv)
    assert all(
        part.untyped_storage().data_ptr() == tokens.rows.untyped_storage().data_ptr() for part in (query, key)
    )
    for part, wanted in zip((query, key, value), tokens.parts(), strict=True):
        assert torch.equal(part, wanted)


@every_implementation
@every_type
@pytest.mark.parametrize(("heads", "half"), [((3, 3, 16), 4), ((6, 1, 20), 10), ((2, 2, 24), 6)], ids=str)
def test_tau_scales_queries_and_values(rotary_write_kv, heads, half, dtype):
    tokens = Tokens(heads, half, dtype=dtype)
    query, key, value = tokens.parts()
    query_scale, value_factor = (torch.randn(5, count).to(DEVICE, dtype) for count in heads[:2])
    turned = tokens.run(rotary_write_kv, None, None, query_scale, value_factor)
    wanted = (
        tokens.turned(query * query_scale[..., None].float()),
        tokens.turned(key),
        value * value_factor[..., None].float(),
    )
    for got, part in zip(turned, wanted, strict=True):
        assert relative_error(got, part) < ROUNDING[dtype]
    assert relative_error(tokens.stored()[1], wanted[2]) < ROUNDING[dtype]


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float8_pages_hold_what_their_scales_leave(rotary_write_kv, dtype):
    tokens = Tokens(dtype=dtype, page_dtype=FLOAT8)
    scales = [torch.tensor([scale], device=DEVICE) for scale in (0.5, 0.02)]
    _, key, value = tokens.run(rotary_write_kv, *scales)
    for stored, scale, wanted in zip(tokens.stored(), scales, (key, value), strict=True):
        assert relative_error(stored * scale, wanted) < FLOAT8_TOLERANCE


@every_implementation
def test_what_float8_cannot_hold_becomes_its_largest(rotary_write_kv):
    tokens = Tokens(page_dtype=FLOAT8)
    tokens.rows *= 1e5
    tokens.run(rotary_write_kv, *torch.ones(2, 1, device=DEVICE))
    for stored in tokens.stored():
        assert stored.isfinite().all()
        assert stored.abs().max() == 448


@every_implementation
@pytest.mark.parametrize("page_dtype", [torch.float32, FLOAT8], ids=str)
def test_padding_tokens_are_not_stored(rotary_write_kv, page_dtype):
    tokens = Tokens(page_dtype=page_dtype)
    all_slots = tokens.slots.clone()
    tokens.slots[[1, 3]] = torch.tensor([-1, -40], device=DEVICE)
    before = tokens.pages[0].clone(), tokens.pages[1].clone()
    scales = () if page_dtype == torch.float32 else tuple(torch.ones(2, 1, device=DEVICE))
    tokens.run(rotary_write_kv, *scales)
    for pages, earlier in zip(tokens.pages, before, strict=True):
        changed = (pages.float() != earlier.float()).any(dim=3).any(dim=1).flatten().nonzero().flatten()
        assert set(changed.tolist()) == {slot for row, slot in enumerate(all_slots.tolist()) if row not in (1, 3)}


@every_implementation
@pytest.mark.skipif(DEVICE == "cpu", reason="threads run one after the other without a CUDA device")
@pytest.mark.parametrize("heads", [(2, 1, 24), (1, 1, 12), (6, 2, 20)], ids=str)
def test_two_hundred_runs_all_turn_once(rotary_write_kv, heads):
    tokens = Tokens(heads, heads[2] // 4, page_dtype=FLOAT8, count=19)
    factors = [torch.randn(19, count).to(DEVICE) for count in heads[:2]]
    before, results = tokens.rows.clone(), []
    for _ in range(200):
        tokens.rows.copy_(before)
        tokens.run(rotary_write_kv, *torch.ones(2, 1, device=DEVICE), *factors)
        results.append((tokens.rows.clone(), *tokens.stored()))
    turned = tokens.parts()
    tokens.rows.copy_(before)
    own = tokens.parts()
    wanted = (tokens.turned(own[0] * factors[0][..., None]), tokens.turned(own[1]), own[2] * factors[1][..., None])
    for got, part in zip(turned, wanted, strict=True):
        assert relative_error(got, part) < ROUNDING[torch.float32]
    assert all(torch.equal(one, other) for result in results for one, other in zip(result, results[0], strict=True))


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_each_row_lands_in_its_slot_and_nowhere_else(page_size):
    torch.manual_seed(page_size)
    shape = (5, 2, page_size, 4)
    before = torch.randn(shape), torch.randn(shape)
    key_pages, value_pages = before[0].clone(), before[1].clone()
    slots = torch.randperm(5 * page_size)[:4]
    key, value = torch.randn(4, 2, 4), torch.randn(4, 2, 4)
    write_kv(key, value, key_pages, value_pages, slots)
    for slot in range(5 * page_size):
        page, place = divmod(slot, page_size)
        rows = (slots == slot).nonzero().flatten().tolist()
        wanted = (key[rows[0]], value[rows[0]]) if rows else (before[0][page, :, place], before[1][page, :, place])
        assert torch.equal(key_pages[page, :, place], wanted[0])
        assert torch.equal(value_pages[page, :, place], wanted[1])


def test_it_writes_through_a_layer_of_a_larger_cache():
    cache = torch.zeros(3, 2, 1, 2, 4), torch.zeros(3, 2, 1, 2, 4)
    write_kv(torch.ones(1, 1, 4), 2 * torch.ones(1, 1, 4), cache[0][1], cache[1][1], torch.tensor([3]))
    assert cache[0].nonzero()[:, :4].unique(dim=0).tolist() == [[1, 1, 0, 1]]
    assert cache[1].sum() == 8


def test_a_float8_cache_holds_rows_over_their_scale_and_saturates():
    pages = torch.zeros(2, 2, 1, 2, 4, dtype=torch.float8_e4m3fn)
    key, value = torch.full((1, 1, 4), 3.0), torch.full((1, 1, 4), -1e6)
    write_kv(key, value, pages[0], pages[1], torch.tensor([2]), torch.tensor([0.5]), torch.tensor([2.0]))
    assert pages[0].float().sum() == 4 * 6
    assert pages[1, 1, 0, 0].float().tolist() == [-448.0] * 4


def test_padding_rows_are_not_written():
    pages = torch.zeros(2, 3, 1, 2, 4)
    write_kv(torch.ones(3, 1, 4), torch.ones(3, 1, 4), pages[0], pages[1], torch.tensor([-1, 4, -7]))
    assert pages[0].nonzero()[:, :3].unique(dim=0).tolist() == [[2, 0, 0]]
