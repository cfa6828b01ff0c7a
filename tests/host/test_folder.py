"""The private folder of a server: who may see it, and who removes it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kestrel_grpc.host.folder import NoPrivateFolder, private_folder


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a path that is short enough; that of `tmp_path` is not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_a_folder_is_for_its_owner_alone_and_is_removed_at_the_end(base: Path) -> None:
    with private_folder() as (folder, _):
        assert folder.parent == base
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "core-0.socket").touch()
    assert list(base.iterdir()) == []


def test_folders_of_servers_that_were_killed_are_removed_and_no_others(base: Path) -> None:
    for name in ("kestrel-grpc-killed", "kestrel-grpc-draining", "kestrel-grpc-strange", "other"):
        (base / name).mkdir()
    for name in ("killed", "draining"):
        (base / f"kestrel-grpc-{name}" / "lock").touch()
    held = os.open(base / "kestrel-grpc-draining" / "lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    with private_folder() as (first, _), private_folder() as (second, _):
        assert {path.name for path in base.iterdir()} == {
            *("kestrel-grpc-draining", "kestrel-grpc-strange", "other", first.name, second.name)
        }
    os.close(held)


def test_a_path_that_is_too_long_for_sockets_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = base / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with private_folder() as (folder, _):
        assert len(str(folder / "core-63.events")) <= 107
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(NoPrivateFolder, match="set TMPDIR"), private_folder():
        pass
