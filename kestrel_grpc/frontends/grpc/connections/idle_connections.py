"""Closes idle connections when file descriptors run out, so that new ones can be accepted.

gRPC does not accept a connection while there is no descriptor for it. A client whose idle connection is closed
reconnects with its next call, without an error. Needs Linux, where the system reports for how long nothing was sent
on a connection; elsewhere nothing is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import struct
from collections.abc import Callable, Collection

from kestrel_grpc.frontends.grpc.connections.own_sockets import OwnSockets, is_listening

_EVERY_S = 0.25
_MIN_IDLE_S = 0.5
# An eighth of the limit is kept free, for new connections and for files that the server opens.
_FREE_SHARE, _MIN_FREE, _MAX_FREE = 8, 16, 1024
_LOG_EVERY_S = 60.0
# In Linux's struct tcp_info, milliseconds since data was last sent and received.
_TCP_INFO = struct.Struct("=44xI4xI")

_log = logging.getLogger(__name__)


class IdleConnections:
    """Watches this process's descriptors. `busy_ports` gives the remote ports of connections with open calls."""

    def __init__(self, sockets: OwnSockets, busy_ports: Callable[[], Collection[int]]) -> None:
        self._sockets = sockets
        self._busy_ports = busy_ports

    async def watch(self) -> None:
        """Close idle connections whenever descriptors run out, until cancelled."""
        if not hasattr(socket, "TCP_INFO"):
            return
        loop, may_log_at = asyncio.get_running_loop(), 0.0
        while True:
            await asyncio.sleep(_EVERY_S)
            if not is_short_of_descriptors():
                continue
            # A call that begins after this has sent its headers, so that its connection does not count as idle.
            num_closed = await asyncio.to_thread(close_idle, self._sockets, self._busy_ports())
            if loop.time() >= may_log_at:
                may_log_at = loop.time() + _LOG_EVERY_S
                _log.warning("descriptors run out: %d idle connections are closed", num_closed)


def is_short_of_descriptors() -> bool:
    """Whether nearly as many descriptors are open as this process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return False
    try:
        lowest_free = os.open(os.devnull, os.O_RDONLY)
    except OSError as error:
        return error.errno == errno.EMFILE
    os.close(lowest_free)
    return lowest_free >= limit - min(max(limit // _FREE_SHARE, _MIN_FREE), _MAX_FREE)


def close_idle(sockets: OwnSockets, busy_ports: Collection[int], *, min_idle_s: float = _MIN_IDLE_S) -> int:
    """Close those connections that have been idle for longest, at most half of all. Returns how many were closed.

    Connections to peers with one of `busy_ports` stay, and so do those on which something was sent or received in
    the last `min_idle_s` seconds.
    """
    idle_s: dict[int, float] = {}
    num_connections = 0
    for number, item in sockets.each():
        if item.family == socket.AF_UNIX or is_listening(item):
            continue
        num_connections += 1
        if (seconds := _idle_s(item, busy_ports)) >= min_idle_s:
            idle_s[number] = seconds
    chosen = sorted(idle_s, key=idle_s.__getitem__, reverse=True)[: (num_connections + 1) // 2]
    num_closed = 0
    for number, item in sockets.each():
        # The number may belong to another socket by now.
        if number in chosen and not is_listening(item) and _idle_s(item, busy_ports) >= min_idle_s:
            with contextlib.suppress(OSError):  # the peer has closed it
                item.shutdown(socket.SHUT_RDWR)
                num_closed += 1
    return num_closed


def _idle_s(item: socket.socket, busy_ports: Collection[int]) -> float:
    """For how long nothing was sent or received; -1 where calls are open, or the connection has ended."""
    try:
        if item.getpeername()[1] in busy_ports:
            return -1.0
        milliseconds = _TCP_INFO.unpack(item.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    except (OSError, IndexError):  # of a Unix socket the peer has no port
        return -1.0
    return min(milliseconds) / 1000
