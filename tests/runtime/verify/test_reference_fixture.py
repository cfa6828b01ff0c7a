"""A reference fixture of any family: its tensors are the family's to compare, its answers are compared here."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models import registry
from kestrel_runtime.models.family import Case, Comparison, Verification
from kestrel_runtime.verify.answers import answer_of
from kestrel_runtime.verify.reference_fixture import ReferenceFixture
from tests.runtime.models.second_family import small_text
from tests.runtime.models.second_family.checkpoint import write_checkpoint

QUESTIONS = ["hello", "why?"]
NUM_TOKENS = 8


def config_of(folder: Path, dtype: str = "float32") -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", dtype=dtype)


@pytest.fixture
async def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fixture of the second family: two questions, and the embedding of its first token."""
    address = f"{small_text.__name__}:FAMILY"
    monkeypatch.setattr(registry, "FAMILIES", {**registry.FAMILIES, "small-text": address})
    write_checkpoint(tmp_path)
    engine = LocalEngine.start(config_of(tmp_path))
    calls = []
    for question in QUESTIONS:
        request = Query(question, sampling=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
        answer = answer_of((await engine.submit(request).result()).output)
        args = {"question": question, "reasoning": False}
        calls.append({"skill": "query", "args": args, "expect": answer})
    engine.close()
    expected = {"max_tokens": NUM_TOKENS, "images": [], "text_only": calls}
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    save_file({"first": torch.ones(3)}, tmp_path / "expected.safetensors")
    return tmp_path


def run(folder: Path, dtype: str = "float32") -> list[str]:
    lines: list[str] = []
    passed, failed = ReferenceFixture(folder, config_of(folder, dtype)).run(lines.append)
    assert passed == sum(line.startswith("ok ") for line in lines)
    assert failed == sum(line.startswith("FAILED ") for line in lines)
    return lines


def test_every_answer_is_compared(folder: Path):
    assert [line.startswith("ok      no image query(question=") for line in run(folder)] == [True, True]


def test_a_wrong_answer_is_named(folder: Path):
    expected = json.loads((folder / "expected.json").read_text())
    expected["text_only"][1]["expect"]["answer"] += "!"
    (folder / "expected.json").write_text(json.dumps(expected))
    assert [line.partition(" ")[0] for line in run(folder)] == ["ok", "FAILED"]


def test_answers_of_a_shorter_type_are_not_compared(folder: Path):
    assert run(folder, "bfloat16") == []


def test_a_request_that_is_refused_fails_its_case(folder: Path):
    expected = json.loads((folder / "expected.json").read_text())
    expected["text_only"][0]["args"]["question"] = "word " * 200
    (folder / "expected.json").write_text(json.dumps(expected))
    first, second = run(folder)
    assert first.startswith("FAILED")
    assert "ContextLengthExceeded" in first
    assert second.startswith("ok")


def test_the_family_compares_tensors_with_requests_prepared_as_the_engine_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def tensor_cases(fixture, prepare):
        sequence = prepare(Query("hello"))
        yield Case("prompt", None if sequence.num_prompt_tokens > 1 else "empty")
        error = (fixture.tensors["first"] - 0.5).abs().max().item()
        yield Case("first", "too far", Comparison("largest error", error, 0.1))

    monkeypatch.setattr(small_text.SmallTextFamily, "verification", lambda *_: Verification(False, tensor_cases))
    assert run(folder) == ["ok      prompt", "FAILED  first: too far"]


def test_a_folder_without_answers_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no reference fixture: expected\.json is missing"):
        ReferenceFixture(tmp_path, EngineConfig())
