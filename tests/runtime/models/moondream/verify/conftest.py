"""A reference fixture that takes a tenth of the time of those in `tests/golden`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.correctness.dimensions import shape_of, write_fixture
from bench.correctness.models import ModelShape


@pytest.fixture(scope="session")
def tiny_shape() -> ModelShape:
    """Four layers of four heads and seven experts of which four are chosen, products of multiples of 16, an image
    that is cut."""
    shape = shape_of("seed-5")
    return replace(shape, image_sizes=shape.image_sizes[-1:])


@pytest.fixture(scope="session")
def tiny_fixture(tiny_shape: ModelShape, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of that shape, with the tensors of its plain backend in float32 and one wrong answer."""
    folder = tmp_path_factory.mktemp("tiny") / "fixture"
    write_fixture(folder, tiny_shape, with_answers=False)
    expected = json.loads((folder / "expected.json").read_text())
    call = {"skill": "query", "args": {"question": "What is shown?", "reasoning": False}, "expect": {"answer": "-"}}
    expected["images"][0]["calls"] = [call]
    (folder / "expected.json").write_text(json.dumps(expected))
    return folder
