"""Simulated rounding: of which size it is where, and that it leaves the model alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.correctness.dimensions import shape_of, write_fixture
from bench.correctness.models import ModelShape
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Query
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.step_inputs import PackedChunks
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.verify.prompt_run import DECODED_HIDDEN, HIDDEN, PromptRun, prompt_tensors
from kestrel_runtime.models.moondream.verify.simulated_rounding import (
    FLOAT8,
    Formats,
    RoundedCache,
    RoundingNoise,
    expected_errors,
    rounded_to_grid,
)
from kestrel_runtime.models.moondream.verify.tolerances import rounding_deviation
from kestrel_runtime.verify.preparing import preparing
from kestrel_runtime.verify.reference_fixture import ReferenceFixture
from tests.runtime.models.moondream.tiny import random_model, tiny_config

CPU = torch.device("cpu")
BFLOAT16 = Formats(*[torch.bfloat16] * 6)
SHORT = Formats(
    model=torch.bfloat16,
    text=FLOAT8,
    experts=FLOAT8,
    expert_weights=torch.bfloat16,
    vision=torch.bfloat16,
    cache=FLOAT8,
)


def deviation(noisy, exact):
    return ((noisy - exact).norm() / exact.norm()).item()


def perturbed(model, formats):
    """A copy of the model in its first simulation."""
    noise = RoundingNoise(formats, model)
    noise.begin(1, 8, 4)
    return noise.model


def test_the_original_is_not_changed_and_equal_seeds_give_equal_noise():
    model = random_model(tiny_config(2))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    noise, weights, rows = RoundingNoise(BFLOAT16, model), [], []
    for seed in (1, 2, 1):
        noise.begin(seed, 8, 4)
        weights.append(noise.model.text.lm_head.weight.clone())
        rows.append(noise.model.text.lm_head(torch.ones(3, model.config.text.dim)))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    for one, other, same in (weights, rows):
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


def test_weights_are_off_by_the_rounding_of_their_own_type():
    model = random_model(tiny_config(2))
    noisy = perturbed(model, SHORT)

    def off_by(part):
        return deviation(part(noisy).weight, part(model).weight)

    assert off_by(lambda m: m.text.blocks[1].mlp.fc1) == pytest.approx(rounding_deviation(FLOAT8), rel=0.1)
    wide = rounding_deviation(torch.bfloat16)
    assert off_by(lambda m: m.text.blocks[0].mlp.fc1) == pytest.approx(wide, rel=0.1)
    assert off_by(lambda m: m.text.lm_head) == pytest.approx(wide, rel=0.1)
    assert off_by(lambda m: m.vision.blocks[0].mlp.fc1) == pytest.approx(wide, rel=0.1)


def test_rows_of_a_prompt_are_rounded_to_the_products_type_and_a_single_one_is_not():
    model = random_model(tiny_config(2))
    noisy = perturbed(model, SHORT)
    rows = torch.randn(40, model.config.text.dim)
    blocks: Any = noisy.text.blocks
    first, second = blocks[0].mlp.fc1, blocks[1].mlp.fc1

    def off_by(layer, part):
        return deviation(layer(part) - layer.bias, part @ layer.weight.T)

    fine, coarse = 2 * rounding_deviation(torch.bfloat16), rounding_deviation(FLOAT8)
    assert off_by(second, rows) == pytest.approx(coarse, rel=0.3)
    assert off_by(first, rows) == pytest.approx(fine, rel=0.3)
    # A decode step reads the first block's weights in float8, too.
    ones = [off_by(second, row[None]) for row in rows], [off_by(first, row[None]) for row in rows]
    assert sum(ones[0]) / 40 == pytest.approx(fine, rel=0.3)
    assert sum(ones[1]) / 40 == pytest.approx(coarse, rel=0.3)


@torch.inference_mode()
def test_experts_that_multiply_in_float8_are_off_by_both_their_products():
    model = random_model(tiny_config(3))
    exact: Any = model.text.blocks[-1].mlp
    hidden = torch.randn(50, model.config.text.dim)
    int4 = replace(BFLOAT16, expert_weights="int4")
    wanted = (SHORT, 2**0.5 * rounding_deviation(FLOAT8)), (BFLOAT16, 0.005), (int4, 2**0.5 * 0.092)
    for formats, expected in wanted:
        noisy: Any = perturbed(model, formats).text.blocks[-1].mlp
        noisy.router = exact.router  # whose errors choose other experts
        assert deviation(noisy(hidden), exact(hidden)) == pytest.approx(expected, rel=0.2)


def test_a_perturbed_models_cache_rounds_to_the_caches_type_and_differs_by_seed():
    model = random_model(tiny_config(2))
    config = model.config.text
    key = torch.randn(200, config.n_kv_heads, config.head_dim)
    one, other = (RoundingNoise(SHORT, model).begin(seed, 8, 4) for seed in (1, 2))
    kept, _ = one.rounded(0, key, key)
    assert deviation(kept, key) == pytest.approx(rounding_deviation(FLOAT8), rel=0.15)
    assert not torch.equal(kept, other.rounded(0, key, key)[0])


CPU, FLOAT8 = torch.device("cpu"), torch.float8_e4m3fn
CONFIG = tiny_config(2).text
HEADS, WIDTH, PAGE_SIZE = CONFIG.n_kv_heads, CONFIG.head_dim, 4


def rounded_cache(seed=1, formats=SHORT):
    return RoundedCache(CONFIG, 8, PAGE_SIZE, formats, torch.Generator().manual_seed(seed))


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
        visible_until=torch.arange(1, count + 1, dtype=torch.int32),
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


def test_a_chunk_attends_to_rounded_keys_where_it_reads_its_own_from_the_cache():
    key, value = rows(20, 1), rows(20, 2)
    exact, rounded = exact_cache(), rounded_cache(formats=replace(SHORT, reads_own_from_cache=True))
    attended = prefilled(rounded, key, value)
    assert torch.equal(attended, prefilled(exact, *rounded.rounded(0, key, value)))
    for kept, wanted in ((rounded.key_pages, exact.key_pages), (rounded.value_pages, exact.value_pages)):
        assert torch.equal(kept, wanted)
    assert 0.01 < deviation(attended, prefilled(exact, key, value)) < 0.1


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


FLOAT8_CACHE = EngineConfig(device="cpu", dtype="bfloat16", text_backend="plain", kv_dtype="float8")


def write_one_prompt(folder: Path, shape: ModelShape, size: tuple[int, int]) -> bytes:
    """Write a reference fixture with the tensors of one prompt; returns its image, of this size."""
    write_fixture(folder, replace(shape, image_sizes=(size,)), with_answers=False)
    (image,) = folder.glob("*.jpg")
    return image.read_bytes()


def test_a_decode_step_over_a_real_float8_cache_is_off_as_far_as_simulated_ones(tmp_path: Path):
    # The cache's scale shifts the grid that numbers are rounded to: each gives another correct result.
    shape = shape_of("seed-0")
    image = write_one_prompt(tmp_path, shape, shape.image_sizes[1])
    config = replace(FLOAT8_CACHE, model=str(tmp_path))
    loaded = LoadedModel.load(config)
    question = json.loads((tmp_path / "expected.json").read_text())["images"][0]["query_prompt"]
    exact = load_file(tmp_path / "expected.safetensors")[f"0.{HIDDEN}"]
    chance, squares = torch.Generator().manual_seed(1), []
    with preparing(loaded, config) as prepare:
        request = Query(question, image)
        (errors,) = expected_errors(config, Formats.of(config, loaded.model), [request], prepare)
        run = PromptRun(loaded.model, config, prepare)
        for _ in range(12):
            for scales in (run.cache.key_scales, run.cache.value_scales):
                assert scales is not None
                scales.copy_(torch.exp2(torch.rand(scales.shape, generator=chance)))
            error = prompt_tensors(run, request)[DECODED_HIDDEN] - exact
            squares.append(error.square().mean().item())
    measured = (sum(squares) / len(squares)) ** 0.5
    assert measured == pytest.approx(errors.tensors[DECODED_HIDDEN].rms, rel=0.35)


def test_a_decode_step_over_a_float8_cache_may_choose_another_expert_where_two_nearly_tie(tmp_path: Path):
    # Of this prompt the cache's rounding moves a router's logits of the decoded token by more than the gap of two
    # experts. With another expert than the reference's its hidden state would be too far off.
    shape = shape_of("odd-experts")
    write_one_prompt(tmp_path, shape, shape.image_sizes[0])
    assert [case.complaint for case in ReferenceFixture(tmp_path, FLOAT8_CACHE).cases() if case.complaint] == []
