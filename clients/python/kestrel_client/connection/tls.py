"""The files in PEM that an encrypted connection is made from. Opens no connection."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

FileName = str | os.PathLike[str]

_VARIABLES = ("KESTREL_GRPC_TLS_CA", "KESTREL_GRPC_TLS_CLIENT_CERTIFICATE", "KESTREL_GRPC_TLS_CLIENT_KEY")


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How a connection is encrypted, from files in PEM.

    `ca` holds the CA certificates that the server's must be signed by; None means those of the system.
    `certificate` and `key` identify the client, for servers that ask. `server_name` is the name that the server's
    certificate must have, where that differs from the name in the address.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("tls_client_certificate and tls_client_key: each needs the other")

    @classmethod
    def named(
        cls,
        ca: FileName | None,
        certificate: FileName | None,
        key: FileName | None,
        environment: Mapping[str, str] = os.environ,
    ) -> ClientTls | None:
        """The files given, in place of each that is None that of the environment; "" names none.

        None where no file is named, which means no encryption. Raises ValueError.
        """
        given = zip((ca, certificate, key), _VARIABLES, strict=True)
        names = [environment.get(variable, "") if name is None else os.fspath(name) for name, variable in given]
        files = [Path(name) if name else None for name in names]
        return cls(files[0], files[1], files[2]) if any(files) else None

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
