"""Checks whether a TCP port or a Unix socket can be listened on, and reserves ports for other processes."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path


class PortUnavailable(Exception):
    """An address cannot be listened on; the message says which and why."""


def require_free_port(host: str, port: int) -> None:
    """Raises `PortUnavailable` if the port cannot be listened on. Lets a start fail before a model is loaded."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise PortUnavailable(f"cannot listen on {address_of(host, port)}: {error.strerror}") from error


def reserved_port(host: str, port: int) -> socket.socket:
    """Returns a socket that holds a port, 0 for any, on which processes of the same user can listen together.

    Nothing connects to this socket. Linux only. Raises `PortUnavailable`.
    """
    require_free_port(host, port)
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        reservation = socket.socket(family, kind)
        try:
            # With the first, connections that have just ended do not block the port.
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                reservation.setsockopt(socket.SOL_SOCKET, option, 1)
            reservation.bind(address)
        except OSError:
            reservation.close()
            raise
    except OSError as error:
        raise PortUnavailable(f"cannot listen on {address_of(host, port)}: {error.strerror}") from error
    return reservation


def address_of(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def require_free_socket(path: Path) -> None:
    """Raises `PortUnavailable` if the path is taken. gRPC replaces a socket on which no server listens."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise PortUnavailable(f"cannot listen on {path}: there is no folder {path.parent}") from None
        if path.is_symlink():
            raise PortUnavailable(f"cannot listen on {path}: it is a link to nothing") from None
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PortUnavailable(f"cannot listen on {path}: the folder cannot be written") from None
        return
    except OSError as error:
        raise PortUnavailable(f"cannot listen on {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise PortUnavailable(f"cannot listen on {path}: it is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except OSError as error:
            raise PortUnavailable(f"cannot listen on {path}: {error.strerror}") from error
    raise PortUnavailable(f"cannot listen on {path}: another server does")
