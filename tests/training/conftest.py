import json
from pathlib import Path

import pytest

from kestrel_runtime.loading import checkpoint
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.moondream.config import MoondreamConfig
from training.examples import Teacher

NANO = Path(checkpoint.__file__).parents[1] / "nano"


@pytest.fixture(scope="session")
def teacher() -> Teacher:
    config = MoondreamConfig.from_dict(json.loads((NANO / "config.json").read_text()))
    return Teacher(Tokenizer.from_file(NANO / "tokenizer.json"), config)
