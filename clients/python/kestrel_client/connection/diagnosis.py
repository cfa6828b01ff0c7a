"""Finds out why no server answers at an address: connects again over a plain socket, step by step.

name       → address      the name is not known
connect    → connection   nothing listens; the host does not answer
handshake  → TLS          no TLS there; certificate not trusted; TLS where none was expected; client certificate
protocol   → gRPC         the port speaks HTTP/1.1
"""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import dataclass

from kestrel_client.connection.tls import ClientTls

_TARGET = re.compile(
    r"(?:dns:(?://[^/]*/)?|ipv4:|ipv6:)?(?:\[(?P<ipv6>[^\]]+)\]|(?P<host>[^:,/]+))(?::(?P<port>\d+))?"
)
_GRPC_PORT = 443  # of an address without one, by gRPC's rules
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
# How OpenSSL describes the answer of a server without TLS.
_NO_TLS = frozenset(("wrong version number", "record layer failure", "unknown protocol"))


def why_no_answer(
    address: str, tls: ClientTls | None, *, tries_handshake: bool = True, timeout_s: float = 5.0
) -> str | None:
    """The reason in one line; None where the server can be reached, or for addresses of other kinds.

    Ends once connected unless it `tries_handshake`. Takes up to `timeout_s` for each step. Raises what
    `ClientTls.context` raises.
    """
    if address.startswith("unix:"):
        return _why_no_unix_socket(address, timeout_s)
    target = _Target.parse(address)
    if target is None:
        return None
    try:
        with socket.create_connection((target.host, target.port), timeout_s) as connection:
            if not tries_handshake:
                return None
            if tls is not None:
                return _why_no_handshake(connection, address, tls, target.host)
        return _why_not_plaintext(target, address, timeout_s)
    except socket.gaierror as error:
        return f"the name {target.host} cannot be resolved: {error.strerror}"
    except ConnectionRefusedError:
        return f"no server listens at {address}: connection refused"
    except TimeoutError:
        return f"{address} does not answer within {timeout_s:g} s"
    except OSError as error:
        return f"{address} cannot be reached: {error.strerror or error}"


@dataclass(frozen=True, slots=True)
class _Target:
    host: str
    port: int

    @classmethod
    def parse(cls, address: str) -> _Target | None:
        match = _TARGET.fullmatch(address)
        if match is None:
            return None
        return cls(match["ipv6"] or match["host"], int(match["port"] or _GRPC_PORT))


def _why_no_unix_socket(address: str, timeout_s: float) -> str | None:
    path = re.sub("^unix:(//)?", "", address)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
        except OSError as error:
            return f"no server listens at {address}: {error.strerror or error}"
    return None


def _why_no_handshake(connection: socket.socket, address: str, tls: ClientTls, host: str) -> str | None:
    try:
        with tls.context().wrap_socket(connection, server_hostname=tls.server_name or host) as encrypted:
            return _why_no_http2(encrypted, address, tls)
    except ssl.SSLCertVerificationError as error:
        return f"the certificate of {address} is not trusted: {error.verify_message}"
    except ssl.SSLError as error:
        reason = (error.reason or "").replace("_", " ").lower()
        if reason in _NO_TLS:
            return f"{address} speaks no TLS; leave out https://, tls_ca, --tls-ca and KESTREL_GRPC_TLS_CA"
        return f"no encrypted connection to {address}: {reason or error}"


def _why_no_http2(encrypted: ssl.SSLSocket, address: str, tls: ClientTls) -> str | None:
    """In TLS 1.3 a server checks the client's certificate after the handshake; gRPC closes without an alert."""
    try:
        encrypted.sendall(_PREFACE)
        if encrypted.recv(1):
            return None
    except TimeoutError:
        return None
    except (ssl.SSLError, ConnectionError):
        pass
    certificate = "a certificate" if tls.certificate is None else "another certificate"
    return (
        f"{address} closes encrypted connections at once; if it asks clients for {certificate}, "
        "give tls_client_certificate and tls_client_key"
    )


def _why_not_plaintext(target: _Target, address: str, timeout_s: float) -> str | None:
    """A server with TLS closes plaintext connections without an error, so this tries a TLS handshake."""
    trust_all = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust_all.check_hostname = False
    trust_all.verify_mode = ssl.CERT_NONE
    with socket.create_connection((target.host, target.port), timeout_s) as connection:
        try:
            trust_all.wrap_socket(connection, server_hostname=target.host).close()
        except (ssl.SSLError, ConnectionError):
            return _why_not_http2(target, address, timeout_s)
    return (
        f"{address} speaks TLS only; give its CA by tls_ca, --tls-ca or KESTREL_GRPC_TLS_CA, "
        "or write https:// for the CAs of this system"
    )


def _why_not_http2(target: _Target, address: str, timeout_s: float) -> str | None:
    with socket.create_connection((target.host, target.port), timeout_s) as connection:
        try:
            connection.sendall(_PREFACE)
            if connection.recv(5) == b"HTTP/":
                return f"{address} speaks HTTP/1.1 and no gRPC; gRPC has a port of its own, by default 50051"
        except OSError:
            pass
    return None
