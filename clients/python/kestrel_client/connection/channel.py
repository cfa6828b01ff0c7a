"""What a connection to a server needs: address, TLS, token, sizes, keepalive, load balancing and retries."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import grpc

from kestrel_client._version import VERSION
from kestrel_client.connection.diagnosis import why_no_answer
from kestrel_client.connection.tls import ClientTls, FileName
from kestrel_client.errors import (
    SERVER_UNREACHABLE,
    TOKEN_INVALID,
    DeadlineExceeded,
    KestrelClientError,
    explained,
)

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


_DIAGNOSIS_STEP_S = 2.0
_DIAGNOSIS_HOLDS_S = 1.0

# Targets that gRPC resolves by rules of their own, such as `unix:/run/kestrel.sock` and `dns:///name:50051`.
_TARGET = re.compile(r"(?:unix|unix-abstract|vsock|dns|ipv4|ipv6|xds):.+", re.DOTALL)
_URL = re.compile(r"(?P<scheme>https?|grpcs?)://(?P<place>[^/?#@\s]+)/?", re.IGNORECASE)
_PLACE = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]?#@,]+)(?::(?P<port>[0-9]{1,5}))?")
_ENCRYPTED = frozenset({"https", "grpcs"})


def address_of(address: str | None) -> str:
    """The address to connect to: the given one, else that of the environment, else this machine."""
    return address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS


def target_of(address: str) -> tuple[str, bool | None]:
    """The target for gRPC, and whether the address asks for encryption; None where it says nothing about it.

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
    """Why nothing answered, found out at a moment of the monotonic clock."""

    text: str | None
    time_s: float


@dataclass(slots=True)
class Connection:
    """Where a client connects to and how, for both clients. `target` is what gRPC connects to.

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
        """The connection that the arguments of a client and its environment describe.

        Raises ValueError for what is no address, number of retries, token or certificate, and OSError for a file
        that cannot be read.
        """
        target, is_encrypted = target_of(address_of(address))
        options = channel_options(max_retries)
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
        """The same error, with a message that says what to do where this client knows more than the server.

        Where no server answered, it connects to find out why, which takes some seconds at most.
        """
        if error.reason == SERVER_UNREACHABLE:
            why = self._why_no_answer()
            return error if why is None else explained(error, why)
        if error.reason == TOKEN_INVALID:
            if self.token is None:
                return explained(error, "the server asks for a token; give token, --token or KESTREL_GRPC_TOKEN")
            return explained(error, "the server does not know the token from token, --token or KESTREL_GRPC_TOKEN")
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
    """The token to send: the given one, else that of the environment; None for no token, as for an empty one.

    Raises ValueError for a token that no call can carry, without showing it.
    """
    found = (os.environ.get(TOKEN_VARIABLE, "") if token is None else token).strip()
    if not found.isascii() or not found.isprintable():
        raise ValueError("the token has characters that gRPC metadata cannot carry")
    return found or None


def channel_options(max_retries: int) -> tuple[tuple[str, str | int], ...]:
    """The options of a channel, for both clients.

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
        "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
    }
