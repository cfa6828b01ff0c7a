"""A stand-in for the public reference implementation: its published layout and methods, with recorded answers.

`published` has the code that a checkpoint brings. `transformers` loads it, as the library of that name does.
"""

import json
import shutil
from pathlib import Path

from tests.reference_fixtures import expected

STAND_INS = Path(__file__).parent
"""A folder for PYTHONPATH in which `transformers` is the stand-in."""


def publish(fixture: Path, folder: Path) -> Path:
    """Make of a reference fixture a checkpoint that brings code of the reference; returns `folder`.

    That code answers what the fixture holds, from `recorded.json` and `recorded.safetensors`.
    """
    shutil.copytree(fixture, folder)
    for suffix in ("json", "safetensors"):
        (folder / f"expected.{suffix}").rename(folder / f"recorded.{suffix}")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "hf_moondream.HfMoondream"}
    (folder / "config.json").write_text(json.dumps(config))
    for module in (STAND_INS / "published").glob("*.py"):
        shutil.copy(module, folder)
    return folder


def ask_what_is_recorded(fixture: Path, folder: Path) -> None:
    """Write the images and questions of a fixture to `folder`, without its answers."""
    asked = expected(fixture)
    calls = [call for entry in asked["images"] for call in entry["calls"]] + asked.setdefault("text_only", [])
    for call in calls:
        del call["expect"]
    for entry in asked["images"]:
        shutil.copy(fixture / entry["image"], folder)
        entry["query_prompt"] = next(
            call["args"]["question"] for call in entry["calls"] if call["skill"] == "query"
        )
        for found in ("tiling", "n_crops", "query_prompt_tokens"):
            del entry[found]
    (folder / "questions.json").write_text(json.dumps(asked))
