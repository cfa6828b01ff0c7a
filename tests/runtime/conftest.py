"""A loaded model of the tests' own family, for what holds of any model."""

from collections.abc import Iterator

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.loading.checkpoint import Checkpoint
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.reference_fixtures import MD3_SMALL
from tests.runtime.models.second_family.small_pictures import SmallPicturesFamily, random_pictures


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """A model of the tests' own family."""
    tokenizer = Tokenizer.from_file(MD3_SMALL / "tokenizer.json")
    model = random_pictures(tokenizer.vocab_size)
    files = Checkpoint("small-pictures", None, (), None, MD3_SMALL / "tokenizer.json")
    return LoadedModel(SmallPicturesFamily(), model, tokenizer, files, 0)


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[LocalEngine]:
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=8))
    yield engine
    engine.close()
