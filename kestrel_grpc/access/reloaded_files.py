"""Keeps a value that is read from files, and reads it again when the files change.

If the files cannot be read, the last good value stays and an error is logged, once for every change: a wrong file
must not stop a running server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

Value = TypeVar("Value")

RELOAD_INTERVAL_S = 1.0
READ_TIMEOUT_S = 5.0
"""The time limit in seconds for files that do not answer, as on a mount whose server is down."""

_log = logging.getLogger(__name__)


def read_regular_file(path: Path) -> bytes:
    """Returns the contents of a regular file. Raises `OSError` for others: reading a pipe could wait for its
    writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


class ReloadedFiles(Generic[Value]):
    """Keeps the value that `read` makes from the files `paths`. `read` raises `OSError` or `ValueError` if it
    cannot.

    The constructor raises what the first reading raises. May be used from any thread.
    """

    def __init__(self, paths: tuple[Path, ...], read: Callable[[], Value]) -> None:
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        # Before reading, so that a change during the reading is noticed.
        self._known = self._look()
        self._value = read()
        self._must_read = False
        self._refreshing: asyncio.Future[bool] | None = None

    @property
    def value(self) -> Value:
        """The last value that could be read."""
        return self._value

    def read_again(self) -> None:
        """Has the next refresh read the files, also if they look unchanged."""
        self._must_read = True

    async def watch(self) -> None:
        """Follows the files until cancelled."""
        while True:
            await asyncio.sleep(RELOAD_INTERVAL_S)
            await self.refresh_in_thread()

    async def refresh_in_thread(self) -> bool:
        """Calls `refresh` in a thread. Returns False if the files do not answer within `READ_TIMEOUT_S`.

        A thread that hangs is left running; no second one is started before it has ended. Belongs to one event
        loop.
        """
        is_first_wait = self._refreshing is None
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().create_future()
            # Not one of the event loop's pool: a pool waits for its threads when the process ends.
            arguments = (asyncio.get_running_loop(), self._refreshing)
            threading.Thread(target=self._refresh_for, args=arguments, name="kestrel-reload", daemon=True).start()
        refreshing = self._refreshing
        await asyncio.wait((refreshing,), timeout=READ_TIMEOUT_S)
        if not refreshing.done():
            if is_first_wait:
                _log.error("%s does not answer, so what was read before stays in force", self._names)
            return False
        self._refreshing = None
        return refreshing.result()

    def refresh(self) -> bool:
        """Reads again if a file has changed or `read_again` was called. Returns True if there is a new value."""
        with self._lock:
            must_read, self._must_read = self._must_read, False
            seen = self._look()
            if seen == self._known and not must_read:
                return False
            names = self._names
            try:
                value = self._read()
            except (OSError, ValueError) as error:
                self._known = seen
                _log.error("cannot reload %s, so what was read before stays in force: %s", names, error)
                return False
            if self._look() != seen:
                self._must_read = must_read
                return False  # Changed while it was read, so the value may mix both; the next call reads again.
            self._known = seen
            self._value = value
        _log.info("reloaded %s", names)
        return True

    def _refresh_for(self, loop: asyncio.AbstractEventLoop, refreshing: asyncio.Future[bool]) -> None:
        has_new = False
        try:
            has_new = self.refresh()
        except Exception:  # a bug in the reading must not end the watching
            _log.exception("cannot reload %s, so what was read before stays in force", self._names)
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(refreshing.set_result, has_new)

    @property
    def _names(self) -> str:
        return ", ".join(str(path) for path in self._paths)

    def _look(self) -> tuple[tuple[int, int, int, int] | None, ...]:
        return tuple(_identity(path) for path in self._paths)


def _identity(path: Path) -> tuple[int, int, int, int] | None:
    """Returns a value that changes when the file is replaced; None if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
