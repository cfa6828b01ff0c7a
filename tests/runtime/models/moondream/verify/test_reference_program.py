"""The program that asks the reference implementation, run against a stand-in in its published layout."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kestrel_runtime.models.moondream.verify.reference_program import exact_pixels, main, record
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL, expected
from tests.runtime.models.moondream.verify.stand_ins import STAND_INS, ask_what_is_recorded, publish


@pytest.fixture(autouse=True)
def with_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setattr(sys, "modules", sys.modules.copy())


def answers_of(fixture: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Has the stand-in answer the questions of a fixture; returns the folder and `reference.json`."""
    asked = tmp_path / "asked"
    asked.mkdir()
    ask_what_is_recorded(fixture, asked)
    assert main(asked, str(publish(fixture, tmp_path / "checkpoint")), "", "cpu") == 0
    return asked, json.loads((asked / "reference.json").read_text())


@pytest.mark.parametrize("fixture", [MD2_SMALL, MD3_SMALL], ids=lambda folder: folder.name)
def test_answers_tokens_and_tensors_of_the_reference_are_recorded(fixture: Path, tmp_path: Path):
    folder, facts = answers_of(fixture, tmp_path)
    recorded, wanted = expected(folder), expected(fixture)
    wanted.setdefault("text_only", [])
    for entry in recorded["images"]:
        del entry["query_prompt"]
    assert recorded == wanted
    tensors, wanted_tensors = (
        load_file(folder / "expected.safetensors"),
        load_file(fixture / "expected.safetensors"),
    )
    pixels = {name for name in tensors if name.endswith("_u8")}
    assert tensors.keys() - pixels == wanted_tensors.keys()
    assert all(torch.equal(tensors[name], wanted) for name, wanted in wanted_tensors.items())
    assert len(pixels) == 2 * len(wanted["images"])
    assert facts["notes"] == []
    assert facts["versions"]["transformers"] == "0 (stand-in)"


def test_what_the_reference_cannot_answer_is_noted_and_left_open(tmp_path: Path):
    ask_what_is_recorded(MD2_SMALL, tmp_path)
    questions = json.loads((tmp_path / "questions.json").read_text())
    questions["images"] = questions["images"][:1]
    unknown = {"skill": "caption", "args": {"length": "poem"}}
    questions["images"][0]["calls"] += [{"skill": "segment", "args": {"object": "copy"}}, unknown]
    (tmp_path / "questions.json").write_text(json.dumps(questions))

    loader = importlib.import_module("transformers").AutoModelForCausalLM
    model = loader.from_pretrained(str(publish(MD2_SMALL, tmp_path / "checkpoint")), trust_remote_code=True)
    assert record(model, tmp_path, lambda line: None) == [
        "the reference has no segment",
        "the reference failed in caption: StopIteration: ",
    ]
    *answered, segment, caption = expected(tmp_path)["images"][0]["calls"]
    assert all("expect" in call for call in answered)
    assert "expect" not in segment
    assert "expect" not in caption


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pixels_that_the_reference_has_rounded_are_restored(dtype: torch.dtype):
    pixels = torch.arange(256, dtype=torch.uint8).expand(2, 3, 4, 256).contiguous()
    found, exact = exact_pixels(pixels.to(dtype).div_(255.0).sub_(0.5).div_(0.5))
    assert found is not None
    assert torch.equal(found, pixels.permute(0, 2, 3, 1))
    assert torch.equal(exact, pixels.float().div(255.0).sub(0.5).div(0.5))


def test_other_pixels_are_left_as_they_are():
    crops = torch.rand(1, 3, 4, 4)
    found, same = exact_pixels(crops)
    assert found is None
    assert torch.equal(same, crops)
