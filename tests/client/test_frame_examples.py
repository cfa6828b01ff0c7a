"""The example that watches a screen, with a screen of our own. `make test-clients` runs that of a video."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.client.canned import CannedVision

EXAMPLE = Path(__file__).parents[2] / "clients/python/examples/frames/screens.py"


class Screen:
    """A screen of two pixels."""

    monitors = ("all", "first")

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends nothing."""

    def grab(self, monitor: str) -> Any:
        assert monitor == "first"
        return SimpleNamespace(rgb=bytes(6), width=2, height=1)


def test_the_example_reports_what_appears_on_the_screen_and_ends(
    address: str, vision: CannedVision, monkeypatch: pytest.MonkeyPatch
):
    library = ModuleType("mss")
    monkeypatch.setattr(library, "mss", Screen, raising=False)
    monkeypatch.setitem(sys.modules, "mss", library)
    spec = importlib.util.spec_from_file_location("screens", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    screens: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(screens)
    lines = list(screens.watch("bird", 0.3, address))
    assert lines == ["bird 1 appears at Box(x_min=0.25, y_min=0.125, x_max=0.75, y_max=0.5)"]
    assert vision.requests[0].settings.track
