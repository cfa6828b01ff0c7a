"""An engine is built part by part; its threads start when all parts are there."""

import threading

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.runtime.fake_runner import FakeRunner

CONFIG = EngineConfig(model="", num_kv_pages=64)


def test_graphs_are_captured_before_any_thread_starts(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[set[threading.Thread]] = []
    before = set(threading.enumerate())

    class Runner(FakeRunner):
        def capture(self) -> None:
            started.append(set(threading.enumerate()) - before)

    monkeypatch.setattr("tests.runtime.models.second_family.small_pictures.StepRunner", Runner)
    engine = LocalEngine(loaded, CONFIG)
    try:
        assert started == [set()]
        assert {"kestrel-engine", "kestrel-watchdog"} <= {item.name for item in threading.enumerate()}
    finally:
        engine.close()


def test_an_engine_that_cannot_be_built_leaves_no_thread_behind(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Runner(FakeRunner):
        def capture(self) -> None:
            raise CheckpointError("no memory for the graphs")

    monkeypatch.setattr("tests.runtime.models.second_family.small_pictures.StepRunner", Runner)
    before = set(threading.enumerate())
    with pytest.raises(CheckpointError, match="no memory for the graphs"):
        LocalEngine(loaded, CONFIG)
    assert set(threading.enumerate()) <= before
