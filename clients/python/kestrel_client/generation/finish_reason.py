"""Why generation ended."""

from __future__ import annotations

from enum import StrEnum

from kestrel_client.v1 import generation_pb2


class FinishReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    """The model said that it was done."""
    LENGTH = "length"
    """`max_tokens` or the end of the context was reached."""
    MAX_OBJECTS = "max_objects"
    """`max_objects` was reached; there may be more."""
    STOP_SEQUENCE = "stop_sequence"
    """One of the strings in `stop` came."""
    UNKNOWN = "unknown"
    """A reason that this version of the client does not know."""


_FINISH_REASONS: dict[int, FinishReason] = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_MAX_OBJECTS: FinishReason.MAX_OBJECTS,
    generation_pb2.FINISH_REASON_STOP_SEQUENCE: FinishReason.STOP_SEQUENCE,
}


def finish_reason(number: int) -> FinishReason:
    """A reason, read."""
    return _FINISH_REASONS.get(number, FinishReason.UNKNOWN)
