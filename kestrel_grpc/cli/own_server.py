"""The address of the server that the environment variables configure, for a command on the same machine."""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kestrel_client.connection import ClientTls
from kestrel_grpc.config.options import ConfigurationError, ServerConfig
from kestrel_grpc.listeners import address_of

_CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class OwnServer:
    """Address and TLS; `tls` None means without encryption."""

    address: str
    tls: ClientTls | None


def own_server(environment: Mapping[str, str], given: ClientTls | None = None) -> OwnServer:
    """Its Unix socket or its admin port where it has one, since neither is encrypted; else its port.

    On an encrypted port the server's own certificate is trusted, whatever name is in it, unless `given` names
    others. Raises `ConfigurationError`.
    """
    # Whether others may reach the server is checked where it starts; a flag may have allowed it there.
    config = ServerConfig.parse({"insecure_public": "on"}, environment)
    if config.unix_socket is not None:
        return OwnServer(f"unix:{config.unix_socket}", None)
    if config.admin_port is not None:
        return OwnServer(_reachable(config.admin_host, config.admin_port, "KESTREL_GRPC_ADMIN_PORT"), None)
    address = _reachable(config.host, config.port, "KESTREL_GRPC_PORT")
    if config.tls_certificate is None or (given is not None and given.ca is not None):
        return OwnServer(address, given)
    certificate = Path(config.tls_certificate)
    files = (None, None) if given is None else (given.certificate, given.key)
    return OwnServer(address, ClientTls(certificate, *files, server_name=_name_in(certificate, address)))


def _reachable(host: str, port: int, variable: str) -> str:
    if port == 0:
        raise ConfigurationError((f"{variable}: the server takes any free port; say which with --address",))
    try:
        listened = ipaddress.ip_address(host)
    except ValueError:
        return address_of(host, port)
    if listened.is_unspecified:
        host = "127.0.0.1" if listened.version == 4 else "::1"
    return address_of(host, port)


def _name_in(certificate: Path, address: str) -> str | None:
    """A name in the certificate of the server; None where it has no trusted certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The name is what is being looked for; the certificate itself is verified.
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    host, _, port = address.rpartition(":")
    try:
        context.load_verify_locations(certificate)
        with (
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S) as connection,
            context.wrap_socket(connection) as encrypted,
        ):
            shown = encrypted.getpeercert() or {}
    except OSError:  # the call itself then fails as well, and reports why
        return None
    names = [str(name) for kind, name in shown.get("subjectAltName", ()) if kind in {"DNS", "IP Address"}]
    return re.sub(r"^\*\.", "any.", names[0]) if names else None
