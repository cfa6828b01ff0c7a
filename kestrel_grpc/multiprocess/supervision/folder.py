"""Provides the private folder of a server of several processes: their sockets, and the files that they share.

A server that was killed leaves its folder behind. Every process of a server holds the lock of its folder, so that
the next server can distinguish such folders from those in use, and remove them. The lock gets its name once it is
held: a folder whose lock has no name yet belongs to a server that starts.

Programs that clean folders for temporary files remove what is old. Some of them leave alone what is in a folder
that is locked itself, as systemd-tmpfiles does; for the others the supervisor touches the files (`touch`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "kestrel-grpc-"
_LOCK, _NEW_LOCK = "lock", "lock.new"
# The limit of a Unix socket on Linux; its name in the folder takes some of the bytes.
_MAX_PATH_BYTES = 107
_MAX_NAME_BYTES = 24
NEEDED_BYTES = 2**20
"""The least free space: room for the flight records of four engines."""

_log = logging.getLogger(__name__)


class NoPrivateFolder(Exception):
    """Raised if no folder for temporary files can be used."""


@contextlib.contextmanager
def private_folder() -> Iterator[tuple[Path, int]]:
    """Yields a new folder for its owner alone, and the descriptor of its lock, for children to inherit.

    Removes the folder at the end. Raises `NoPrivateFolder`.
    """
    with contextlib.ExitStack() as stack:
        folder, lock = _made(stack)
        yield folder, lock


def touch(folder: Path) -> None:
    """Set the times of the folder and of all files in it to now, as if they had been used."""
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):  # removed meanwhile
            os.utime(path, follow_symlinks=False)


def _made(stack: contextlib.ExitStack) -> tuple[Path, int]:
    """Returns a folder in the first base that has room for it, and its lock. `stack` removes it when it closes.

    Raises `NoPrivateFolder`.
    """
    reasons: dict[Path, str] = {}
    for base in _bases():
        if base in reasons:
            continue
        with contextlib.ExitStack() as attempt:
            try:
                _require_use(base)
                _remove_left_behind(base)
                made = _new_folder(base, attempt)
            except OSError as error:
                reasons[base] = error.strerror or str(error)
                continue
            stack.push(attempt.pop_all())
            if reasons:
                _log.warning("the folder for sockets is in %s (%s)", base, _text_of(reasons))
            return made
    raise NoPrivateFolder(
        f"there is no folder for sockets ({_text_of(reasons)}): set TMPDIR to one that can be written, has "
        f"{NEEDED_BYTES // 2**20} MiB of free space and a path of at most 60 bytes"
    )


def _bases() -> Iterator[Path]:
    if named := os.environ.get("TMPDIR"):
        yield Path(os.path.abspath(named))
    yield from map(Path, ("/tmp", "/dev/shm"))


def _text_of(reasons: dict[Path, str]) -> str:
    return "; ".join(f"{base}: {reason}" for base, reason in reasons.items())


def _require_use(base: Path) -> None:
    """Raises `OSError` if a folder in `base` could not be used."""
    if len(os.fsencode(base)) + 1 + len(_PREFIX) + 8 + 1 + _MAX_NAME_BYTES > _MAX_PATH_BYTES:
        raise OSError("the path is too long for sockets")
    space = os.statvfs(base)
    if space.f_bavail * space.f_frsize < NEEDED_BYTES:
        raise OSError("no space is left")


def _new_folder(base: Path, attempt: contextlib.ExitStack) -> tuple[Path, int]:
    """Returns a new folder with mode 0700, and the descriptor of its lock. Raises `OSError`."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    attempt.callback(shutil.rmtree, folder, ignore_errors=True)
    lock = os.open(folder / _NEW_LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    attempt.callback(os.close, lock)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(folder / _NEW_LOCK, folder / _LOCK)
    with socket.socket(socket.AF_UNIX) as probe:  # not every file system has sockets
        probe.bind(str(folder / "probe"))
    os.unlink(folder / "probe")
    itself = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    attempt.callback(os.close, itself)
    with contextlib.suppress(OSError):  # a network file system may refuse it for folders
        fcntl.flock(itself, fcntl.LOCK_EX)
    return folder, lock


def _remove_left_behind(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # one that starts, one in use, or one that another server removes
            if folder.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), os.stat(folder / _LOCK)):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
