import pytest
import torch

from kestrel_ops import rotary
from tests.kernels.implementations import (
    DEVICE,
    FLOAT8,
    ROUNDING,
    implementation_name,
    implementations,
    relative_error,
)

FLOAT8_TOLERANCE = 0.04 if DEVICE == "cuda" else 0.12  # the interpreter cuts bits off instead of rounding

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
