"""Loading beside the imports of a process."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.models import loaded_model
from kestrel_runtime.models.background_load import BackgroundLoad, read_ahead
from kestrel_runtime.models.family import LoadedWeights
from kestrel_runtime.models.moondream.family import MoondreamFamily


def test_the_model_is_that_of_the_configuration():
    loaded = BackgroundLoad(EngineConfig(model="moondream-nano", device="cpu")).result()
    assert loaded.checkpoint.name == "moondream-nano"
    assert loaded.model.device.type == "cpu"


def test_a_checkpoint_that_is_not_there_is_reported_where_the_model_is_taken(tmp_path: Path):
    loading = BackgroundLoad(EngineConfig(model=str(tmp_path), device="cpu"))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="holds no weights"):
            loading.result()


def test_files_that_cannot_be_read_ahead_are_left_to_those_who_read_them(tmp_path: Path):
    (tmp_path / "there").write_bytes(bytes(7))
    read_ahead([tmp_path / "there", tmp_path / "missing", tmp_path])


def _family_that_prepares(monkeypatch: pytest.MonkeyPatch, prepare: Callable[[threading.Event], object]) -> None:
    class Family(MoondreamFamily):
        """Hands out one function, and loads the weights when it was called."""

        def load(
            self, checkpoint: Any, config: Any, device: Any, dtype: Any, meanwhile: Any = None
        ) -> LoadedWeights:
            called = threading.Event()
            meanwhile(lambda may_fork: (called.set(), prepare(may_fork)))
            called.wait()
            return super().load(checkpoint, config, device, dtype)

    monkeypatch.setattr(loaded_model, "family_of", lambda checkpoint: Family())


def test_who_waits_for_the_model_prepares_meanwhile(monkeypatch: pytest.MonkeyPatch):
    threads: list[int] = []
    _family_that_prepares(monkeypatch, lambda may_fork: threads.append(threading.get_ident()))
    BackgroundLoad(EngineConfig(model="moondream-nano", device="cpu")).result()
    assert threads == [threading.get_ident()]


def test_who_prepares_learns_when_the_threads_of_the_load_have_no_tensors(monkeypatch: pytest.MonkeyPatch):
    learnt: list[bool] = []
    _family_that_prepares(monkeypatch, lambda may_fork: learnt.append(may_fork.wait(60)))
    BackgroundLoad(EngineConfig(model="moondream-nano", device="cpu")).result()
    assert learnt == [True]


def test_what_cannot_be_prepared_is_reported(monkeypatch: pytest.MonkeyPatch):
    def fail(may_fork: threading.Event) -> None:
        raise CheckpointError("no such kernels")

    _family_that_prepares(monkeypatch, fail)
    loading = BackgroundLoad(EngineConfig(model="moondream-nano", device="cpu"))
    with pytest.raises(CheckpointError, match="no such kernels"):
        loading.result()
    loading.result()  # its thread does not outlive the test
