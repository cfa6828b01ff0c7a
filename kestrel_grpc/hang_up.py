"""Ends the connections of servers whose calls have ended, so that no client is told that its call was cancelled.

While gRPC's server shuts down it resets calls that arrive with CANCELLED, which clients do not retry, and it has no
way to turn them away before. A connection that is closed means UNAVAILABLE to the calls on it, which clients retry
elsewhere. Works on the sockets of this process that belong to the given ports and paths, where the system lists
them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterator

_DESCRIPTORS = "/dev/fd"


def hang_up(ports: Collection[int], paths: Collection[str] = ()) -> None:
    """Accept no further connection, and send no more on those that there are. What has been sent still arrives."""
    sockets = [item for item in _sockets() if _is_one_of_ours(item, ports, paths)]
    try:
        # First those that accept, so that no connection is made in place of one that is ended.
        for item in sorted(sockets, key=_is_listening, reverse=True):
            with contextlib.suppress(OSError):  # the peer has closed it
                item.shutdown(socket.SHUT_RD if _is_listening(item) else socket.SHUT_WR)
    finally:
        for item in sockets:
            item.close()


def _sockets() -> Iterator[socket.socket]:
    """The sockets of this process, each through a descriptor of its own."""
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return
    for name in names:
        # Another thread may close it at any time, and open something else under its number.
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            if stat.S_ISSOCK(os.fstat(copy).st_mode):
                yield socket.socket(fileno=copy)
            else:
                os.close(copy)


def _is_one_of_ours(item: socket.socket, ports: Collection[int], paths: Collection[str]) -> bool:
    address = None
    with contextlib.suppress(OSError):
        address = item.getsockname()
    if item.family == socket.AF_UNIX:
        is_ours = address in paths
    else:
        is_ours = isinstance(address, tuple) and address[1] in ports
    if not is_ours:
        item.close()
    return is_ours


def _is_listening(item: socket.socket) -> bool:
    return bool(item.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
