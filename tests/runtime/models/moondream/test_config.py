import copy
import math

import pytest

from kestrel_runtime.models.moondream.config import ConfigError, MoondreamConfig
from kestrel_runtime.models.moondream.family import FAMILY
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL, model_config

REMOVE = object()


def changed(folder, path, value):
    """The folder's configuration with one value changed or removed."""
    data = copy.deepcopy(model_config(folder))
    *sections, last = path.split(".")
    place = data
    for section in sections:
        place = place[section]
    if value is REMOVE:
        del place[last]
    else:
        place[last] = value
    return data


def test_a_moondream_2_reads_as_its_config_says():
    config = MoondreamConfig.from_dict(model_config(MD2_SMALL))
    assert config.generation == 2
    assert [*FAMILY.skills(config)] == ["query", "caption", "point", "detect", "gaze", "chat", "embed"]
    assert config.text.rope_theta == 10_000.0
    assert not config.text.is_moe_layer(3)
    assert config.region.decoder_arch == "mlp"
    assert not config.region.use_ln
    assert config.vision.grid_size == 27
    assert config.vision.num_image_tokens == 729
    assert config.tokenizer.templates["query"]["suffix"] == (3,)


def test_a_moondream_3_reads_as_its_config_says():
    config = MoondreamConfig.from_dict(model_config(MD3_SMALL))
    assert config.generation == 3
    assert [*FAMILY.skills(config)] == ["query", "caption", "point", "detect", "segment", "gaze", "chat", "embed"]
    assert config.text.rope_theta == 1_500_000.0
    assert [config.text.is_moe_layer(layer) for layer in range(4)] == [False, True, True, True]
    assert config.text.head_dim == 64
    assert config.text.rotary_dim == 32
    assert config.text.qkv_dim == 192
    assert config.region.decoder_arch == "linear"
    assert config.region.use_ln


def test_a_skill_without_a_template_is_one_the_model_does_not_have():
    config = MoondreamConfig.from_dict(changed(MD2_SMALL, "tokenizer.templates.point", None))
    assert [*FAMILY.skills(config)] == ["query", "caption", "detect", "chat", "embed"]


def test_unknown_fields_are_skipped():
    data = changed(MD2_SMALL, "text.group_size", 128)
    assert MoondreamConfig.from_dict(data) == MoondreamConfig.from_dict(model_config(MD2_SMALL))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("text", REMOVE, "section text is missing"),
        ("tokenizer.templates", REMOVE, "section tokenizer.templates is missing"),
        ("tokenizer.templates.query", [3], "section tokenizer.templates.query is missing"),
        ("text.dim", REMOVE, "text lacks dim"),
        ("text.dim", "64", "text.dim is '64', not of type int"),
        ("text.dim", True, "text.dim is True, not of type int"),
        ("text.dim", 64.0, "text.dim is 64.0, not of type int"),
        ("text.n_heads", 0, "text.n_heads is 0, which is too small"),
        ("text.n_layers", -1, "text.n_layers is -1, which is too small"),
        ("text.rope_theta", 0, "text.rope_theta is 0, which is too small"),
        ("text.tau_attn", 1, "text.tau_attn is 1, not of type bool"),
        ("text.moe", 8, "section text.moe is missing"),
        ("text.moe", {"num_experts": 8}, "text.moe lacks start_layer, experts_per_token, expert_inner_dim"),
        ("text.n_heads", 3, "text.dim is not a multiple of text.n_heads"),
        ("text.n_kv_heads", 2, "text.n_heads is not a multiple of text.n_kv_heads"),
        ("text.n_heads", 32, "text.dim / text.n_heads is not a multiple of 4"),
        ("text.max_context", 730, "text.max_context is not above text.prefix_attn"),
        ("text.prefix_attn", 729, "text.prefix_attn is not 1 + 729 image tokens"),
        ("vision.enc_n_heads", 3, "vision.enc_dim is not a multiple of vision.enc_n_heads"),
        ("vision.crop_size", 379, "vision.crop_size is not a multiple of vision.enc_patch_size"),
        ("vision.proj_out_dim", 32, "vision.proj_out_dim differs from text.dim"),
        ("region.dim", 32, "region.dim differs from text.dim"),
        ("region.coord_feat_dim", 31, "region.coord_feat_dim is odd"),
        ("region.size_feat_dim", 63, "region.size_feat_dim is odd"),
        ("region.size_out_dim", 2047, "region.size_out_dim is odd"),
        ("region.decoder_arch", "tree", 'region.decoder_arch is neither "mlp" nor "linear"'),
        ("region.inner_dim", REMOVE, "region.inner_dim is missing for an MLP decoder"),
        ("tokenizer.coord_id", 640, "tokenizer names id 640, beyond text.vocab_size 640"),
        ("tokenizer.templates.point", {"prefix": [1, 700, 2], "suffix": [3]}, "tokenizer names id 700"),
        ("tokenizer.templates.point", {"prefix": [1, 2]}, "templates.point lacks its prefix or its suffix"),
        ("tokenizer.templates.point.suffix", 3, "tokenizer.templates.point.suffix is not a list of ids"),
        ("tokenizer.templates.point.suffix", [-3], "tokenizer.templates.point.suffix is not a list of ids"),
    ],
)
def test_a_wrong_value_is_named(path, value, message):
    with pytest.raises(ConfigError) as raised:
        MoondreamConfig.from_dict(changed(MD2_SMALL, path, value))
    assert message in str(raised.value)


def test_more_experts_per_token_than_experts_are_refused():
    with pytest.raises(ConfigError, match=r"text\.moe\.experts_per_token is above"):
        MoondreamConfig.from_dict(changed(MD3_SMALL, "text.moe.experts_per_token", 9))


def test_every_contradiction_is_named_at_once():
    data = changed(MD2_SMALL, "region.dim", 32)
    data["text"]["prefix_attn"] = 5
    with pytest.raises(ConfigError, match=r"region\.dim differs.*prefix_attn is not"):
        MoondreamConfig.from_dict(data)


@pytest.mark.parametrize(
    "value", [-1, 10**9, 10**30, 10**400, 1e30, math.nan, math.inf, "4", [[4]], {"a": 4}, True]
)
@pytest.mark.parametrize(
    "path",
    [
        *("text.n_layers", "text.max_context", "text.dim", "text.n_heads", "text.vocab_size", "text.prefix_attn"),
        *("vision.max_crops", "vision.overlap_margin", "vision.enc_n_layers", "vision.crop_size"),
        *("region.coord_out_dim", "tokenizer.bos_id", "text.rope_theta"),
    ],
)
def test_an_absurd_number_is_named_in_a_short_line(path, value):
    if (path, value) == ("text.rope_theta", 10**9):
        MoondreamConfig.from_dict(changed(MD2_SMALL, path, value))
        return
    with pytest.raises(ConfigError) as raised:
        MoondreamConfig.from_dict(changed(MD2_SMALL, path, value))
    assert path in str(raised.value)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("vision.in_channels", 12, "vision.in_channels is not 3"),
        ("vision.overlap_margin", 14, "vision.overlap_margin leaves nothing of a crop"),
        ("text.dim", "x" * 10**6, "text.dim is 'xxx"),
        ("text.moe", [[[]]], "section text.moe is missing; it is [[[]]]"),
        ("tokenizer.templates.query.prefix", [10**30], "tokenizer.templates.query.prefix is not a list of ids"),
        ("tokenizer.templates.query.prefix", [1] * 10**6, "tokenizer.templates.query.prefix is not a list of ids"),
    ],
)
def test_what_no_model_has_is_named(path, value, message):
    with pytest.raises(ConfigError) as raised:
        MoondreamConfig.from_dict(changed(MD2_SMALL, path, value))
    assert message in str(raised.value)
    assert len(str(raised.value)) < 200
