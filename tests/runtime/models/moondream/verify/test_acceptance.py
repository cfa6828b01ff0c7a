"""One precision compared with recorded answers: what fails it, what is only counted, and what cannot be judged."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.correctness.dimensions import shape_of, write_fixture
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.verify import verification
from kestrel_runtime.verify import acceptance
from kestrel_runtime.verify.acceptance import PrecisionResult, Verdict, check_precision
from tests.reference_fixtures import expected

Check = Callable[..., PrecisionResult]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Moondream 2 with its answers about one image, which has points in it."""
    folder = tmp_path_factory.mktemp("recorded")
    shape = shape_of("seed-2")
    write_fixture(folder, replace(shape, image_sizes=shape.image_sizes[-1:]))
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """The answers without the checkpoint."""
    return shutil.copytree(recorded, tmp_path / "expected", ignore=shutil.ignore_patterns("model.safetensors"))


@pytest.fixture
def check(recorded: Path, folder: Path) -> Check:
    """Compares the checkpoint with the answers, in a precision."""

    def run(dtype: str = "float32") -> PrecisionResult:
        config = EngineConfig(model=str(recorded), device="cpu", dtype=dtype, max_batch_size=2)
        return check_precision(folder, dtype, config, speed_s=0.0, report=lambda line: None)

    return run


def write_answers(folder: Path, answers: dict[str, Any]) -> None:
    (folder / "expected.json").write_text(json.dumps(answers))


def test_a_checkpoint_that_agrees_with_the_reference_passes(check: Check):
    result = check()
    assert (result.failures, result.problems, result.is_exact) == ([], (), True)
    assert len(result.cases) > 5
    assert result.agreement.num_equal == result.agreement.num_answers == len(result.answers) > 4
    assert result.setup == "cpu, float32, text backend plain, vision backend plain, key-value cache in float32"
    assert [speed.num_callers for speed in result.speeds] == [1, 2]
    assert all(speed.requests_per_s > 0 and speed.p50_s > 0 for speed in result.speeds)
    assert Verdict.of([result]) is Verdict.PASSED


def test_where_the_reference_differs_is_named_and_fails(check: Check, folder: Path):
    answers = expected(folder)
    call = next(call for call in answers["images"][0]["calls"] if call["skill"] == "point")
    call["expect"]["points"][0]["x"] += 0.01
    answers["images"][0]["n_crops"] += 1
    write_answers(folder, answers)
    tensors = load_file(folder / "expected.safetensors")
    tensors["0.query_prompt_logits"][3] += 0.01
    save_file(tensors, folder / "expected.safetensors")
    result = check()
    name = answers["images"][0]["image"]
    failures = [line.partition(":")[0] for line in result.failures]
    assert failures == [
        f"{name} crop grid",
        f"{name} query_prompt_logits",
        f"{name} point(object='tallest bar', max_objects=4)",
    ]
    assert Verdict.of([result]) is Verdict.FAILED


def test_answers_that_the_last_bits_of_the_weights_decide_are_not_judged(
    check: Check, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def change_much(loaded: LoadedModel) -> None:
        with torch.inference_mode():
            bias = loaded.model.text.lm_head.bias
            bias.add_(torch.randn(bias.shape, generator=torch.manual_seed(1)), alpha=9)

    answers = expected(folder)
    query = answers["images"][0]["calls"][0]
    query["expect"]["answer"] += "!"
    write_answers(folder, answers)
    monkeypatch.setattr(acceptance, "nudge", change_much)
    result = check()
    assert result.uncertain == {0}
    assert result.failures == []
    assert result.agreement.num_equal == result.agreement.num_answers - 1


def test_skills_that_neither_side_has_are_left_out_and_those_of_the_reference_fail(check: Check, folder: Path):
    answers = expected(folder)
    segment = {"skill": "segment", "args": {"object": "copy"}}
    answers["images"][0]["calls"] = [segment, {**segment, "expect": {"segments": []}}]
    answers["text_only"] = []
    write_answers(folder, answers)
    result = check()
    assert len(result.answers) == 1
    assert ["SkillUnsupported" in line for line in result.failures] == [True]


def test_answers_in_shorter_formats_are_counted_and_not_judged(
    check: Check, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(verification, "expected_errors", out_of_memory)
    answers = expected(folder)
    answers["images"][0]["calls"][0]["expect"]["answer"] += "!"
    write_answers(folder, answers)
    result = check("bfloat16")
    assert (result.is_exact, result.failures) == (False, [])
    assert result.agreement.num_equal < result.agreement.num_answers
    assert result.problems == ("tensors were not compared: the memory of the device is too small for it",)
    assert Verdict.of([result]) is Verdict.INCOMPLETE


def test_nothing_compared_is_no_pass():
    assert Verdict.of([]) is Verdict.INCOMPLETE
    nothing = PrecisionResult("float32", "", True, (), (), frozenset(), (), ())
    assert Verdict.of([nothing]) is Verdict.INCOMPLETE
