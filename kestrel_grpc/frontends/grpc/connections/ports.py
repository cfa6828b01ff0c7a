"""Opens the ports and the Unix socket of a gRPC server, encrypted where there is a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from kestrel_grpc.access.tls import CertificateFiles, Pem
from kestrel_grpc.listeners import PortUnavailable, address_of, require_free_port, require_free_socket

# Every user who may write to the socket may call: only its owner and its group.
_SOCKET_MODE = 0o660


def open_port(server: grpc.aio.Server, host: str, port: int, certificate: CertificateFiles | None = None) -> int:
    """Listen on a port and return it; 0 takes a free one. Raises `PortUnavailable`."""
    require_free_port(host, port)
    address = address_of(host, port)
    try:
        if certificate is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, server_credentials(certificate))
    except RuntimeError as error:
        raise PortUnavailable(f"cannot listen on {address}") from error


def open_unix_socket(server: grpc.aio.Server, path: Path) -> None:
    """Listen on a socket at a path; gRPC removes it when the server stops. Raises `PortUnavailable`."""
    require_free_socket(path)
    try:
        server.add_insecure_port(f"unix:{path}")
        path.chmod(_SOCKET_MODE)
    except (RuntimeError, OSError) as error:
        raise PortUnavailable(f"cannot listen on {path}") from error


def server_credentials(certificate: CertificateFiles) -> grpc.ServerCredentials:
    """Credentials that follow their files: each new connection gets the certificate that is in the files then."""

    served = certificate.value

    def fetch() -> Any:  # gRPC's types leave out the None that says that nothing has changed
        """Called for each new connection, in one of gRPC's threads."""
        nonlocal served
        certificate.refresh()
        # Not what `refresh` returns: a connection of another port may have read the new files.
        if certificate.value is served:
            return None
        served = certificate.value
        return _configuration(served)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served), fetch, require_client_authentication=certificate.asks_clients
    )


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], root_certificates=pem.client_ca)
