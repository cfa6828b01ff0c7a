"""One precision compared with recorded answers: what fails it, what is only counted, and what cannot be judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.verify import verification
from kestrel_runtime.verify import acceptance
from kestrel_runtime.verify.acceptance import PrecisionResult, Verdict, check_precision
from tests.reference_fixtures import MD2_SMALL, copy_with_one_image, expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Answers of the reference about one image, without the checkpoint."""
    copy = copy_with_one_image(MD2_SMALL, tmp_path / "expected")
    (copy / "model.safetensors").unlink()
    answers = expected(copy)
    answers["images"][0]["query_prompt"] = answers["images"][0]["calls"][0]["args"]["question"]
    write_answers(copy, answers)
    return copy


def write_answers(folder: Path, answers: dict[str, Any]) -> None:
    (folder / "expected.json").write_text(json.dumps(answers))


def check(folder: Path, dtype: str = "float32") -> PrecisionResult:
    config = EngineConfig(model=str(MD2_SMALL), device="cpu", dtype=dtype, max_batch_size=2)
    return check_precision(folder, dtype, config, speed_s=0.0, tell=lambda line: None)


def test_a_checkpoint_that_agrees_with_the_reference_passes(folder: Path) -> None:
    result = check(folder)
    assert (result.failures, result.problems, result.is_exact) == ([], (), True)
    assert len(result.cases) > 5
    assert result.agreement.num_equal == result.agreement.num_answers == len(result.answers) > 4
    assert result.setup == "cpu, float32, text path plain, vision path plain, key-value cache in float32"
    assert [speed.num_callers for speed in result.speeds] == [1, 2]
    assert all(speed.requests_per_s > 0 and speed.p50_s > 0 for speed in result.speeds)
    assert Verdict.of([result]) is Verdict.PASSED


def test_where_the_reference_differs_is_named_and_fails(folder: Path) -> None:
    answers = expected(folder)
    call = next(call for call in answers["images"][0]["calls"] if call["skill"] == "point")
    call["expect"]["points"][0]["x"] += 0.01
    answers["images"][0]["n_crops"] += 1
    write_answers(folder, answers)
    tensors = load_file(folder / "expected.safetensors")
    tensors["0.query_prompt_logits"][3] += 0.01
    save_file(tensors, folder / "expected.safetensors")
    result = check(folder)
    name = answers["images"][0]["image"]
    failures = [line.partition(":")[0] for line in result.failures]
    assert failures == [
        f"{name} tiling",
        f"{name} query_prompt_logits",
        f"{name} point(object='copy', max_objects=4)",
    ]
    assert Verdict.of([result]) is Verdict.FAILED


def test_answers_that_the_last_bits_of_the_weights_decide_are_not_judged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_much(loaded: LoadedModel) -> None:
        with torch.inference_mode():
            loaded.model.text.lm_head.bias.add_(torch.randn(640, generator=torch.manual_seed(1)), alpha=9)

    answers = expected(folder)
    query = answers["images"][0]["calls"][0]
    query["expect"]["answer"] += "!"
    write_answers(folder, answers)
    monkeypatch.setattr(acceptance, "nudge", change_much)
    result = check(folder)
    assert result.uncertain == {0}
    assert result.failures == []
    assert result.agreement.num_equal == result.agreement.num_answers - 1


def test_skills_that_neither_side_has_are_left_out_and_those_of_the_reference_fail(folder: Path) -> None:
    answers = expected(folder)
    segment = {"skill": "segment", "args": {"object": "copy"}}
    answers["images"][0]["calls"] = [segment, {**segment, "expect": {"segments": []}}]
    answers["text_only"] = []
    write_answers(folder, answers)
    result = check(folder)
    assert len(result.answers) == 1
    assert ["SkillUnsupported" in line for line in result.failures] == [True]


def test_answers_in_shorter_formats_are_counted_and_not_judged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(verification, "expected_errors", out_of_memory)
    answers = expected(folder)
    answers["images"][0]["calls"][0]["expect"]["answer"] += "!"
    write_answers(folder, answers)
    result = check(folder, "bfloat16")
    assert (result.is_exact, result.failures) == (False, [])
    assert result.agreement.num_equal < result.agreement.num_answers
    assert result.problems == ("tensors were not compared: the memory of the device is too small for it",)
    assert Verdict.of([result]) is Verdict.INCOMPLETE


def test_nothing_compared_is_no_pass() -> None:
    assert Verdict.of([]) is Verdict.INCOMPLETE
    nothing = PrecisionResult("float32", "", True, (), (), frozenset(), (), ())
    assert Verdict.of([nothing]) is Verdict.INCOMPLETE
