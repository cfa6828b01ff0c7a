"""Dimensions drawn for the sweep: valid, repeatable, of both generations, and odd where it matters."""

import pytest

from bench.harness.model_shapes import HARD_SHAPES, drawn_shape
from kestrel_runtime.models.moondream.config import MoondreamConfig

DRAWN = [drawn_shape(seed) for seed in range(60)]


@pytest.mark.parametrize("shape", [*HARD_SHAPES.values(), *DRAWN], ids=lambda shape: shape.name)
def test_a_shape_is_one_that_models_may_have(shape):
    shape.config.check()
    assert (
        shape.config.vision.crop_size > 2 * shape.config.vision.overlap_margin * shape.config.vision.enc_patch_size
    )
    assert shape.fp8_experts <= (shape.config.text.moe is not None)


def test_a_seed_always_draws_the_same_shape_and_seeds_draw_different_ones():
    assert [drawn_shape(seed) for seed in range(60)] == DRAWN
    assert len({shape.described() for shape in DRAWN}) == len(DRAWN)


def test_drawn_shapes_vary_in_all_that_kernels_depend_on():
    configs: list[MoondreamConfig] = [shape.config for shape in DRAWN]
    assert {config.generation for config in configs} == {2, 3}
    assert {shape.fp8_experts for shape in DRAWN} == {False, True}
    assert any(config.text.n_kv_heads < config.text.n_heads for config in configs)
    for numbers in (
        {config.text.dim for config in configs},
        {config.text.ff_dim for config in configs},
        {config.vision.enc_dim for config in configs},
        {config.vision.enc_ff_dim for config in configs},
    ):
        assert any(number % 2 for number in numbers) or any(number % 16 for number in numbers)
        assert any(number % 16 == 0 for number in numbers)
        assert len(numbers) > 5


def test_hard_shapes_have_the_dimensions_that_kernels_failed_on():
    vision = HARD_SHAPES["width-48"].config.vision
    assert (vision.enc_dim, vision.enc_dim // vision.enc_n_heads, vision.enc_ff_dim) == (48, 24, 104)
    assert HARD_SHAPES["width-48-experts"].config.generation == 3
    assert HARD_SHAPES["width-48-fp8-experts"].fp8_experts
