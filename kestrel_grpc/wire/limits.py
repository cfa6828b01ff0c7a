"""How many calls and messages a server takes at a time, computed from its options."""

from __future__ import annotations

from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.images.image_store import StoreLimits
from kestrel_grpc.wire.message_gate import GateLimits
from kestrel_runtime.api.engine import EngineInfo

MAX_SHORT_CALLS = 256
"""Open calls of each kind that is answered at once: health checks, reflection, `EngineService`."""
MAX_IMAGE_CALLS = 256
"""Open calls of `ImageService`."""
MAX_STREAMS = 256
"""Open streams of requests. Each of their requests is a call of its own besides."""
MAX_WAITING_STREAMS = 32
"""Streams of requests that wait for their next message, each of which may be of the largest size."""
MAX_WATCHES = 1024
"""Open streams of health."""
_CONTROL_PLACES, _CONTROL_FAST_PLACES = 1, 1
_CONTROL_TIMEOUT_S = 2.0
# For callers that still read their answers, or wait for a place for their message.
_CALLS_BEYOND_ENGINE = 512


def max_calls(info: EngineInfo) -> int:
    """Calls of `VisionService` at a time: twice what the engine holds, since a tenant gets no more than half."""
    return 2 * (info.config.max_queued_requests + info.max_batch_size) + _CALLS_BEYOND_ENGINE


def request_gate(config: ServerConfig) -> GateLimits:
    """For messages that may hold an image. With those of `control_gate` they fit into `max_receiving_bytes`."""
    num_places = config.max_receiving_bytes // config.max_message_bytes - _CONTROL_PLACES - _CONTROL_FAST_PLACES
    num_short = max(1, num_places // 3)
    return GateLimits(
        places=max(1, num_places - num_short), short_places=num_short, timeout_s=config.receive_timeout
    )


def image_store(config: ServerConfig) -> StoreLimits:
    """For stored images. One token alone gets half of the memory; without tokens there is one namespace."""
    quota_bytes = config.image_quota_bytes
    if quota_bytes is None:
        quota_bytes = config.max_stored_image_bytes // (1 if config.tokens is None else 2)
    return StoreLimits(
        max_bytes=config.max_stored_image_bytes,
        quota_bytes=quota_bytes,
        default_ttl_s=min(config.image_ttl, config.max_image_ttl),
        max_ttl_s=config.max_image_ttl,
    )


def control_gate(config: ServerConfig) -> GateLimits:
    """For messages that arrive together with their headers: those of health, reflection and `EngineService`."""
    return GateLimits(
        places=_CONTROL_PLACES,
        short_places=_CONTROL_FAST_PLACES,
        timeout_s=min(_CONTROL_TIMEOUT_S, config.receive_timeout),
        wait_limit_s=0.05,
    )
