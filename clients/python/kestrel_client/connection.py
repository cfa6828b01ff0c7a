"""Connects a client with its server: address, token, TLS, options of the channel, and reasons why no server
answers.

`why_no_answer` connects again over a plain socket, step by step:

name       → address      the name is not known
connect    → connection   nothing listens; the host does not answer
handshake  → TLS          no TLS there; certificate not trusted; TLS where none was expected; client certificate
protocol   → gRPC         the port speaks HTTP/1.1
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kestrel_client._version import VERSION
from kestrel_client.errors import (
    SERVER_UNREACHABLE,
    TOKEN_INVALID,
    DeadlineExceeded,
    KestrelClientError,
    explained,
)
from kestrel_client.this_machine import proxy_options

DEFAULT_PORT = 50051
DEFAULT_ADDRESS = f"localhost:{DEFAULT_PORT}"
DEFAULT_TIMEOUT_S = 120.0
DEFAULT_MAX_RETRIES = 3
DEFAULT_MAX_RETRY_S = 30.0
ADDRESS_VARIABLE = "KESTREL_GRPC_ADDRESS"
TOKEN_VARIABLE = "KESTREL_GRPC_TOKEN"

_MAX_RETRIES = 4  # gRPC makes no more than five attempts
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_SERVICES = ("kestrel.v1.VisionService", "kestrel.v1.ImageService", "kestrel.v1.EngineService")
_METHOD_UNKNOWN = "Method not found!"
"""The text with which gRPC itself refuses a call that a server does not have."""
_DIAGNOSIS_STEP_S = 2.0
_DIAGNOSIS_HOLDS_S = 1.0

# Targets that gRPC resolves by rules of their own, such as `unix:/run/kestrel.sock` and `dns:///name:50051`.
_TARGET = re.compile(r"(?:unix|unix-abstract|vsock|dns|ipv4|ipv6|xds):.+", re.DOTALL)
_URL = re.compile(r"(?P<scheme>https?|grpcs?)://(?P<place>[^/?#@\s]+)/?", re.IGNORECASE)
_PLACE = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]?#@,]+)(?::(?P<port>[0-9]{1,5}))?")
_ENCRYPTED = frozenset({"https", "grpcs"})


def address_of(address: str | None) -> str:
    """Returns the address to connect to: the given one, else that of the environment, else this machine."""
    return address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS


def target_of(address: str) -> tuple[str, bool | None]:
    """Returns the target for gRPC, and whether the address asks for encryption; None if it does not say.

    Raises ValueError, which says what an address is.
    """
    if _TARGET.fullmatch(address):
        return address, None
    url = _URL.fullmatch(address)
    place = _PLACE.fullmatch(address if url is None else url["place"])
    if place is None or not 0 < int(place["port"] or DEFAULT_PORT) < 2**16:
        raise ValueError(
            f"{address[:80]!r} is no address of a server: an address is host:port, host (port {DEFAULT_PORT}), "
            "http://host:port without and https://host:port with encryption, or a target of gRPC such as "
            "unix:/run/kestrel.sock and dns:///host:port"
        )
    target = f"{place['host']}:{place['port'] or DEFAULT_PORT}"
    return target, None if url is None else url["scheme"].lower() in _ENCRYPTED


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The reason why nothing answered, found out at a time of the monotonic clock."""

    text: str | None
    time_s: float


@dataclass(slots=True)
class Connection:
    """The connection of a client of either kind. `target` is the address that gRPC connects to.

    `tls` is None without encryption, and where the caller has given `credentials`.
    """

    target: str
    tls: ClientTls | None
    credentials: grpc.ChannelCredentials | None
    options: tuple[tuple[str, str | int], ...]
    token: str | None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _diagnosis: Diagnosis = Diagnosis(None, -_DIAGNOSIS_HOLDS_S)

    @classmethod
    def to(
        cls,
        address: str | None,
        *,
        token: str | None,
        tls: tuple[FileName | None, FileName | None, FileName | None],
        credentials: grpc.ChannelCredentials | None,
        max_retries: int,
    ) -> Connection:
        """Returns the connection that the arguments of a client and its environment describe.

        Raises ValueError for what is no address, number of retries, token or certificate, and OSError for a file
        that cannot be read.
        """
        target, is_encrypted = target_of(address_of(address))
        options = (*channel_options(max_retries), *proxy_options(target))
        files = None if credentials is not None else ClientTls.named(*tls)
        if is_encrypted and credentials is None and files is None:
            files = ClientTls()
        if is_encrypted is False and (files or credentials) is not None:
            raise ValueError(
                "http:// asks for no encryption, and tls_ca (--tls-ca, KESTREL_GRPC_TLS_CA) for encryption; "
                "write https://, or name no CA"
            )
        if files is not None:
            credentials = files.credentials()
        return cls(target, files, credentials, options, token_of(token))

    def explain(self, error: KestrelClientError, timeout_s: float) -> KestrelClientError:
        """Returns the same error, with a message that says what to do where this client knows more than the server.

        Where no server answered, it connects to find out why, which takes some seconds at most.
        """
        if error.reason == SERVER_UNREACHABLE:
            why = self._why_no_answer()
            return error if why is None else explained(error, why)
        if error.reason == TOKEN_INVALID:
            if self.token is None:
                return explained(error, "the server asks for a token; give token, --token or KESTREL_GRPC_TOKEN")
            return explained(error, "the server does not know the token from token, --token or KESTREL_GRPC_TOKEN")
        if error.message == _METHOD_UNKNOWN:
            where = "with --admin-port a server takes calls of operators there alone; an older one may lack this"
            return explained(error, f"{error.message.rstrip('!')}: {where}")
        if isinstance(error, DeadlineExceeded) and not error.failure.is_from_server:
            return explained(error, f"no answer within {timeout_s:g} s")
        return error

    def _why_no_answer(self) -> str | None:
        with self._lock:  # many calls fail at a time, and one diagnosis serves all of them
            if time.monotonic() - self._diagnosis.time_s > _DIAGNOSIS_HOLDS_S:
                is_known = self.tls is not None or self.credentials is None
                try:
                    text = why_no_answer(
                        self.target, self.tls, tries_handshake=is_known, timeout_s=_DIAGNOSIS_STEP_S
                    )
                except (OSError, ValueError):  # a file of the certificates has changed since
                    text = None
                self._diagnosis = Diagnosis(text, time.monotonic())
            return self._diagnosis.text


def token_of(token: str | None) -> str | None:
    """Returns the token to send: the given one, else that of the environment. None stands for no token.

    An empty token is none.

    Raises ValueError for a token that no call can carry, without showing it.
    """
    found = (os.environ.get(TOKEN_VARIABLE, "") if token is None else token).strip()
    if not found.isascii() or not found.isprintable():
        raise ValueError("the token has characters that gRPC metadata cannot carry")
    return found or None


def channel_options(max_retries: int) -> tuple[tuple[str, str | int], ...]:
    """Returns the options of a channel, for both clients.

    Raises ValueError for a number of retries that gRPC cannot make.
    """
    if not 0 <= max_retries <= _MAX_RETRIES:
        raise ValueError(f"max_retries is between 0 and {_MAX_RETRIES}, not {max_retries}")
    return (
        ("grpc.primary_user_agent", f"kestrel-client/{VERSION}"),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        # Servers accept pings every 10 s. Pings continue during a long prefill, while no data flows.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        # A process of the server that dies takes its connections and those that wait for it along; another process
        # on the same port takes the next connection. A call is tried again only for about a second.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # In a rolling update each new server must be found before the next old one stops.
        ("grpc.max_reconnect_backoff_ms", 3_000),
        ("grpc.dns_min_time_between_resolutions_ms", 5_000),
        ("grpc.service_config", json.dumps(_service_config(max_retries))),
        # A request larger than this buffer is never retried; the default is too small for large images.
        ("grpc.per_rpc_retry_buffer_size", _MAX_MESSAGE_BYTES),
    )


def _service_config(max_retries: int) -> dict[str, Any]:
    methods: dict[str, Any] = {"name": [{"service": service} for service in _SERVICES]}
    if max_retries:
        # A call is not retried once the server has sent headers, so no part of an answer is repeated.
        methods["retryPolicy"] = {
            "maxAttempts": 1 + max_retries,
            "initialBackoff": "0.1s",
            "maxBackoff": "5s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
    return {
        "loadBalancingConfig": [{"round_robin": {}}],
        # A server that is starting or draining reports that by its health, and gets no calls meanwhile.
        "healthCheckConfig": {"serviceName": "kestrel.v1.VisionService"},
        "methodConfig": [methods],
        # All calls of a connection fail together where one process of a server dies; up to 500 are sent again.
        "retryThrottling": {"maxTokens": 1000, "tokenRatio": 1},
    }


FileName = str | os.PathLike[str]

_VARIABLES = ("KESTREL_GRPC_TLS_CA", "KESTREL_GRPC_TLS_CLIENT_CERTIFICATE", "KESTREL_GRPC_TLS_CLIENT_KEY")


@dataclass(frozen=True, slots=True)
class ClientTls:
    """The encryption of a connection, from files in PEM.

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
        """Returns TLS with the files given; for each that is None, that of the environment; "" names none.

        None where no file is named, which means no encryption. Raises ValueError.
        """
        given = zip((ca, certificate, key), _VARIABLES, strict=True)
        names = [environment.get(variable, "") if name is None else os.fspath(name) for name, variable in given]
        files = [Path(name) if name else None for name in names]
        return cls(files[0], files[1], files[2]) if any(files) else None

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials of a channel. Raises `OSError` or `ValueError` where a file cannot be used."""
        # gRPC accepts any bytes as certificates, and then every connection fails without naming the file.
        self.context()
        return grpc.ssl_channel_credentials(
            *(None if path is None else path.read_bytes() for path in (self.ca, self.key, self.certificate))
        )

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Returns the options that a channel with these credentials needs."""
        return () if self.server_name is None else (("grpc.ssl_target_name_override", self.server_name),)

    def context(self) -> ssl.SSLContext:
        """Returns the context of a plain socket with the same files. Raises as `credentials` does."""
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


_SOCKET_TARGET = re.compile(
    r"(?:dns:(?://[^/]*/)?|ipv4:|ipv6:)?(?:\[(?P<ipv6>[^\]]+)\]|(?P<host>[^:,/]+))(?::(?P<port>\d+))?"
)
_GRPC_PORT = 443  # of an address without one, by gRPC's rules
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
# How OpenSSL describes the answer of a server without TLS.
_NO_TLS = frozenset(("wrong version number", "record layer failure", "unknown protocol"))


def why_no_answer(
    address: str, tls: ClientTls | None, *, tries_handshake: bool = True, timeout_s: float = 5.0
) -> str | None:
    """Returns the reason in one line; None where the server can be reached, or for addresses of other kinds.

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
        match = _SOCKET_TARGET.fullmatch(address)
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
    """Returns why a server refuses the connection after the TLS handshake.

    In TLS 1.3 it checks the client's certificate only then; gRPC closes without an alert.
    """
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
    """Returns why a server closes a plaintext connection.

    One with TLS does so without an error, so this tries a TLS handshake.
    """
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
