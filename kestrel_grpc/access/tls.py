"""Reads and checks the server's certificate, at start and when its files change.

`ReloadedFiles.watch` (`reloaded_files.py`) reads the files in a thread and not in the handshake of a connection,
since a mount that does not answer would block the handshake. Open connections keep the certificate that they were
made with.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from kestrel_grpc.access.reloaded_files import ReloadedFiles, read_regular_file


class CertificateError(ValueError):
    """The files cannot be used as certificate and key; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Pem:
    """The contents of the files. If `client_ca` is not None, clients need a certificate that it has signed."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext = field(compare=False)
    """The context for servers that use Python's TLS."""


class CertificateFiles(ReloadedFiles[Pem]):
    """Reads the files `certificate`, `key` and `client_ca` in PEM. `certificate` holds the chain, the server's own
    first.

    Raises `CertificateError` if the files cannot be used at first.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        paths = (certificate, key) if client_ca is None else (certificate, key, client_ca)
        self.asks_clients = client_ca is not None
        """True if clients need a certificate."""
        try:
            super().__init__(paths, lambda: _read(certificate, key, client_ca))
        except OSError as error:
            raise CertificateError(f"cannot read {error.filename}: {error.strerror}") from error


def _read(certificate: Path, key: Path, client_ca: Path | None) -> Pem:
    # gRPC accepts any bytes and then refuses every connection, so the files are checked here.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    signers = None if client_ca is None else read_regular_file(client_ca)
    pem = Pem(read_regular_file(certificate), read_regular_file(key), signers, context)
    try:
        # OpenSSL asks for the password of an encrypted key; without this it would wait for input from a terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except ssl.SSLError as error:
        raise CertificateError(
            f"{certificate} and {key} are not a certificate and its unencrypted key: {_reason(error)}"
        ) from error
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        except ssl.SSLError as error:
            raise CertificateError(f"{client_ca} holds no certificates: {_reason(error)}") from error
    return pem


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "not in PEM format").replace("_", " ").lower()
