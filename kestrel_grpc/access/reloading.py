"""A value read from files, read again when they change. Knows neither what the files hold nor who asks.

A set of files that cannot be read leaves the last good value in place and is logged, once for every change: a
mistake in a file must not take down a server that runs.
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

    What the first reading raises goes to whoever makes this. May be used from any thread.
    """

    def __init__(self, paths: tuple[Path, ...], read: Callable[[], Value]) -> None:
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        # Looked at before reading: what changes meanwhile is then seen to have changed.
        self._known = self._look()
        self._value = read()

    @property
    def value(self) -> Value:
        """What the files held when they were last in order."""
        return self._value

    def refresh(self) -> bool:
        """Read again if a file is another one than before. Whether the value is a new one."""
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
                return False  # Replaced while it was read, so possibly half of each; the next look reads it again.
            self._known = seen
            self._value = value
        _log.info("reloaded %s", names)
        return True

    def _look(self) -> tuple[tuple[int, int, int, int] | None, ...]:
        return tuple(_identity(path) for path in self._paths)


def _identity(path: Path) -> tuple[int, int, int, int] | None:
    """What differs between a file and its successor; None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
