"""Valid adapters of PEFT have the scales that PEFT itself gives them.

The scales were recorded with PEFT 0.21.2: `get_peft_model` on modules of these names, with r=4 and lora_alpha=8,
and of each changed layer its `scaling` and `r`.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from kestrel_runtime.adapters.files import AdapterFiles
from kestrel_runtime.api.errors import AdapterInvalid
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.adapters.formats import read_adapter
from kestrel_runtime.models.moondream.config import TextConfig
from tests.adapter_folders import PEFT_CONFIG, peft_tensors, random_pairs

RANK = 4
MODULES = ("blocks.0.attn.qkv", "blocks.1.attn.qkv", "blocks.1.attn.proj", "blocks.0.mlp.fc1")
EXPERTS = ("blocks.3.mlp.fc1", "blocks.3.mlp.fc2")

ALPHAS = [
    ({"model.text.blocks.1.attn.qkv": 16}, (2, 4, 2, 2)),
    ({"text.blocks.1.attn.qkv": 16}, (2, 4, 2, 2)),
    ({"qkv": 16}, (4, 4, 2, 2)),
    ({"attn.qkv": 16}, (4, 4, 2, 2)),
    ({"^model.text.blocks.1.attn.qkv": 16}, (2, 4, 2, 2)),
    ({"model.text.blocks.1.attn.qkv$": 16}, (2, 4, 2, 2)),
    ({"1\\.attn\\.qkv": 16}, (2, 4, 2, 2)),
    ({"blocks\\.1\\..*": 16}, (2, 4, 4, 2)),
    ({"blocks\\.\\d+\\.attn\\.(qkv|proj)": 16}, (4, 4, 4, 2)),
    ({"qkv|proj": 16}, (4, 4, 4, 2)),
    ({".*": 16}, (4, 4, 4, 4)),
    ({"qkv": 12, "model.text.blocks.1.*": 16}, (3, 3, 4, 2)),
    ({"model.text.blocks.1.attn.qkv": 16, "qkv": 12}, (3, 4, 2, 2)),
    ({"^model\\.text\\.blocks\\.[1-9]\\.attn\\.qkv$": 20}, (2, 5, 2, 2)),
    ({"blocks.1.attn.[a-z]+": 20}, (2, 5, 5, 2)),
    ({"(?:text\\.)?blocks\\.0\\.attn\\.\\w{3}": 20}, (5, 2, 2, 2)),
    ({"model.text.blocks.(0|1).mlp.fc1": 2}, (2, 2, 2, 0.5)),
    ({"blocks.1.attn.q?kv": 16}, (2, 4, 2, 2)),
    ({"text.blocks.1.attn.qkv|nothing": 16}, (2, 4, 2, 2)),
    ({"(.*\\.)?qkv": 1.5}, (0.375, 0.375, 2, 2)),
    ({"(.*\\.)*qkv": 16}, (4, 4, 2, 2)),
    ({"(\\w+\\.)+qkv": 16}, (4, 4, 2, 2)),
    ({"qkv": 0}, (0, 0, 2, 2)),
    ({"qkv": -16}, (-4, -4, 2, 2)),
]
RANKS = [
    ({"rank_pattern": {"qkv": 2}}, (4, 4, 2, 2), (2, 2, 4, 4)),
    (
        {"rank_pattern": {"model.text.blocks.1.attn.qkv": 2}, "alpha_pattern": {"blocks.1.attn.qkv": 16}},
        (2, 8, 2, 2),
        (4, 2, 4, 4),
    ),
    (
        {"rank_pattern": {"qkv": 2}, "alpha_pattern": {"proj": 16}, "use_rslora": True},
        (32**0.5, 32**0.5, 8, 4),
        (2, 2, 4, 4),
    ),
    ({"rank_pattern": {"blocks\\.1\\..*": 1, "qkv": 2}}, (4, 8, 8, 2), (2, 1, 1, 4)),
]
PARAMETERS = [
    ({}, (2, 2)),
    ({"mlp.fc1.weight": 16}, (4, 2)),
    ({"fc1.weight": 16, "fc2.weight": 20}, (4, 5)),
    ({"weight": 16}, (4, 4)),
    ({".*fc1.*": 16}, (4, 2)),
    ({"^model.text.blocks.3.mlp.fc1.weight": 16}, (4, 2)),
]


@pytest.fixture
def config(moondream3: LoadedModel) -> TextConfig:
    return moondream3.model.config.text


def scales(
    config: TextConfig, peft: Mapping[str, Any], targets: Mapping[str, int], max_rank: int = RANK
) -> tuple[float, ...]:
    """The factor of each target: what B was multiplied with. `targets` have the ranks of their tensors."""
    tensors: dict[str, torch.Tensor] = {}
    given: dict[str, torch.Tensor] = {}
    for target, rank in targets.items():
        pairs = random_pairs(config, seed=1, rank=max_rank, targets=lambda name, target=target: name == target)
        a, b = pairs[target]
        pairs = {target: (a[..., :rank, :], b[..., :rank])}
        tensors |= peft_tensors(pairs)
        given[target] = pairs[target][1].transpose(-1, -2)
    found = read_adapter(AdapterFiles("some", peft, tensors, b""), config, max_rank, torch.float32).factors
    return tuple(round((found[name].b / given[name]).mean().item(), 4) for name in targets)


@pytest.mark.parametrize(("alphas", "expected"), ALPHAS, ids=[json.dumps(keys) for keys, _ in ALPHAS])
def test_alphas_by_name_scale_as_in_peft(config: TextConfig, alphas: dict[str, float], expected: tuple[float, ...]):
    peft = {**PEFT_CONFIG, "alpha_pattern": alphas}
    assert scales(config, peft, dict.fromkeys(MODULES, RANK)) == expected


@pytest.mark.parametrize(("settings", "expected", "ranks"), RANKS, ids=[json.dumps(row[0]) for row in RANKS])
def test_ranks_by_name_scale_as_in_peft(
    config: TextConfig, settings: dict[str, Any], expected: tuple[float, ...], ranks: tuple[int, ...]
):
    found = scales(config, {**PEFT_CONFIG, **settings}, dict(zip(MODULES, ranks, strict=True)))
    assert found == tuple(round(scale, 4) for scale in expected)


@pytest.mark.parametrize(("alphas", "expected"), PARAMETERS, ids=[json.dumps(keys) for keys, _ in PARAMETERS])
def test_keys_match_the_parameters_names_where_parameters_were_trained(
    config: TextConfig, alphas: dict[str, float], expected: tuple[float, ...]
):
    peft = {
        **PEFT_CONFIG,
        "target_modules": [],
        "target_parameters": ["mlp.fc1.weight", "mlp.fc2.weight"],
        "alpha_pattern": alphas,
    }
    assert config.moe is not None
    max_rank = RANK * config.moe.experts_per_token
    assert scales(config, peft, dict.fromkeys(EXPERTS, RANK), max_rank) == expected


def test_keys_do_not_match_the_modules_names_where_parameters_were_trained(config: TextConfig):
    assert config.moe is not None
    peft = {
        **PEFT_CONFIG,
        "target_parameters": ["mlp.fc1.weight", "mlp.fc2.weight"],
        "alpha_pattern": {"mlp.fc1": 16},
    }
    with pytest.raises(AdapterInvalid, match=r"'mlp\.fc1' matches no module"):
        scales(config, peft, dict.fromkeys(EXPERTS, RANK), RANK * config.moe.experts_per_token)
