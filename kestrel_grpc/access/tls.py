"""Certificates for the port: read at start, checked, and read again for whoever connects after they changed.

Connections that are open keep what they were made with. Knows no sockets and no calls.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from kestrel_grpc.access.reloading import ReloadedFiles


class CertificateError(ValueError):
    """Files that cannot serve as certificate and key; the message says which and why."""


def server_credentials(certificate: Path, key: Path, client_ca: Path | None = None) -> grpc.ServerCredentials:
    """Credentials that follow their files. With `client_ca` clients need a certificate that it has signed.

    The certificate comes first in its file, those that vouch for it follow. Raises `CertificateError`.
    """
    paths = (certificate, key) if client_ca is None else (certificate, key, client_ca)
    try:
        files = ReloadedFiles(paths, lambda: _read(certificate, key, client_ca))
    except OSError as error:
        raise CertificateError(f"cannot read {error.filename}: {error.strerror}") from error

    def fetch() -> Any:  # gRPC's types leave out the None that says that nothing has changed
        """Called for each new connection, in a thread of gRPC's."""
        return files.value if files.refresh() else None

    return grpc.dynamic_ssl_server_credentials(
        files.value, fetch, require_client_authentication=client_ca is not None
    )


def _read(certificate: Path, key: Path, client_ca: Path | None) -> grpc.ServerCertificateConfiguration:
    pair = (key.read_bytes(), certificate.read_bytes())
    roots = client_ca.read_bytes() if client_ca is not None else None
    # gRPC takes anything and then refuses every connection, so the files are tried out here.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The password is asked for only where the key is encrypted, and then nobody is there to type it.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except ssl.SSLError as error:
        raise CertificateError(
            f"{certificate} and {key} are not a certificate and its unencrypted key: {_reason(error)}"
        ) from error
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise CertificateError(f"{client_ca} holds no certificates: {_reason(error)}") from error
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "not in PEM format").replace("_", " ").lower()
