"""Adapters of the hub: those that the operator lists, read from the hub library's own cache without a network."""

import hashlib
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save

from kestrel_runtime.adapters.files import CONFIG_FILE, WEIGHTS_FILE, AdapterSource
from kestrel_runtime.api.errors import AdapterInvalid, AdapterNotFound
from tests.adapter_folders import PEFT_CONFIG

LISTED = "org/colours"
MAX_BYTES = 10_000


def adapter(value: float) -> dict[str, bytes]:
    return {CONFIG_FILE: json.dumps(PEFT_CONFIG).encode(), WEIGHTS_FILE: save({"some": torch.full((3,), value)})}


def publish(cache: Path, repository: str, files: Mapping[str, bytes], *revisions: str) -> Path:
    """A revision in the layout of the hub's library: `blobs`, links to them in `snapshots`, and names in `refs`."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    commit = hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False).hexdigest()
    snapshot = folder / "snapshots" / commit
    for part in (folder / "blobs", folder / "refs", snapshot):
        part.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        blob = hashlib.sha256(data).hexdigest()
        (folder / "blobs" / blob).write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    for revision in revisions:
        (folder / "refs" / revision).write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    publish(tmp_path, LISTED, adapter(1.0), "v1")
    publish(tmp_path, LISTED, adapter(2.0), "v2", "main")
    publish(tmp_path, "org/other", adapter(3.0), "main")
    return tmp_path


@pytest.fixture
def source(cache: Path) -> AdapterSource:
    download = partial(snapshot_download, cache_dir=cache, local_files_only=True)
    return AdapterSource(None, [LISTED, "org/absent"], MAX_BYTES, download)


@pytest.mark.parametrize(("name", "value"), [(LISTED, 2.0), (f"{LISTED}@v2", 2.0), (f"{LISTED}@v1", 1.0)])
def test_a_listed_repository_is_read_at_the_revision_that_the_name_carries(
    source: AdapterSource, name: str, value: float
):
    files = source.read(name)
    assert files.name == name
    assert files.config == PEFT_CONFIG
    assert files.tensors["some"].tolist() == [value] * 3


def test_revisions_with_other_content_have_other_digests(source: AdapterSource):
    newest, second, first = (source.read(name).digest for name in (LISTED, f"{LISTED}@v2", f"{LISTED}@v1"))
    assert newest == second != first


@pytest.mark.parametrize("name", ["org/other", "org/other@main", "org", "colours", "org/colours/main"])
def test_a_repository_that_is_not_listed_does_not_exist(source: AdapterSource, name: str):
    with pytest.raises(AdapterNotFound):
        source.read(name)


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, data in adapter(1.0).items():
        (folder / name).write_bytes(data)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Adapters in folders of each form, and folders that are none."""
    root = tmp_path / "adapters"
    for name in ("gold", "team/colours/checkpoint-20", "team/colours/checkpoint-100", "shapes@7", "bad name"):
        write(root / name)
    (root / "empty").mkdir()
    write(tmp_path / "outside")
    (root / "linked").symlink_to(root / "gold", target_is_directory=True)
    (root / "leaving").symlink_to(tmp_path / "outside", target_is_directory=True)
    (root / "circle").symlink_to(root, target_is_directory=True)
    return root


def test_each_name_that_is_listed_can_be_read(root: Path):
    source = AdapterSource(root, [], MAX_BYTES)
    names = [name for name in source.names() if not name.startswith("circle")]
    assert names == ["gold", "linked", "shapes@7", "team/colours@100", "team/colours@20"]
    for name in source.names():
        assert source.read(name).tensors["some"].tolist() == [1.0] * 3


def test_repositories_are_listed_with_the_folders(root: Path):
    assert {LISTED, "gold"} <= set(AdapterSource(root, [LISTED], MAX_BYTES).names())
    assert AdapterSource(None, [LISTED], MAX_BYTES).names() == [LISTED]
    assert AdapterSource(root / "absent", [], MAX_BYTES).names() == []


@pytest.mark.parametrize("name", ["org/absent", f"{LISTED}@v3"])
def test_what_the_hub_does_not_give_is_refused_with_the_reason(source: AdapterSource, name: str):
    with pytest.raises(AdapterInvalid, match="cannot be downloaded: LocalEntryNotFoundError"):
        source.read(name)


def test_a_link_that_leads_out_of_the_repository_is_not_followed(cache: Path, source: AdapterSource):
    snapshot = publish(cache, LISTED, {CONFIG_FILE: b"{}"}, "bad")
    (other,) = (cache / "models--org--other" / "snapshots").iterdir()
    (snapshot / WEIGHTS_FILE).symlink_to(other / WEIGHTS_FILE)
    with pytest.raises(AdapterInvalid, match="leads out of the folder of adapters"):
        source.read(f"{LISTED}@bad")


def test_a_folder_under_the_root_comes_before_a_repository_of_its_name(cache: Path, tmp_path: Path):
    folder = tmp_path / "root" / "org" / "colours"
    folder.mkdir(parents=True)
    for name, data in adapter(4.0).items():
        (folder / name).write_bytes(data)
    download = partial(snapshot_download, cache_dir=cache, local_files_only=True)
    source = AdapterSource(tmp_path / "root", [LISTED], MAX_BYTES, download)
    assert source.read(LISTED).tensors["some"].tolist() == [4.0] * 3
    assert source.read(f"{LISTED}@v1").tensors["some"].tolist() == [1.0] * 3


def write_adapter(folder: Path, value: float) -> None:
    folder.mkdir(parents=True)
    for name, data in adapter(value).items():
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
):
    root = tmp_path / "adapters"
    write_adapter(root / "a", 1.0)
    write_adapter(tmp_path / "new", 2.0)
    opened = os.open

    def replacing(path: Path, flags: int) -> int:
        if Path(path).name == file and (tmp_path / "new").exists():
            (root / "a").rename(tmp_path / "old")
            (tmp_path / "new").rename(root / "a")
        return opened(path, flags)

    monkeypatch.setattr("kestrel_runtime.adapters.files.os.open", replacing)
    files = AdapterSource(root, (), MAX_BYTES).read("a")
    assert files.tensors["some"][0] == 2.0


def test_an_upload_is_read_by_its_folder_and_refused_by_its_name(tmp_path: Path):
    write_adapter(tmp_path / ".upload-1", 1.0)
    source = AdapterSource(tmp_path, (), MAX_BYTES)
    assert source.names() == []
    assert source.read_upload(".upload-1", "a").name == "a"
    with pytest.raises(AdapterInvalid, match="'a'"):
        source.read_upload(".upload-2", "a")
