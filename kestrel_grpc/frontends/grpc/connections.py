"""Closes connections of gRPC's servers, which gRPC itself offers no way to do. There are three reasons to close
them:

- The server ends. While gRPC stops, it resets arriving calls with CANCELLED, which clients do not retry. On a
  closed connection calls fail with UNAVAILABLE, which clients retry elsewhere.
- A caller does not read a large response. gRPC keeps the response in memory until the caller has read it.
- File descriptors run out. gRPC then accepts no further connection. A client whose idle connection is closed
  connects again with its next call, without an error. gRPC can close connections after a fixed idle time
  (`grpc.max_connection_idle_ms`), but new connections would have to wait for that time.

gRPC accepts and closes connections in threads of its own and does not report them. So this module finds their
sockets among the descriptors of this process.
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
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import unquote

LARGE_BYTES = 2**18
"""The size from which responses must be read in time. Smaller ones may stay unread: the limits on calls bound
them."""

_CHECK_INTERVAL_S = 0.25
_MIN_IDLE_S = 0.5
# An eighth of the limit is kept free, for new connections and for files that the server opens.
_FREE_SHARE, _MIN_FREE, _MAX_FREE = 8, 16, 1024
_LOG_INTERVAL_S = 60.0
# In Linux's struct tcp_info, milliseconds since data was last sent and received.
_TCP_INFO = struct.Struct("=44xI4xI")

_log = logging.getLogger(__name__)


class Connections:
    """Finds the listening sockets and the connections of some ports and paths of this process.

    Belongs to an event loop; `close_all`, `close_peer` and `close_idle` may be called from any thread.
    """

    def __init__(self, read_timeout_s: float, busy_ports: Callable[[], Collection[int]]) -> None:
        """`read_timeout_s` is the time in which a large response must be read. `busy_ports` returns the remote
        ports of connections with open calls."""
        self._read_timeout_s = read_timeout_s
        self._busy_ports = busy_ports
        self._ports: frozenset[int] = frozenset()
        self._paths: frozenset[str] = frozenset()
        self._reserved: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def open(self, ports: Collection[int], paths: Collection[str] = ()) -> None:
        """Looks for sockets of these ports and paths from now on. Takes two descriptors until `release`."""
        self._ports, self._paths = frozenset(ports), frozenset(paths)
        nothing = os.open(os.devnull, os.O_RDONLY)
        self._reserved = nothing, os.dup(nothing)

    def release(self) -> None:
        """Gives the two descriptors back. No socket is found afterwards."""
        with self._lock:
            for descriptor in self._reserved or ():
                os.close(descriptor)
            self._reserved = None

    def close_all(self) -> None:
        """Accepts no further connection, and sends nothing more on existing ones. Bytes that have been sent still
        arrive."""
        # Listening sockets first, so that clients cannot reconnect.
        for item in self._sockets(are_listening=True):
            _shut_down(item, socket.SHUT_RD)
        for item in self._sockets(are_listening=False):
            _shut_down(item, socket.SHUT_WR)

    def expect_reader(self, num_bytes: int, peer: Callable[[], str]) -> None:
        """Closes the connection of the caller unless it reads the response in time.

        The current task returns a response of `num_bytes` and is done when the response is sent. `peer` returns
        gRPC's name of the caller.
        """
        if num_bytes <= LARGE_BYTES:
            return
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        timer = loop.call_later(self._read_timeout_s, loop.run_in_executor, None, self.close_peer, peer())
        task.add_done_callback(lambda _: timer.cancel())

    def close_peer(self, peer: str) -> bool:
        """Closes the connection of a peer, such as `ipv4:192.0.2.1:1234`.

        Returns False if there is none, as on a Unix socket.
        """
        address = _address(peer)
        if address is None:
            return False
        for item in self._sockets(are_listening=False):
            if _remote_address(item) == address and _shut_down(item, socket.SHUT_RDWR):
                _log.warning("a caller has not read a response in time: its connection is closed")
                return True
        return False

    async def watch_descriptors(self) -> None:
        """Closes idle connections whenever descriptors run out, until cancelled. Does nothing without Linux."""
        if not hasattr(socket, "TCP_INFO"):
            return
        loop, may_log_at = asyncio.get_running_loop(), 0.0
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            if not is_short_of_descriptors():
                continue
            # A call that begins after this has sent its headers, so that its connection does not count as idle.
            num_closed = await asyncio.to_thread(self.close_idle, self._busy_ports())
            if loop.time() >= may_log_at:
                may_log_at = loop.time() + _LOG_INTERVAL_S
                _log.warning("descriptors run out: %d idle connections are closed", num_closed)

    def close_idle(self, busy_ports: Collection[int], *, min_idle_s: float = _MIN_IDLE_S) -> int:
        """Closes the longest idle connections, at most half of all. Returns the number of closed ones.

        A connection stays open if its peer has one of `busy_ports`, or if something was sent or received on it in
        the last `min_idle_s` seconds.
        """
        found = self._sockets(are_listening=False)
        all_idle_s = [_idle_s(item, busy_ports) for item in found if item.family != socket.AF_UNIX]
        max_closed = (len(all_idle_s) + 1) // 2
        longest_s = sorted((idle_s for idle_s in all_idle_s if idle_s >= min_idle_s), reverse=True)[:max_closed]
        num_closed = 0
        for item in self._sockets(are_listening=False):
            if num_closed < len(longest_s) and _idle_s(item, busy_ports) >= longest_s[-1]:
                num_closed += _shut_down(item, socket.SHUT_RDWR)
        return num_closed

    def _sockets(self, *, are_listening: bool) -> Iterator[socket.socket]:
        """Yields listening sockets, or connections. Each is valid until the next is asked for, and must not be
        closed.

        Each is duplicated to a reserved descriptor, because gRPC may close the original at any time and the system
        may give its number to another file. This works even when all other descriptors are in use.
        """
        with self._lock:
            if self._reserved is None:
                return
            nothing, view = self._reserved
            try:
                for number in _descriptors():
                    if number == view:
                        continue
                    with contextlib.suppress(OSError):  # not a socket, or closed already
                        os.dup2(number, view, inheritable=False)
                        item = socket.socket(fileno=view)
                        try:
                            is_listening = bool(item.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                            if is_listening is are_listening and self._is_ours(item):
                                yield item
                        finally:
                            item.detach()
            finally:
                # Without this, the last socket would stay open.
                os.dup2(nothing, view, inheritable=False)

    def _is_ours(self, item: socket.socket) -> bool:
        address = item.getsockname()
        if item.family == socket.AF_UNIX:
            return address in self._paths
        return isinstance(address, tuple) and address[1] in self._ports


def is_short_of_descriptors() -> bool:
    """Returns True if this process may open few further descriptors, or none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return False
    try:
        lowest_free = os.open(os.devnull, os.O_RDONLY)
    except OSError as error:
        return error.errno == errno.EMFILE
    os.close(lowest_free)
    return lowest_free >= limit - min(max(limit // _FREE_SHARE, _MIN_FREE), _MAX_FREE)


def _descriptors() -> Iterable[int]:
    """Returns the numbers of the open descriptors. If no descriptor is free for listing them, returns all numbers
    up to the limit."""
    try:
        return [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return () if limit == resource.RLIM_INFINITY else range(limit)


def _shut_down(item: socket.socket, how: int) -> bool:
    """Shuts a connection down. Returns False if the peer has closed it."""
    try:
        item.shutdown(how)
    except OSError:
        return False
    return True


def _idle_s(item: socket.socket, busy_ports: Collection[int]) -> float:
    """Returns the seconds since something was sent or received; -1 if calls are open or the connection has
    ended."""
    try:
        if item.getpeername()[1] in busy_ports:
            return -1.0
        milliseconds = _TCP_INFO.unpack(item.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    except (OSError, IndexError):  # of a Unix socket the peer has no port
        return -1.0
    return min(milliseconds) / 1000


def _address(peer: str) -> tuple[IPv4Address | IPv6Address, int] | None:
    """Returns the address and the port in gRPC's name of a caller."""
    family, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _parsed_address(host.strip("[]")), int(port)


def _remote_address(item: socket.socket) -> tuple[IPv4Address | IPv6Address, int] | None:
    try:
        host, port, *_ = item.getpeername()
    except (OSError, ValueError):  # the peer has closed it, or it is a Unix socket
        return None
    return _parsed_address(host), port


def _parsed_address(host: str) -> IPv4Address | IPv6Address:
    """Parses an address. An IPv6 socket shows the address of an IPv4 peer as a mapped one."""
    address = ip_address(host)
    return getattr(address, "ipv4_mapped", None) or address
