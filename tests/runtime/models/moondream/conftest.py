"""The small reference models, loaded."""

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL


@pytest.fixture(scope="session")
def moondream2() -> LoadedModel:
    return LoadedModel.load(EngineConfig(model=str(MD2_SMALL), dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def moondream3() -> LoadedModel:
    return LoadedModel.load(EngineConfig(model=str(MD3_SMALL), dtype="float32", device="cpu"))
