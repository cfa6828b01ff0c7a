"""A value read from files, read again when they change.

Where changed files cannot be read, the last good value stays and an error is logged, once for every change: a
mistake in a file must not stop a running server.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

Value = TypeVar("Value")

_log = logging.getLogger(__name__)


class ReloadedFiles(Generic[Value]):
    """`read` makes the value from `paths` and raises `OSError` or `ValueError` where it cannot.

    The constructor raises what the first reading raises. May be used from any thread.
    """

    def __init__(self, paths: tuple[Path, ...], read: Callable[[], Value]) -> None:
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        # Before reading, so that a change during the reading is noticed.
        self._known = self._look()
        self._value = read()

    @property
    def value(self) -> Value:
        """The last value that could be read."""
        return self._value

    def refresh(self) -> bool:
        """Read again if a file has changed. Returns whether there is a new value."""
        with self._lock:
            seen = self._look()
            if seen == self._known:
                return False
            names = ", ".join(str(path) for path in self._paths)
            try:
                value = self._read()
            except (OSError, ValueError) as error:
                self._known = seen
                _log.error("cannot reload %s, so what was read before stays in force: %s", names, error)
                return False
            if self._look() != seen:
                return False  # Changed while it was read, so the value may mix both; the next call reads again.
            self._known = seen
            self._value = value
        _log.info("reloaded %s", names)
        return True

    def _look(self) -> tuple[tuple[int, int, int, int] | None, ...]:
        return tuple(_identity(path) for path in self._paths)


def _identity(path: Path) -> tuple[int, int, int, int] | None:
    """A value that changes when the file is replaced; None if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
