"""Converts `google.protobuf.Duration` of requests to seconds."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

_MAX_DURATION_S = 315_576_000_000


def seconds_of(duration: Duration) -> float | None:
    """The length of a duration in seconds; None where it is not well formed."""
    same_sign = duration.seconds == 0 or duration.nanos == 0 or (duration.seconds > 0) == (duration.nanos > 0)
    if not same_sign or abs(duration.nanos) >= 10**9 or abs(duration.seconds) > _MAX_DURATION_S:
        return None
    return duration.seconds + duration.nanos * 1e-9
