"""Simulated rounding: of which size it is where, and that it leaves the model alone."""

from typing import Any

import pytest
import torch

from kestrel_runtime.models.moondream.verify.formats import FLOAT8, Formats
from kestrel_runtime.models.moondream.verify.rounding_noise import RoundingNoise
from kestrel_runtime.models.moondream.verify.tolerances import rounding_deviation
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


def test_the_original_is_not_changed_and_equal_seeds_give_equal_noise():
    model = random_model(tiny_config(2))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    one, same, other = (RoundingNoise(BFLOAT16, seed, CPU).perturbed(model) for seed in (1, 1, 2))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert torch.equal(one.text.lm_head.weight, same.text.lm_head.weight)
    assert not torch.equal(one.text.lm_head.weight, other.text.lm_head.weight)


def test_weights_are_off_by_the_rounding_of_their_own_type():
    model = random_model(tiny_config(2))
    noisy = RoundingNoise(SHORT, 1, CPU).perturbed(model)

    def off_by(part):
        return deviation(part(noisy).weight, part(model).weight)

    assert off_by(lambda m: m.text.blocks[1].mlp.fc1) == pytest.approx(rounding_deviation(FLOAT8), rel=0.1)
    wide = rounding_deviation(torch.bfloat16)
    assert off_by(lambda m: m.text.blocks[0].mlp.fc1) == pytest.approx(wide, rel=0.1)
    assert off_by(lambda m: m.text.lm_head) == pytest.approx(wide, rel=0.1)
    assert off_by(lambda m: m.vision.blocks[0].mlp.fc1) == pytest.approx(wide, rel=0.1)


def test_rows_of_a_prompt_are_rounded_to_the_products_type_and_a_single_one_is_not():
    model = random_model(tiny_config(2))
    noisy = RoundingNoise(SHORT, 1, CPU).perturbed(model)
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
    for formats, expected in ((SHORT, 2**0.5 * rounding_deviation(FLOAT8)), (BFLOAT16, 0.005)):
        noisy: Any = RoundingNoise(formats, 1, CPU).perturbed(model).text.blocks[-1].mlp
        noisy.router = exact.router  # whose errors choose other experts
        assert deviation(noisy(hidden), exact(hidden)) == pytest.approx(expected, rel=0.2)


def test_a_perturbed_models_cache_rounds_to_the_caches_type_and_differs_by_seed():
    config = tiny_config(2).text
    key = torch.randn(200, config.n_kv_heads, config.head_dim)
    one, other = (RoundingNoise(SHORT, seed, CPU).cache(config, 8, 4) for seed in (1, 2))
    kept, _ = one.rounded(0, key, key)
    assert deviation(kept, key) == pytest.approx(rounding_deviation(FLOAT8), rel=0.15)
    assert not torch.equal(kept, other.rounded(0, key, key)[0])
