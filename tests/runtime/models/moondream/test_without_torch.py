"""Tests what a process does without libraries that take long to import: torch, those of the hub and of adapters."""

import subprocess
import sys

_PREPARE = """
import io, sys
sys.modules["torch"] = None  # imports of it raise ModuleNotFoundError
from PIL import Image
from kestrel_runtime.api.requests import Query
from kestrel_runtime.engine import preprocessing
from kestrel_runtime.imaging.decoding import decode_image
from kestrel_runtime.loading.checkpoint import find_checkpoint
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.registry import family_of

checkpoint = find_checkpoint("moondream-nano")
family, config = family_of(checkpoint), MoondreamConfig.from_dict(checkpoint.config)
tokenizer = Tokenizer.from_file(checkpoint.tokenizer_file)
query = family.skills(config)["query"]
print(tokenizer.decode(token.id for token in query.prompt(Query("What colour is it?"), tokenizer, config).tokens))
file = io.BytesIO()
Image.new("RGB", (80, 40), "red").save(file, "PNG")
image = decode_image(file.getvalue(), max_image_pixels=10_000)
print(family.cropping(config).make_crops(image).pixels[0, 0, 0].tolist())
"""


def test_prompts_and_crops_are_made_without_torch():
    command = (sys.executable, "-c", _PREPARE)
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    prompt, pixel = printed.strip().rsplit("\n", 1)
    assert "What colour is it?" in prompt
    assert pixel == "[255, 0, 0]"


_START = """
import sys
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.engine.engine import LocalEngine

LocalEngine.start(EngineConfig(device="cpu", num_kv_pages=100)).close()
print([name for name in ("huggingface_hub", "pydantic") if name in sys.modules])
"""


def test_an_engine_without_names_of_the_hub_and_adapters_starts_without_their_libraries():
    command = (sys.executable, "-c", _START)
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"
