from dataclasses import replace

import pytest

from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.models.moondream.config import MoeConfig, MoondreamConfig
from kestrel_runtime.models.moondream.weights.checkpoint import expected_tensors
from kestrel_runtime.models.moondream.weights.published import infer_config
from tests.runtime.models.moondream.full_size import published_config


def inferred(config, *, fp8_experts=False):
    return MoondreamConfig.from_dict(infer_config(expected_tensors(config, fp8_experts=fp8_experts)))


def with_text(config, **changes):
    return replace(config, text=replace(config.text, **changes))


@pytest.mark.parametrize("fp8_experts", [False, True])
@pytest.mark.parametrize("name", ["moondream2", "moondream3", "small"])
def test_published_models_are_told_by_their_tensors_alone(name, fp8_experts):
    config = published_config(name)
    assert inferred(config, fp8_experts=fp8_experts) == config


def test_the_half_billion_model_is_told_too():
    large = published_config("moondream2")
    config = replace(
        large,
        text=replace(large.text, dim=1024, ff_dim=4096, n_heads=16, n_kv_heads=16),
        vision=replace(large.vision, enc_dim=720, enc_ff_dim=2690, enc_n_heads=10, proj_out_dim=1024),
        region=replace(large.region, dim=1024),
    )
    assert inferred(config) == config


def test_grouped_key_value_heads_follow_from_the_rows_of_qkv():
    config = with_text(published_config("moondream2"), n_kv_heads=8)
    assert inferred(config) == config


def test_tau_tells_the_number_of_heads():
    config = with_text(published_config("moondream3"), n_heads=16, n_kv_heads=16)
    assert inferred(config) == config


@pytest.mark.parametrize("start_layer", [0, 1, 23])
def test_experts_start_at_the_first_layer_with_a_router(start_layer):
    moe = MoeConfig(num_experts=4, start_layer=start_layer, experts_per_token=4, expert_inner_dim=48)
    config = with_text(published_config("moondream3"), moe=moe)
    assert inferred(config).text.moe == moe


def test_crop_and_patch_size_follow_from_the_position_and_patch_embeddings():
    config = published_config("moondream2")
    config = replace(
        with_text(config, prefix_attn=1 + 256), vision=replace(config.vision, enc_patch_size=16, crop_size=256)
    )
    assert inferred(config) == config


@pytest.mark.parametrize(
    "name",
    [
        "text.wte",
        "text.blocks.0.attn.qkv.weight",
        "vision.pos_emb",
        "vision.patch_emb.weight",
        "vision.proj_mlp.fc2.weight",
        "region.coord_encoder.weight",
        "region.size_decoder.fc2.weight",
    ],
)
def test_a_tensor_that_dimensions_hang_on_is_named_when_it_is_missing(name):
    shapes = expected_tensors(published_config("moondream2"), fp8_experts=False)
    del shapes[name]
    with pytest.raises(CheckpointError, match=f"there is no tensor '{name}'"):
        infer_config(shapes)


@pytest.mark.parametrize("shape", [(51200,), (51200, 16), (2, 2, 2), ()])
def test_a_shape_that_tells_nothing_is_one_clear_error(shape):
    shapes = expected_tensors(published_config("moondream2"), fp8_experts=False)
    with pytest.raises(CheckpointError, match="cannot infer the model's dimensions from its tensors' shapes"):
        infer_config({**shapes, "text.wte": shape})
