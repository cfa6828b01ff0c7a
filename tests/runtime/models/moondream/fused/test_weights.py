"""Experts rounded to float8: each row to its own scale, with the error that is told."""

from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm, linear

from kestrel_runtime.models.moondream.fused.weights import NUM_WIDE_BLOCKS, Matrix, fused_blocks, prompt_blocks
from kestrel_runtime.models.moondream.text.decoder import MixtureOfExperts
from tests.runtime.models.moondream.tiny import random_model, tiny_config

FLOAT8 = torch.float8_e4m3fn


def text_model(generation=2, **heads):
    return random_model(tiny_config(generation, **heads)).text


def pairs(text, precision) -> list[Any]:
    """Each block of the model beside its fused weights."""
    return list(zip(text.blocks, fused_blocks(text, precision), strict=True))


def applied(matrix, rows):
    weight = matrix.weight.float()
    return linear(rows, weight if matrix.scale is None else weight * matrix.scale[:, None], matrix.bias)


def off_by(result, wanted):
    return ((result - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(("precision", "tolerance"), [("model", 1e-6), ("float8", 0.05)])
@pytest.mark.parametrize("heads", [{"n_heads": 2, "n_kv_heads": 2}, {"n_heads": 4, "n_kv_heads": 2}])
def test_the_first_matrix_takes_normalised_tokens_to_all_that_reads_them(precision, tolerance, heads):
    text = text_model(**heads)
    hidden = torch.randn(5, text.config.dim)
    for block, fused in pairs(text, precision):
        normed = block.ln(hidden)
        wanted = torch.cat((block.attn.qkv(normed), block.mlp.fc1(normed)), dim=1)
        assert off_by(applied(fused.up, layer_norm(hidden, hidden.shape[1:])), wanted) < tolerance


@pytest.mark.parametrize(("precision", "tolerance"), [("model", 1e-6), ("float8", 0.05)])
def test_the_second_matrix_adds_what_attention_and_mlp_give_back(precision, tolerance):
    text = text_model()
    attended, inner = torch.randn(5, text.config.dim), torch.randn(5, text.config.ff_dim)
    for block, fused in pairs(text, precision):
        wanted = block.attn.proj(attended) + block.mlp.fc2(inner)
        assert off_by(applied(fused.down, torch.cat((attended, inner), dim=1)), wanted) < tolerance


@pytest.mark.parametrize(("ff_dim", "kept"), [(32, []), (24, ["up", "down"]), (16, [])])
def test_matrices_without_a_float8_product_stay_in_the_type_of_the_model(ff_dim, kept):
    for _, fused in pairs(text_model(ff_dim=ff_dim), "float8"):
        for name in ("up", "down"):
            matrix = getattr(fused, name)
            assert matrix.weight.dtype == (torch.float32 if name in kept else FLOAT8)
            assert (matrix.scale is None) == (name in kept)


def test_experts_and_tau_are_handed_on_and_take_no_rows():
    text = text_model(generation=3)
    assert [fused.experts is not None for _, fused in pairs(text, "float8")] == [False, True, True]
    for plain, fused in pairs(text, "float8"):
        assert fused.tau is plain.attn.tau
        assert fused.ln is plain.ln
        if isinstance(plain.mlp, MixtureOfExperts):
            assert fused.experts is plain.mlp
            assert len(fused.up.weight) == text.config.qkv_dim
            assert fused.down.weight.shape == (text.config.dim, text.config.dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT8])
def test_row_sums_are_those_of_the_stored_weight(dtype):
    torch.manual_seed(0)
    matrix = Matrix.of(torch.randn(4, 32), torch.zeros(4), dtype)
    assert matrix.weight.dtype == dtype
    assert (matrix.scale is None) == (dtype != FLOAT8)
    torch.testing.assert_close(matrix.row_sums, applied(matrix, torch.ones(1, 32))[0])


def test_every_row_has_a_scale_of_its_own():
    torch.manual_seed(0)
    weight = torch.randn(3, 64) * torch.tensor([1e-6, 1.0, 1e6])[:, None]
    matrix = Matrix.of(weight, torch.zeros(3), FLOAT8)
    assert matrix.scale is not None
    restored = matrix.weight.float() * matrix.scale[:, None]
    for row in range(3):
        assert off_by(restored[row], weight[row]) < 0.05
        assert matrix.weight[row].float().abs().max() == torch.finfo(FLOAT8).max


def test_a_row_of_zeros_stays_one():
    matrix = Matrix.of(torch.zeros(1, 8), torch.ones(1), FLOAT8)
    assert applied(matrix, torch.full((1, 8), 1e4)).item() == 1


@pytest.mark.parametrize("generation", [2, 3])
def test_the_first_blocks_take_prompts_in_the_models_type_and_the_others_as_decode_steps_do(generation):
    text = text_model(generation)
    for precision in ("model", "float8"):
        blocks = fused_blocks(text, precision)
        for_prompts = prompt_blocks(text, blocks)
        wide = [block.up.weight.dtype == block.down.weight.dtype == torch.float32 for block in for_prompts]
        assert wide == [precision == "model" or layer < NUM_WIDE_BLOCKS for layer in range(len(blocks))]
        assert for_prompts[NUM_WIDE_BLOCKS:] == blocks[NUM_WIDE_BLOCKS:], "no weight is held twice without need"
