"""The private folder of a server of several processes: their sockets, and the files that they share.

A server that was killed leaves its folder behind. Every process of a server holds the lock of its folder, so that
the next server can tell such folders from those in use, and remove them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "kestrel-grpc-"
_LOCK = "lock"
# Of a Unix socket on Linux, whose name in the folder takes some of them.
_MAX_PATH_BYTES = 107
_MAX_NAME_BYTES = 24


class NoPrivateFolder(Exception):
    """There is no folder for temporary files that can be used."""


@contextlib.contextmanager
def private_folder() -> Iterator[tuple[Path, int]]:
    """A new folder for its owner alone, and the descriptor of its lock, for children to inherit.

    The folder is removed at the end. Raises `NoPrivateFolder`.
    """
    base = _base()
    _remove_left_behind(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))  # with mode 0700
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, lock
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _base() -> Path:
    """Where temporary files may be, with a path short enough for the names of sockets."""
    for text in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        length = len(os.fsencode(text)) + len(_PREFIX) + 10 + _MAX_NAME_BYTES
        if length <= _MAX_PATH_BYTES and os.access(text, os.W_OK | os.X_OK):
            return Path(text)
    raise NoPrivateFolder("there is no folder for sockets: set TMPDIR to one whose path has at most 60 bytes")


def _remove_left_behind(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, one without a lock yet, or one in use
            lock = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
