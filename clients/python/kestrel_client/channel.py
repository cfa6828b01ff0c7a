"""Options of connections to a server: sizes, keepalive, load balancing and retries. Opens none."""

from __future__ import annotations

import json

from kestrel_client._version import VERSION

DEFAULT_ADDRESS = "localhost:50051"
DEFAULT_TIMEOUT_S = 120.0

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_SERVICES = ("kestrel.v1.VisionService", "kestrel.v1.ImageService", "kestrel.v1.EngineService")
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    # A server that is starting or draining reports that by its health, and gets no calls meanwhile.
    "healthCheckConfig": {"serviceName": "kestrel.v1.VisionService"},
    "methodConfig": [
        {
            "name": [{"service": service} for service in _SERVICES],
            # A call is not retried once the server has sent headers, so no part of an answer is repeated.
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}


def channel_options() -> tuple[tuple[str, str | int], ...]:
    """The options of a channel, for both clients."""
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
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
        # A request larger than this buffer is never retried; the default is too small for large images.
        ("grpc.per_rpc_retry_buffer_size", _MAX_MESSAGE_BYTES),
    )
