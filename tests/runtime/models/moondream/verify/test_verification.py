"""The acceptance of a checkpoint: the small reference fixtures pass, and a wrong number or answer is found."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kestrel_ops import dequantise_int4, quantise_int4
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.verify.recording import QUESTIONS, record_expected
from kestrel_runtime.verify.reference_fixture import ReferenceFixture
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL, copy_with_one_image


def verify(folder: Path, dtype: str = "float32", **paths: Any) -> tuple[int, int, list[str]]:
    lines: list[str] = []
    config = replace(EngineConfig(device="cpu", dtype=dtype), **paths)
    passed, failed = ReferenceFixture(folder, config).run(lines.append)
    return passed, failed, lines


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The Moondream 3 folder with one image, to be spoiled."""
    return copy_with_one_image(MD3_SMALL, tmp_path / "fixture")


@pytest.mark.parametrize(("folder", "num_cases"), [(MD2_SMALL, 56), (MD3_SMALL, 45)], ids=["md2", "md3"])
def test_every_case_of_the_small_reference_folders_passes(folder: Path, num_cases: int) -> None:
    passed, failed, lines = verify(folder)
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert (passed, failed, len(lines)) == (num_cases, 0, num_cases)


def test_a_wrong_answer_is_named(copy: Path) -> None:
    expected = json.loads((copy / "expected.json").read_text())
    expected["images"][0]["calls"][0]["expect"]["answer"] += "!"
    expected["images"][0]["calls"][2]["expect"]["points"][0]["x"] += 1 / 1024
    (copy / "expected.json").write_text(json.dumps(expected))
    passed, failed, lines = verify(copy)
    assert failed == 2
    assert passed == len(lines) - 2
    wrong = [line for line in lines if line.startswith("FAILED")]
    assert "query(" in wrong[0]
    assert "point(" in wrong[1]


def test_a_number_outside_its_tolerance_is_named(copy: Path) -> None:
    tensors = load_file(copy / "expected.safetensors")
    tensors["0.query_prompt_logits"][3] += 0.01
    save_file(tensors, copy / "expected.safetensors")
    _, failed, lines = verify(copy)
    assert failed == 1
    assert any(line.startswith("FAILED") and "query_prompt_logits" in line for line in lines)


def test_a_shorter_type_is_held_to_its_own_tolerance_in_numbers_alone(copy: Path) -> None:
    passed, failed, lines = verify(copy, "bfloat16")
    assert (passed, failed) == (len(lines), 0)
    assert not any("query(" in line for line in lines)


@pytest.mark.parametrize("paths", [{"text_path": "fused"}, {"vision_path": "fused"}], ids=["text", "vision"])
def test_fused_paths_pass_as_the_plain_ones_do(copy: Path, paths: dict[str, str]) -> None:
    passed, failed, lines = verify(copy, **paths)
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert (passed, failed) == (len(lines), 0)


@pytest.mark.parametrize(
    "paths", [{"text_path": "fused-float8"}, {"kv_dtype": "float8"}], ids=["text", "keys and values"]
)
def test_float8_is_held_to_its_own_tolerance_in_numbers_alone(copy: Path, paths: dict[str, str]) -> None:
    passed, _, lines = verify(copy, **paths)
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert passed == len(lines)
    assert not any("query(" in line for line in lines)


def widen_experts(folder: Path, change: Callable[[Tensor], Tensor] = lambda expert: expert) -> None:
    """Write the experts of a checkpoint as float32, each changed."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_scale")]:
        own = name.replace("moe_quant.up_scale", "mlp.experts.weight").replace(
            "moe_quant.down_scale", "mlp.output_experts.weight"
        )
        wide = weights[own].float() * weights.pop(name)[..., None]
        weights[own] = torch.stack([change(expert) for expert in wide])
    save_file(weights, folder / "model.safetensors")


def test_rounded_experts_are_held_to_the_tolerance_of_float8(copy: Path) -> None:
    noise = torch.Generator().manual_seed(
        1
    )  # less than a hundredth of what float8 rounds; without it nothing changes
    widen_experts(copy, lambda expert: expert * (1 + 1e-4 * torch.randn(expert.shape, generator=noise)))
    passed, _, lines = verify(copy, expert_dtype="float8")
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert passed == len(lines)
    assert not any("query(" in line for line in lines)


def test_experts_of_4_bits_answer_and_compute_exactly_as_the_weights_that_they_stand_for(copy: Path) -> None:
    widen_experts(copy, lambda expert: dequantise_int4(*quantise_int4(expert), expert.shape[1]))
    questions = json.loads((copy / "expected.json").read_text()) | {"text_only": []}
    for image in questions["images"]:
        asked = (call["args"]["question"] for call in image["calls"] if call["skill"] == "query")
        image["query_prompt"] = next(asked)
    (copy / QUESTIONS).write_text(json.dumps(questions))
    num_asked, num_certain = record_expected(copy, EngineConfig(model=str(copy), device="cpu"))
    passed, _, lines = verify(copy, expert_dtype="int4")
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert passed == len(lines)
    assert sum("query(" in line or "point(" in line for line in lines) == num_certain
    assert 0 < num_certain <= num_asked


def test_a_folder_without_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no reference fixture: expected\.json is missing"):
        ReferenceFixture(tmp_path, EngineConfig())
