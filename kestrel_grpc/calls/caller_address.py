"""Finds the address of a call's caller: the address of its connection, or the address that a trusted proxy
reports."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from urllib.parse import unquote

from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.config.options import SOCKETS

_FORWARDED_FOR = "x-forwarded-for"
_MAX_FORWARDED = 32
"""The most addresses that are read, from the last one on."""


class CallerAddresses:
    """Finds the addresses of callers behind the proxies of `trusted`: networks, and `unix` for Unix sockets.

    A proxy appends the address of its own peer to `X-Forwarded-For`. So the last address that is not a trusted
    proxy is the caller's; the caller may have invented all addresses before it.
    """

    def __init__(self, trusted: Sequence[str]) -> None:
        self._networks = tuple(ipaddress.ip_network(item) for item in trusted if item != SOCKETS)
        self._trusts_sockets = SOCKETS in trusted

    def of(self, call: CallContext) -> str:
        """Returns an IP address, `unix` for a caller at the Unix socket, or `unknown`."""
        found = _address_of(call.peer())
        if self._networks or self._trusts_sockets:
            for forwarded in _forwarded(call):
                if not self._is_trusted(found):
                    break
                found = forwarded
        return str(found)

    def _is_trusted(self, address: _Address | str) -> bool:
        if isinstance(address, str):
            return address == SOCKETS and self._trusts_sockets
        return any(address.version == network.version and address in network for network in self._networks)


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _address_of(peer: str) -> _Address | str:
    """Returns the address in the name of a peer, as gRPC (`ipv6:%5B::1%5D:7`) or HTTP (`::1:7`) write it."""
    if peer.startswith("unix"):
        return SOCKETS
    host = unquote(peer).removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0]
    return _parsed(host) or "unknown"


def _forwarded(call: CallContext) -> Iterator[_Address]:
    """Yields the addresses in the headers, the last one first, up to the first text that is not an address."""
    values = [value for name, value in call.headers if name == _FORWARDED_FOR and isinstance(value, str)]
    for text in ",".join(values).rsplit(",", _MAX_FORWARDED)[: -_MAX_FORWARDED - 1 : -1]:
        address = _parsed(text.strip())
        if address is None:
            return
        yield address


def _parsed(text: str) -> _Address | None:
    """Parses an address, which may have brackets and a port; returns None if the text is not an address."""
    host = text
    if text.startswith("["):
        host = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        host = text.partition(":")[0]
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found
