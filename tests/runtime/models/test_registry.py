"""Finding the family of a checkpoint."""

from pathlib import Path

import pytest

from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.loading.checkpoint import Checkpoint
from kestrel_runtime.models import registry
from kestrel_runtime.models.registry import ENTRY_POINTS, family_of


def checkpoint(config: dict[str, str] | None) -> Checkpoint:
    return Checkpoint("some", None, (), config, Path("tokenizer.json"))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a package with a family, as far as metadata and imports can tell."""

    def install(name: str, address: str) -> None:
        (tmp_path / "their_models.py").write_text("FAMILY = 'their family'\n")
        info = tmp_path / "their_models-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-models\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{name} = {address}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.mark.parametrize(
    "config", [None, {}, {"model_type": "moondream"}, {"model_type": "moondream1"}, {"model_type": "unknown"}]
)
def test_a_checkpoint_that_names_no_other_family_is_a_moondream(config):
    assert type(family_of(checkpoint(config))).__name__ == "MoondreamFamily"


def test_an_installed_package_adds_a_family(install):
    install("theirs", "their_models:FAMILY")
    assert family_of(checkpoint({"model_type": "theirs"})) == "their family"
    assert type(family_of(checkpoint({}))).__name__ == "MoondreamFamily"


def test_an_installed_package_replaces_no_family_of_ours(install):
    install("moondream", "their_models:FAMILY")
    assert type(family_of(checkpoint({"model_type": "moondream"}))).__name__ == "MoondreamFamily"


@pytest.mark.parametrize("address", ["no_such_module_at_all:FAMILY", "their_models:NOTHING"])
def test_a_family_that_cannot_be_imported_is_named(install, address):
    install("theirs", address)
    with pytest.raises(CheckpointError, match="the model family theirs cannot be imported"):
        family_of(checkpoint({"model_type": "theirs"}))


def test_every_family_of_ours_can_be_imported():
    for name in registry.FAMILIES:
        assert family_of(checkpoint({"model_type": name})) is not None


@pytest.mark.parametrize("name", [7, [1], {"a": 1}, True])
def test_a_name_of_a_family_that_is_no_text_is_refused(name):
    with pytest.raises(CheckpointError, match=r"model_type is .*, not a name"):
        family_of(checkpoint({"model_type": name}))
