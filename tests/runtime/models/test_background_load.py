"""Loading beside the imports of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.models.background_load import BackgroundLoad, read_ahead


def test_the_model_is_that_of_the_configuration() -> None:
    loaded = BackgroundLoad(EngineConfig(model="moondream-nano", device="cpu")).result()
    assert loaded.checkpoint.name == "moondream-nano"
    assert loaded.model.device.type == "cpu"


def test_a_checkpoint_that_is_not_there_is_reported_where_the_model_is_taken(tmp_path: Path) -> None:
    loading = BackgroundLoad(EngineConfig(model=str(tmp_path), device="cpu"))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="holds no weights"):
            loading.result()


def test_files_that_cannot_be_read_ahead_are_left_to_those_who_read_them(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(bytes(7))
    read_ahead([tmp_path / "there", tmp_path / "missing", tmp_path])
