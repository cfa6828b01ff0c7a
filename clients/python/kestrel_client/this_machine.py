"""Finds out whether a target of gRPC is this machine, which is never asked through a proxy.

gRPC sends connections through the proxy of `grpc_proxy`, `https_proxy` or `http_proxy`, also those to the own
machine, unless `no_proxy` names it. A proxy elsewhere cannot reach this machine's loopback addresses.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import unquote

_ALWAYS_LOCAL = ("unix:", "unix-abstract:", "vsock:")
_RESOLVED = re.compile(r"(?:dns:(?://[^/]*/)?|ipv4:|ipv6:)?(?P<places>[^/]+)")
_PLACE = re.compile(
    r"\[(?P<bracketed>[^\[\]]+)\](?::[0-9]*)?|(?P<host>[^:\[\]]+)(?::[0-9]*)?|(?P<bare>[0-9A-Fa-f:.%\w]+)"
)
_LOCAL_NAMES = frozenset(("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"))
_NEVER_OWN = ("192.0.2.1", 0)
"""An address for documentation (RFC 5737), which no machine has."""


def proxy_options(target: str) -> tuple[tuple[str, int], ...]:
    """Returns the options of a channel to this target by which it uses no proxy for this machine."""
    return (("grpc.enable_http_proxy", 0),) if is_this_machine(target) else ()


def is_this_machine(target: str) -> bool:
    """Returns whether every address of the target is one of this machine.

    Asks no name server about other machines.
    """
    if target.startswith(_ALWAYS_LOCAL):
        return True
    match = _RESOLVED.fullmatch(unquote(target))
    return match is not None and all(map(_is_own_place, match["places"].split(",")))


def _is_own_place(place: str) -> bool:
    match = _PLACE.fullmatch(place)
    if match is None:
        return False
    host = (match["bracketed"] or match["host"] or match["bare"]).lower().removesuffix(".")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[
            0
        ]
    except (OSError, UnicodeError):
        return _is_own_name(host)
    found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    if (mapped or found).is_loopback or (mapped or found).is_unspecified:
        return True
    return _can_bind(family, address) and not _can_bind(socket.AF_INET, _NEVER_OWN)


def _is_own_name(host: str) -> bool:
    if host in _LOCAL_NAMES or host.endswith(".localhost"):
        return True
    own = socket.gethostname().lower()
    if host in (own, own.partition(".")[0]):
        return True
    # Resolves the machine's own name alone, which may ask a name server.
    return host.startswith(f"{own}.") and host == socket.getfqdn().lower()


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    """Returns whether a socket can have this address. On hosts with `ip_nonlocal_bind` it can have any."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
