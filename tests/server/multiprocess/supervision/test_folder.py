"""The private folder of a server: who may see it, and who removes it."""

import errno
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrel_grpc.multiprocess.supervision import folder as folder_module
from kestrel_grpc.multiprocess.supervision.folder import NoPrivateFolder, private_folder, touch


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a path that is short enough; that of `tmp_path` is not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
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
    monkeypatch.setenv("TMPDIR", str(deep))
    with private_folder() as (folder, _):
        assert folder.parent == Path("/tmp")
        assert len(str(folder / "core-63.events")) <= 107


@pytest.mark.parametrize(
    "named", ["is/missing", "is-a-file", "relative"], ids=["missing", "a file", "relative to the working folder"]
)
def test_a_folder_of_temporary_files_is_taken_where_it_can_be_used(
    base: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base)
    (base / "is-a-file").touch()
    (base / "relative").mkdir()
    monkeypatch.setenv("TMPDIR", named)
    with private_folder() as (folder, _):
        assert folder.parent == (base / "relative" if named == "relative" else Path("/tmp"))
        assert folder.is_absolute()


@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT, errno.EMFILE])
def test_where_no_folder_can_be_made_one_sentence_says_why_for_each_place(
    base: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(NoPrivateFolder, match="set TMPDIR") as caught, private_folder():
        pass
    assert f"{base}: {os.strerror(error)}; /tmp: {os.strerror(error)}; /dev/shm: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_place_without_space_for_the_records_of_engines_is_not_used(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = os.statvfs

    def full(path: Path) -> os.statvfs_result:
        found = [*measure(path)]
        found[4] = 0 if Path(path) == base else found[4]  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", full)
    with private_folder() as (folder, _):
        assert folder.parent == Path("/tmp")
    assert list(base.iterdir()) == []


def test_a_server_that_starts_at_the_same_time_removes_no_folder_at_any_moment(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server looks for folders that were left behind before and after each step of ours."""
    moments: set[str] = set()
    is_other = False

    def look_for_others() -> None:
        nonlocal is_other
        is_other = True
        folder_module._remove_left_behind(base)
        is_other = False

    def watched(module: Any, name: str) -> None:
        original = getattr(module, name)

        def step(*arguments: Any, **options: Any) -> Any:
            if is_other:
                return original(*arguments, **options)
            moments.add(name)
            look_for_others()
            done = original(*arguments, **options)
            look_for_others()
            return done

        monkeypatch.setattr(module, name, step)

    for module, name in ((tempfile, "mkdtemp"), (os, "open"), (fcntl, "flock"), (os, "rename"), (socket, "socket")):
        watched(module, name)
    with private_folder() as (folder, _):
        assert moments == {"mkdtemp", "open", "flock", "rename", "socket"}
        assert (folder / "lock").exists()


def test_a_folder_of_another_user_and_a_lock_that_is_a_link_are_left_alone(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = base / "target"
    target.touch()
    for name in ("other", "linked"):
        (base / f"kestrel-grpc-{name}").mkdir()
    (base / "kestrel-grpc-linked" / "lock").symlink_to(target)
    with private_folder():
        assert (base / "kestrel-grpc-linked" / "lock").is_symlink()
    (base / "kestrel-grpc-other" / "lock").touch()
    user = os.geteuid()
    with monkeypatch.context() as context:
        context.setattr(os, "geteuid", lambda: user + 1)
        with private_folder():
            assert (base / "kestrel-grpc-other").is_dir()
    with private_folder():
        assert not (base / "kestrel-grpc-other").exists()


def test_a_cleaner_that_minds_locks_sees_one_on_the_folder_itself_and_others_see_new_files(base: Path) -> None:
    with private_folder() as (folder, _):
        itself = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(itself, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(itself)
        (folder / "images").mkdir()
        old = [folder, folder / "lock", folder / "images"]
        for path in old:
            os.utime(path, (1.0, 1.0))
        touch(folder)
        assert all(path.stat().st_mtime > 1.0 and path.stat().st_atime > 1.0 for path in old)
