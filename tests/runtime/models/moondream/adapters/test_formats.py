"""Each format is read as its trainers mean it, and what does not fit is refused by name."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from kestrel_runtime.adapters.files import AdapterFiles
from kestrel_runtime.api.errors import AdapterInvalid
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.adapters.formats import read_adapter
from kestrel_runtime.models.moondream.adapters.slabs import AdapterWeights
from kestrel_runtime.models.moondream.config import TextConfig
from tests.adapter_folders import PEFT_CONFIG, Pair, peft_tensors, random_pairs, scaled

RANK = 4
PREFIX = "base_model.model.model"
TRAINING_NAMES = {
    "attn.qkv": "mixer.Wqkv",
    "attn.proj": "mixer.out_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


@pytest.fixture
def config(moondream3: LoadedModel) -> TextConfig:
    return moondream3.model.config.text


def read(config: TextConfig, tensors: dict[str, Tensor], peft: dict[str, Any] | None = None) -> AdapterWeights:
    return read_adapter(AdapterFiles("some", peft, tensors, b""), config, RANK, torch.float32)


def problems(config: TextConfig, tensors: dict[str, Tensor], peft: dict[str, Any] | None = None) -> str:
    with pytest.raises(AdapterInvalid) as caught:
        read(config, tensors, peft)
    return "; ".join(caught.value.problems)


def assert_means(found: AdapterWeights, pairs: dict[str, Pair]) -> None:
    assert found.factors.keys() == pairs.keys()
    for target, (a, b) in pairs.items():
        own = found.factors[target]
        torch.testing.assert_close(own.b.transpose(-1, -2) @ own.a, b @ a, msg=target)


def test_peft_is_read_with_its_scale(config: TextConfig):
    pairs = random_pairs(config, seed=1, rank=RANK)
    assert_means(read(config, peft_tensors(pairs), PEFT_CONFIG), scaled(pairs))


def test_peft_names_of_the_training_layout_are_understood(config: TextConfig):
    pairs = random_pairs(config, seed=1, rank=RANK, targets=lambda target: "attn" in target)
    tensors: dict[str, Tensor] = {}
    for target, (a, b) in pairs.items():
        _, layer, module = target.split(".", 2)
        name = f"base_model.model.text_model.transformer.h.{layer}.{TRAINING_NAMES[module]}"
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
    assert_means(read(config, tensors, PEFT_CONFIG), scaled(pairs))


def test_experts_in_the_older_layout_of_peft_are_transposed(config: TextConfig):
    assert config.moe is not None
    target = f"blocks.{config.moe.start_layer}.mlp.fc1"
    pairs = {target: random_pairs(config, seed=1, rank=RANK)[target]}
    a, b = pairs[target]
    module = f"base_model.model.model.text.{target}"
    # PEFT took the weight [E, out, in] for [E, in, out]: its A has our outputs as inputs.
    older = {
        f"{module}.lora_A.weight": b.transpose(1, 2).flatten(0, 1).contiguous(),
        f"{module}.lora_B.weight": a.permute(2, 1, 0).flatten(1).contiguous(),
    }
    assert a.shape[2] != b.shape[1], "the shapes tell the layouts apart"
    assert_means(read(config, older, {**PEFT_CONFIG, "peft_version": "0.17.1"}), scaled(pairs))
    assert_means(read(config, older, {**PEFT_CONFIG, "peft_version": None}), scaled(pairs))


@pytest.mark.parametrize(
    ("extra", "scale"),
    [
        ({"lora_alpha": 6}, 6 / RANK),
        ({"lora_alpha": 6, "use_rslora": True}, 6 / math.sqrt(RANK)),
        ({"lora_alpha": 6, "alpha_pattern": {"attn.qkv": 10}}, 10 / RANK),
    ],
)
def test_scales_of_peft(config: TextConfig, extra: dict[str, Any], scale: float):
    pairs = random_pairs(config, seed=1, rank=RANK, targets=lambda target: target == "blocks.0.attn.qkv")
    found = read(config, peft_tensors(pairs), {**PEFT_CONFIG, **extra})
    assert_means(found, {target: (a, scale * b) for target, (a, b) in pairs.items()})


def test_finetunes_of_the_model_maker_are_read_without_a_scale(config: TextConfig):
    pairs = random_pairs(config, seed=2, rank=RANK, targets=lambda target: "mlp" in target)
    assert config.moe is not None
    tensors: dict[str, Tensor] = {}
    for target, (a, b) in pairs.items():
        layer, matrix = int(target.split(".")[1]), {"fc1": "up", "fc2": "down"}[target.split(".")[-1]]
        start = config.moe.start_layer
        place = f"moe.{layer - start}" if config.is_moe_layer(layer) else f"dense.{layer}"
        for prefix in ("text_lora.", "lora_state_dict._text."):  # both name the same tensors
            tensors[f"{prefix}{place}.{matrix}_a"], tensors[f"{prefix}{place}.{matrix}_b"] = a, b
    assert_means(read(config, tensors), pairs)
    tensors["text_lora.dense.0.up_a"] = tensors["text_lora.dense.0.up_a"] + 1
    assert "are for one target and differ" in problems(config, tensors)


def test_variants_of_the_model_maker_read_the_input_of_the_block(config: TextConfig):
    pairs = random_pairs(config, seed=3, rank=RANK, targets=lambda target: "attn" in target)
    tensors: dict[str, Tensor] = {}
    for target, (a, b) in pairs.items():
        _, layer, module = target.split(".", 2)
        name = f"text_model.transformer.h.{layer}.{TRAINING_NAMES[module]}.parametrizations.weight.0"
        tensors[f"{name}.A"], tensors[f"{name}.B"] = a, b
    found = read(config, tensors)
    assert_means(found, pairs)
    assert found.reads_block_input
    assert not read(config, peft_tensors(pairs), PEFT_CONFIG).reads_block_input


QKV = "base_model.model.model.text.blocks.0.attn.qkv"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("unknown name", {f"{PREFIX}.text.lm_head.lora_A.weight": torch.ones(4, 8)}, "unexpected base"),
        (
            "vision",
            {f"{PREFIX}.vision.blocks.0.attn.qkv.lora_A.weight": torch.ones(4)},
            "tensors of the image encoder: 1;",
        ),
        ("no such layer", {f"{PREFIX}.text.blocks.99.attn.qkv.lora_A.weight": torch.ones(4)}, "blocks.99"),
        ("half a pair", {f"{QKV}.lora_B.weight": None}, "missing B of blocks.0.attn.qkv"),
        ("wrong shape", {f"{QKV}.lora_A.weight": torch.ones(4, 7)}, "do not fit blocks.0.attn.qkv"),
        ("wrong type", {f"{QKV}.lora_A.weight": torch.ones(4, 7, dtype=torch.int8)}, "is int8"),
        ("one axis", {f"{QKV}.lora_A.weight": torch.ones(4)}, "do not fit"),
        ("nothing", dict.fromkeys((f"{QKV}.lora_A.weight", f"{QKV}.lora_B.weight")), "has no tensors"),
    ],
)
def test_what_does_not_fit_is_named(config: TextConfig, name: str, change: dict[str, Tensor | None], reason: str):
    pairs = random_pairs(config, seed=1, rank=RANK, targets=lambda target: target == "blocks.0.attn.qkv")
    changed = {**peft_tensors(pairs), **change}
    assert reason in problems(config, {k: v for k, v in changed.items() if v is not None}, PEFT_CONFIG)


def test_a_rank_above_the_limit_is_refused(config: TextConfig):
    pairs = random_pairs(config, seed=1, rank=RANK + 1, targets=lambda target: target == "blocks.0.attn.qkv")
    assert "rank 5 is not from 1 to 4" in problems(config, peft_tensors(pairs), PEFT_CONFIG)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(config: TextConfig, number: float):
    pairs = random_pairs(config, seed=1, rank=RANK)
    pairs["blocks.1.attn.proj"][1][3, 2] = number
    assert "B of blocks.1.attn.proj has numbers" in problems(config, peft_tensors(pairs), PEFT_CONFIG)


def test_numbers_that_the_type_of_the_model_cannot_hold_are_refused(config: TextConfig):
    pairs = random_pairs(config, seed=1, rank=RANK, targets=lambda target: target == "blocks.0.attn.qkv")
    pairs["blocks.0.attn.qkv"][0][0, 0] = 1e6
    files = AdapterFiles("some", PEFT_CONFIG, peft_tensors(pairs), b"")
    with pytest.raises(AdapterInvalid, match="not as float16"):
        read_adapter(files, config, RANK, torch.float16)


def test_a_scale_whose_product_overflows_is_refused(config: TextConfig):
    pairs = random_pairs(config, seed=1, rank=RANK, targets=lambda target: target == "blocks.0.attn.qkv")
    pairs["blocks.0.attn.qkv"][1][0, 0] = 1e36
    large = {**PEFT_CONFIG, "lora_alpha": 1e9}
    assert "B of blocks.0.attn.qkv has numbers that are not finite" in problems(config, peft_tensors(pairs), large)


@pytest.mark.parametrize(
    "setting",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1]},
        {"init_lora_weights": "pissa"},
        {"layer_replication": [[0, 2]]},
        {"fan_in_fan_out": True},
        {"alpha_pattern": {"fc1": 3}},
        {"alpha_pattern": {"kv": 3}},
        {"alpha_pattern": {"": 3}},
        {"alpha_pattern": {"qkv": 3, "blocks.1.attn.qkv": 3}},
        {"alpha_pattern": {"(a+)+$": 3}},
        {"alpha_pattern": {"(qkv": 3}},
        {"alpha_pattern": {"(?=.*)qkv": 3}},
        {"alpha_pattern": {r"(q)?\1kv": 3}},
        {"alpha_pattern": {"q++kv": 3}},
        {"alpha_pattern": {"(.{50}){50}": 3}},
        {"alpha_pattern": {"qkv" * 100: 3}},
        {"alpha_pattern": {"[q]kv" + "|a" * number: 3 for number in range(65)}},
        {"alpha_pattern": {f"qkv{number}": 3 for number in range(2001)}},
        {"alpha_pattern": {"qkv": True}},
        {"alpha_pattern": {"qkv": "3"}},
        {"alpha_pattern": {"qkv": None}},
        {"alpha_pattern": {"qkv": math.inf}},
        {"alpha_pattern": {"qkv": 10**400}},
        {"alpha_pattern": ["qkv"]},
        {"lora_alpha": math.nan},
        {"lora_alpha": -math.inf},
        {"lora_alpha": 1e39},
        {"lora_alpha": 10**400},
        {"lora_alpha": "8"},
        {"lora_alpha": True},
        {"lora_alpha": None},
        {"lora_alpha": [8]},
        {"r": 0},
        {"r": -4},
        {"r": 2.5},
        {"r": "4"},
        {"r": True},
        {"r": 10**400},
        {"r": 3},
        {"rank_pattern": {"fc1": 4}},
        {"rank_pattern": {"qkv": 0}},
        {"rank_pattern": {"qkv": 3}},
        {"rank_pattern": {"qkv": False}},
        {"rank_pattern": {"qkv": math.nan}},
        {"rank_pattern": {"(a+)+$": 4}},
        {"use_rslora": "true"},
        {"use_rslora": 1},
        {"target_parameters": "fc1.weight"},
        {"a_field_of_the_future": 1},
    ],
    ids=str,
)
def test_settings_that_are_not_applied_are_refused_by_name(config: TextConfig, setting: dict[str, Any]):
    pairs = random_pairs(config, seed=1, rank=RANK, targets=lambda target: target == "blocks.0.attn.qkv")
    found = problems(config, peft_tensors(pairs), {**PEFT_CONFIG, **setting})
    assert next(iter(setting)) in found
    assert len(found) < 1000


def test_tensors_of_the_image_encoder_are_told_once_with_the_modules_to_train(moondream3: LoadedModel):
    config = moondream3.model.config.text
    tensors = peft_tensors(random_pairs(config, 1, RANK))
    for layer in range(2):
        for side, shape in (("A", (RANK, 8)), ("B", (8, RANK))):
            tensors[f"{PREFIX}.vision.blocks.{layer}.attn.qkv.lora_{side}.weight"] = torch.zeros(shape)
    problem = problems(config, tensors, PEFT_CONFIG)
    assert problem.startswith("tensors of the image encoder: 4; ")
    modules = problem.partition('target_modules=r"')[2].removesuffix('"')
    found = [name for name, _ in moondream3.model.named_modules(prefix="model") if re.fullmatch(modules, name)]
    assert {name.partition("model.text.")[2] for name in found} >= {"blocks.0.attn.qkv", "blocks.0.mlp.fc1"}
    assert [name for name in found if ".vision." in name] == []
