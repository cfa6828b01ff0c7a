"""The flags of connections to a server: address, timeout, TLS. Opens no connection."""

from __future__ import annotations

import argparse
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from kestrel_grpc.config.environment import CLIENT_VARIABLES, former_names
from kestrel_grpc.config.settings import environment_name


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How a connection is encrypted, from files in PEM.

    `ca` holds the CA certificates that the server's must be signed by; None means those of the system.
    `certificate` and `key` identify the client, for servers that ask. `server_name` is the name that the server's
    certificate must have, where that differs from the name in the address.
    """

    ca: Path | None
    certificate: Path | None
    key: Path | None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("--tls-client-certificate and --tls-client-key: each needs the other")

    def credentials(self) -> grpc.ChannelCredentials:
        """For a channel. Raises `OSError` or `ValueError` where a file cannot be used."""
        # gRPC accepts any bytes as certificates, and then every connection fails without naming the file.
        self.context()
        return grpc.ssl_channel_credentials(
            *(None if path is None else path.read_bytes() for path in (self.ca, self.key, self.certificate))
        )

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """The options that a channel with these credentials needs."""
        return () if self.server_name is None else (("grpc.ssl_target_name_override", self.server_name),)

    def context(self) -> ssl.SSLContext:
        """The same for a plain socket. Raises as `credentials` does."""
        context = ssl.create_default_context() if self.ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # As gRPC does: what is in the file is trusted, whether it signed itself or not.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.set_alpn_protocols(["h2"])
        if self.ca is not None:
            try:
                context.load_verify_locations(cadata=self.ca.read_text(encoding="ascii"))
            except (ssl.SSLError, UnicodeDecodeError) as error:
                raise ValueError(f"{self.ca} holds no certificates in PEM format") from error
        if self.certificate is not None and self.key is not None:
            for path in (self.certificate, self.key):
                path.read_bytes()  # an error of `load_cert_chain` does not name its file
            try:
                # OpenSSL asks for the password of an encrypted key, which gRPC cannot use.
                context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
            except ssl.SSLError as error:
                raise ValueError(
                    f"{self.certificate} and {self.key} are not a certificate and its unencrypted key"
                ) from error
        return context


def add_connection_arguments(
    parser: argparse.ArgumentParser, *, address: str | None, address_help: str, timeout_s: float
) -> None:
    """Add the flags. `address` None leaves the choice of a default to the command."""
    parser.add_argument("--address", default=address, help=address_help)
    _add_file(parser, "ca", "connect with TLS to a server whose certificate is signed by one in this file")
    _add_file(parser, "client-certificate", "client certificate, for servers that ask for one, in PEM")
    _add_file(parser, "client-key", "the key of that certificate, in PEM")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=timeout_s, help="timeout (%(default)g)")


def tls_of(arguments: argparse.Namespace) -> ClientTls | None:
    """TLS as the flags configure it; None where it is off. Raises `ValueError`.

    Raises it too where a variable of the client commands has its former name: without that variable, a token could
    be sent without encryption.
    """
    for problem in former_names(CLIENT_VARIABLES, os.environ):
        raise ValueError(problem)
    files = (arguments.tls_ca, arguments.tls_client_certificate, arguments.tls_client_key)
    return ClientTls(*files) if any(path is not None for path in files) else None


def _add_file(parser: argparse.ArgumentParser, name: str, help: str) -> None:
    variable = environment_name(f"tls_{name.replace('-', '_')}")
    parser.add_argument(
        f"--tls-{name}",
        metavar="FILE",
        type=Path,
        default=os.environ.get(variable) or None,
        help=f"{help} ({variable})",
    )
