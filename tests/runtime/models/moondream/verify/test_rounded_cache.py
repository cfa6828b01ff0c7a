"""A cache that rounds at random scales has the errors of a real one of that type."""

import pytest
import torch

from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.step_inputs import PackedChunks
from kestrel_runtime.models.moondream.verify.rounded_cache import RoundedCache, rounded_to_grid
from kestrel_runtime.models.moondream.verify.tolerances import rounding_deviation
from tests.runtime.models.moondream.tiny import tiny_config

CPU, FLOAT8 = torch.device("cpu"), torch.float8_e4m3fn
CONFIG = tiny_config(2).text
HEADS, WIDTH, PAGE_SIZE = CONFIG.n_kv_heads, CONFIG.head_dim, 4


def rounded_cache(seed=1, rounded_to=FLOAT8):
    return RoundedCache(CONFIG, 8, PAGE_SIZE, rounded_to, torch.Generator().manual_seed(seed))


def exact_cache():
    return KVCache(CONFIG, 8, PAGE_SIZE, CPU, torch.float32)


def float8_cache():
    return KVCache(CONFIG, 8, PAGE_SIZE, CPU, FLOAT8)


def rows(count, seed, num_heads=HEADS):
    return torch.randn(count, num_heads, WIDTH, generator=torch.Generator().manual_seed(seed))


def prefilled(cache, key, value):
    """What a prompt of these keys and values attends to, as its only chunk."""
    count = len(key)
    plan = PackedChunks(
        positions=torch.arange(count),
        slots=torch.arange(count),
        page_table=torch.arange(8, dtype=torch.int32)[None],
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        lengths=torch.tensor([count], dtype=torch.int32),
        prefix_lengths=torch.tensor([0], dtype=torch.int32),
        max_chunk=count,
    )
    return cache.prefill(plan)(0, rows(count, 9, CONFIG.n_heads), key, value)


def decoded(cache, position, key, value):
    """What one token at `position` attends to."""
    table = torch.arange(8, dtype=torch.int32)[None]
    return cache.decode(torch.tensor([position]), table)(0, rows(1, 8, CONFIG.n_heads), key, value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FLOAT8], ids=str)
def test_rounding_to_a_grid_is_what_the_type_does_down_to_its_subnormals(dtype):
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    smallest = torch.finfo(dtype).smallest_normal
    for scale in (1.0, 30.0, smallest if dtype == FLOAT8 else 1e-3):
        assert torch.equal(rounded_to_grid(values * scale, dtype), (values * scale).to(dtype).float())
    assert torch.equal(rounded_to_grid(torch.zeros(3), dtype), torch.zeros(3))


def test_what_float8_cannot_hold_is_not_cut_off():
    assert rounded_to_grid(torch.tensor([5000.0]), FLOAT8).item() == pytest.approx(5000, rel=2**-4)


def test_a_chunk_attends_to_exact_keys_and_leaves_rounded_ones():
    key, value = rows(20, 1), rows(20, 2)
    exact, rounded = exact_cache(), rounded_cache()
    assert torch.equal(prefilled(exact, key, value), prefilled(rounded, key, value))
    for kept, wanted in ((rounded.key_pages, exact.key_pages), (rounded.value_pages, exact.value_pages)):
        off_by = ((kept - wanted).norm() / wanted.norm()).item()
        assert off_by == pytest.approx(rounding_deviation(FLOAT8), rel=0.2)


def test_a_decoded_token_reads_its_own_key_and_value_rounded():
    # At the first position nothing else is attended to, so that the result is the token's own value.
    value = rows(1, 2)
    results = [decoded(rounded_cache(seed), 0, rows(1, 1), value) for seed in range(40)]
    errors = torch.stack(results) - decoded(exact_cache(), 0, rows(1, 1), value)
    off_by = errors.square().mean().sqrt() / value.square().mean().sqrt()
    assert off_by.item() == pytest.approx(rounding_deviation(FLOAT8), rel=0.2)


@pytest.mark.parametrize("spread", [0.0, 0.02, 1.0], ids=["equal", "nearly equal", "different"])
def test_attention_over_rounded_values_is_off_as_that_over_a_real_float8_cache(spread):
    """Errors of equal values do not cancel; those of different ones do."""
    ours, real = [], []
    for seed in range(40):
        key = 0.1 * rows(20, seed)
        value = rows(1, 1000 + seed) + spread * rows(20, 2000 + seed)
        exact, rounded, float8 = exact_cache(), rounded_cache(seed), float8_cache()
        for cache in (exact, rounded, float8):
            prefilled(cache, key, value)
        wanted, found, stored = (decoded(cache, 20, key[:1], value[:1]) for cache in (exact, rounded, float8))
        ours.append(found - wanted)
        real.append(stored - wanted)
    ours, real = (torch.stack(errors).square().mean().sqrt().item() for errors in (ours, real))
    assert ours == pytest.approx(real, rel=0.2)
