"""The settings of a connection to a server: address, token, sizes, keepalive, load balancing and retries."""

from __future__ import annotations

import json
import os
from typing import Any

from kestrel_client._version import VERSION

DEFAULT_ADDRESS = "localhost:50051"
DEFAULT_TIMEOUT_S = 120.0
DEFAULT_MAX_RETRIES = 3
ADDRESS_VARIABLE = "KESTREL_GRPC_ADDRESS"
TOKEN_VARIABLE = "KESTREL_GRPC_TOKEN"

_MAX_RETRIES = 4  # gRPC makes no more than five attempts

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_SERVICES = ("kestrel.v1.VisionService", "kestrel.v1.ImageService", "kestrel.v1.EngineService")


def address_of(address: str | None) -> str:
    """The address to connect to: the given one, else that of the environment, else this machine."""
    return address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS


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
