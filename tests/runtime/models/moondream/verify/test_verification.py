"""The acceptance of a checkpoint: the small reference fixtures pass, and a wrong number or answer is found."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.correctness.dimensions import write_expected
from bench.correctness.models import TOKENS, ModelShape, write_scaled_model
from bench.harness.workload import chart
from kestrel_ops import dequantise_int4, quantise_int4
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.verify.reference_fixture import ReferenceFixture
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL, copy_with_one_image

EXPERT_AXES = 3  # of the weights of all experts of a layer; other weights have at most two


def verify(folder: Path, dtype: str = "float32", **paths: Any) -> tuple[int, int, list[str]]:
    lines: list[str] = []
    config = replace(EngineConfig(device="cpu", dtype=dtype), **paths)
    passed, failed = ReferenceFixture(folder, config).run(lines.append)
    return passed, failed, lines


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The Moondream 3 folder with one image, to be spoiled."""
    return copy_with_one_image(MD3_SMALL, tmp_path / "fixture")


@pytest.mark.parametrize(("folder", "num_cases"), [(MD2_SMALL, 79), (MD3_SMALL, 71)], ids=["md2", "md3"])
def test_every_case_of_the_small_reference_folders_passes(folder: Path, num_cases: int):
    passed, failed, lines = verify(folder)
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert (passed, failed, len(lines)) == (num_cases, 0, num_cases)


def test_a_wrong_answer_and_a_number_outside_its_tolerance_are_named(copy: Path):
    expected = json.loads((copy / "expected.json").read_text())
    expected["images"][0]["calls"][0]["expect"]["answer"] += "!"
    expected["images"][0]["calls"][2]["expect"]["points"][0]["x"] += 1 / 1024
    (copy / "expected.json").write_text(json.dumps(expected))
    tensors = load_file(copy / "expected.safetensors")
    tensors["0.query_prompt_logits"][3] += 0.01
    save_file(tensors, copy / "expected.safetensors")
    passed, failed, lines = verify(copy)
    assert failed == 3
    assert passed == len(lines) - 3
    wrong = [line for line in lines if line.startswith("FAILED")]
    assert "query_prompt_logits" in wrong[0]
    assert "query(" in wrong[1]
    assert "point(" in wrong[2]


def test_fused_backends_pass_as_the_plain_ones_do(copy: Path):
    passed, failed, lines = verify(copy, text_backend="fused", vision_backend="fused")
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert (passed, failed) == (len(lines), 0)


@pytest.mark.parametrize(
    "formats",
    [{"dtype": "bfloat16"}, {"text_backend": "fused-float8"}, {"kv_dtype": "float8"}, {"expert_dtype": "float8"}],
    ids=["everything", "text", "keys and values", "experts"],
)
def test_a_shorter_type_is_held_to_its_own_tolerance_in_numbers_alone(tiny_fixture: Path, formats: dict[str, str]):
    passed, failed, lines = verify(tiny_fixture, **formats)
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert (passed, failed) == (len(lines), 0)
    assert not any("query(" in line for line in lines)


def test_experts_of_4_bits_answer_and_compute_exactly_as_the_weights_that_they_stand_for(
    tiny_shape: ModelShape, tmp_path: Path
):
    write_scaled_model(tmp_path, tiny_shape.config, fp8_experts=False, seed=1, words=TOKENS)
    weights = load_file(tmp_path / "model.safetensors")
    for name, stack in weights.items():
        if stack.ndim == EXPERT_AXES:
            exact = [dequantise_int4(*quantise_int4(expert), expert.shape[1]) for expert in stack]
            weights[name] = torch.stack(exact)
    save_file(weights, tmp_path / "model.safetensors")
    ((width, height),) = tiny_shape.image_sizes
    num_asked, num_certain = write_expected(tmp_path, {"image.jpg": chart(0, width, height)})
    passed, failed, lines = verify(tmp_path, expert_dtype="int4")
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert (passed, failed) == (len(lines), 0)
    skills = ("query(", "caption(", "point(", "detect(", "segment(")
    assert sum(any(skill in line for skill in skills) for line in lines) == num_certain
    assert 0 < num_certain <= num_asked


def test_a_folder_without_answers_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no reference fixture: expected\.json is missing"):
        ReferenceFixture(tmp_path, EngineConfig())
