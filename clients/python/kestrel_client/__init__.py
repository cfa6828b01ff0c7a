"""A thin, typed client of the Kestrel gRPC vision-language server.

with Client("localhost:50051") as client:
    for piece in client.query("bird.jpg", "What bird is this?"):
        print(piece, end="", flush=True)

`Client` blocks, `AsyncClient` awaits; both take and return the same values. The raw messages and stubs are in
`kestrel_client.v1`.
"""

from __future__ import annotations

from kestrel_client.aio import AsyncClient, AsyncTextStream
from kestrel_client.client import Client, TextStream
from kestrel_client.errors import (
    AdapterInvalid,
    AdapterNotFound,
    Cancelled,
    DeadlineExceeded,
    ImageNotFound,
    InvalidRequest,
    KestrelClientError,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    RequestRefused,
    ServerError,
    SkillUnsupported,
    StreamIdle,
    Unauthenticated,
    Unavailable,
    Violation,
)
from kestrel_client.images import ImageInput, RawImage, StoredImage
from kestrel_client.requests import CallOptions, Length, SpatialRef
from kestrel_client.results import (
    Box,
    CaptionResult,
    ClearedCache,
    DetectedObject,
    DetectResult,
    FinishReason,
    Grounding,
    Limits,
    Load,
    Model,
    Point,
    PointResult,
    QueryResult,
    Reasoning,
    Result,
    Segment,
    SegmentResult,
    ServerInfo,
    SkillDefaults,
    TextChannel,
    TextDelta,
    Timing,
    Usage,
)

__all__ = [
    "AdapterInvalid",
    "AdapterNotFound",
    "AsyncClient",
    "AsyncTextStream",
    "Box",
    "CallOptions",
    "Cancelled",
    "CaptionResult",
    "ClearedCache",
    "Client",
    "DeadlineExceeded",
    "DetectResult",
    "DetectedObject",
    "FinishReason",
    "Grounding",
    "ImageInput",
    "ImageNotFound",
    "InvalidRequest",
    "KestrelClientError",
    "Length",
    "Limits",
    "Load",
    "Model",
    "ModelNotFound",
    "Overloaded",
    "PermissionDenied",
    "Point",
    "PointResult",
    "QueryResult",
    "RawImage",
    "Reasoning",
    "RequestRefused",
    "Result",
    "Segment",
    "SegmentResult",
    "ServerError",
    "ServerInfo",
    "SkillDefaults",
    "SkillUnsupported",
    "SpatialRef",
    "StoredImage",
    "StreamIdle",
    "TextChannel",
    "TextDelta",
    "TextStream",
    "Timing",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "Violation",
]
