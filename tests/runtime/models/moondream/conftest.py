"""The small reference models, loaded."""

from pathlib import Path

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL, shallow_copy


def load(folder: Path) -> LoadedModel:
    return LoadedModel.load(EngineConfig(model=str(folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def moondream2() -> LoadedModel:
    return load(MD2_SMALL)


@pytest.fixture(scope="session")
def moondream3() -> LoadedModel:
    return load(MD3_SMALL)


@pytest.fixture(scope="session")
def shallow2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Moondream 2 with few blocks and small crops (`shallow_copy`)."""
    return shallow_copy(MD2_SMALL, tmp_path_factory.mktemp("shallow") / "2")


@pytest.fixture(scope="session")
def shallow3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Moondream 3 with few blocks and small crops (`shallow_copy`)."""
    return shallow_copy(MD3_SMALL, tmp_path_factory.mktemp("shallow") / "3")


@pytest.fixture(scope="session")
def shallow2(shallow2_folder: Path) -> LoadedModel:
    return load(shallow2_folder)


@pytest.fixture(scope="session")
def shallow3(shallow3_folder: Path) -> LoadedModel:
    return load(shallow3_folder)
