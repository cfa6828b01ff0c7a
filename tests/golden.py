"""The golden checkpoints: small models with random weights and the reference implementation's answers.

Two lie in `tests/golden` and are all that a test may rely on. Larger ones lie beside a development checkout;
tests that can use more take `shared_folders()`. Knows where the files are, not what a model does with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
GOLDEN = CHECKOUT / "tests" / "golden"
MD2_SMALL = GOLDEN / "md2-small"
MD3_SMALL = GOLDEN / "md3-small"
SMALL_FOLDERS = (MD2_SMALL, MD3_SMALL)


def shared_folders() -> tuple[Path, ...]:
    """Every golden folder at hand: those beside the checkout where they exist, else the two small ones."""
    beside = CHECKOUT.parent / "shared" / "golden"
    found = tuple(sorted(folder.parent for folder in beside.glob("*/expected.json")))
    return found or SMALL_FOLDERS


def expected(folder: Path) -> dict[str, Any]:
    """What the reference answers for this folder: the parsed `expected.json`."""
    return json.loads((folder / "expected.json").read_text(encoding="utf-8"))


def model_config(folder: Path) -> dict[str, Any]:
    """The model's dimensions and templates: the parsed `config.json`."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def image_paths(folder: Path) -> tuple[Path, ...]:
    """The folder's images, in the order of `expected.json`."""
    return tuple(folder / case["image"] for case in expected(folder)["images"])
