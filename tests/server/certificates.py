"""Certificates for tests, signed by authorities that only the tests trust."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import grpc
import trustme


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and its key."""

    certificate: Path
    key: Path

    @classmethod
    def within(cls, folder: Path) -> Pair:
        return cls(folder / "server.pem", folder / "server.key")

    def write(self, authority: trustme.CA, *, expires: datetime | None = None) -> None:
        """Put a new certificate for 127.0.0.1 in the files, each replaced at once."""
        leaf = authority.issue_cert("127.0.0.1", "localhost", not_after=expires)
        replace(self.key, leaf.private_key_pem.bytes())
        replace(self.certificate, b"".join(pem.bytes() for pem in leaf.cert_chain_pems))


def replace(path: Path, content: bytes) -> None:
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    os.replace(new, path)


def trusting(authority: trustme.CA, client: trustme.LeafCert | None = None) -> grpc.ChannelCredentials:
    """Credentials of a client that trusts one authority, and shows a certificate of its own if it has one."""
    roots = authority.cert_pem.bytes()
    if client is None:
        return grpc.ssl_channel_credentials(roots)
    chain = b"".join(pem.bytes() for pem in client.cert_chain_pems)
    return grpc.ssl_channel_credentials(roots, client.private_key_pem.bytes(), chain)
