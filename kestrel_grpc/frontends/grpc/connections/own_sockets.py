"""Finds the sockets of this process on given ports and paths, even when all file descriptors are in use.

gRPC accepts and closes connections in threads of its own and does not report them. Each socket is examined through
a descriptor that is reserved for that, so that closing the original meanwhile cannot make it mean another socket.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import threading
from collections.abc import Collection, Iterable, Iterator

_DESCRIPTORS = "/dev/fd"


class OwnSockets:
    """Keeps two descriptors until it is closed. May be used from any thread; one iterates at a time."""

    def __init__(self, ports: Collection[int], paths: Collection[str] = ()) -> None:
        self._ports, self._paths = frozenset(ports), frozenset(paths)
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._view = os.dup(self._nothing)
        self._lock = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        """Give the two descriptors back."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._view)
                os.close(self._nothing)

    def each(self) -> Iterator[tuple[int, socket.socket]]:
        """The numbers and the sockets; none once this is closed.

        A socket is valid until the next one is asked for, and must not be closed.
        """
        with self._lock:
            if self._is_closed:
                return
            try:
                for number in _numbers():
                    # Another thread may close it at any time, and open something else under its number.
                    with contextlib.suppress(OSError):
                        yield from self._seen(number)
            finally:
                # Without this, the last socket would stay open.
                os.dup2(self._nothing, self._view, inheritable=False)

    def _seen(self, number: int) -> Iterator[tuple[int, socket.socket]]:
        if number in (self._view, self._nothing):
            return
        os.dup2(number, self._view, inheritable=False)
        if not stat.S_ISSOCK(os.fstat(self._view).st_mode):
            return
        item = socket.socket(fileno=self._view)
        try:
            if self._is_ours(item):
                yield number, item
        finally:
            item.detach()

    def _is_ours(self, item: socket.socket) -> bool:
        address = item.getsockname()
        if item.family == socket.AF_UNIX:
            return address in self._paths
        return isinstance(address, tuple) and address[1] in self._ports


def is_listening(item: socket.socket) -> bool:
    """Whether the socket accepts connections; otherwise it is a connection."""
    return bool(item.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _numbers() -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:  # listing takes a descriptor
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return () if limit == resource.RLIM_INFINITY else range(limit)
