"""Closes connections whose callers do not read a large response, so that it does not stay in memory.

gRPC keeps a response until its caller has read it, and on the server it offers no way to take it back. Where the
connection is closed, the response is freed and its call ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import unquote

from kestrel_grpc.frontends.grpc.connections.own_sockets import OwnSockets, is_listening

LARGE_BYTES = 2**18
"""Smaller responses may stay: the limits on calls bound them."""

_log = logging.getLogger(__name__)


class UnreadResponses:
    """Gives each large response `limit_s` seconds. Belongs to one event loop.

    `sockets` gives those of the server; None before it listens.
    """

    def __init__(self, limit_s: float, sockets: Callable[[], OwnSockets | None]) -> None:
        self._limit_s = limit_s
        self._sockets = sockets

    def watch(self, num_bytes: int, peer: Callable[[], str]) -> None:
        """The current task returns a response, and is done when it is sent. `peer` is gRPC's name of the caller."""
        if num_bytes <= LARGE_BYTES:
            return
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        timer = loop.call_later(self._limit_s, self._give_up, peer())
        task.add_done_callback(lambda _: timer.cancel())

    def _give_up(self, peer: str) -> None:
        sockets = self._sockets()
        if sockets is not None:
            asyncio.get_running_loop().run_in_executor(None, close_connection, sockets, peer)


def close_connection(sockets: OwnSockets, peer: str) -> bool:
    """Close the connection of a peer, as `ipv4:192.0.2.1:1234`; False where there is none, as on a Unix socket."""
    address = _address(peer)
    if address is None:
        return False
    for _, item in sockets.each():
        if item.family == socket.AF_UNIX or is_listening(item):
            continue
        with contextlib.suppress(OSError):  # the peer has closed it
            host, port, *_ = item.getpeername()
            if (_plain(host), port) == address:
                item.shutdown(socket.SHUT_RDWR)
                _log.warning("a caller has not read a response in time: its connection is closed")
                return True
    return False


def _address(peer: str) -> tuple[IPv4Address | IPv6Address, int] | None:
    family, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> IPv4Address | IPv6Address:
    """An address; one of IPv4 as such, also where the socket is one of IPv6."""
    address = ip_address(host)
    return getattr(address, "ipv4_mapped", None) or address
