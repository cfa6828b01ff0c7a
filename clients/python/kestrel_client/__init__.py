"""Provides a thin, typed client of the Kestrel gRPC vision-language server.

with Client("localhost:50051") as client:
    for piece in client.query("bird.jpg", "What bird is this?"):
        print(piece, end="", flush=True)

`Client` blocks, `AsyncClient` awaits; both take and return the same values. The raw messages and stubs are in
`kestrel_client.v1`.
"""

from __future__ import annotations

from kestrel_client import _version
from kestrel_client.aio import AsyncClient
from kestrel_client.async_calls import AsyncSegmentStream, AsyncTextStream
from kestrel_client.batches import Job, Outcome, Progress
from kestrel_client.blocking_calls import SegmentStream, TextStream
from kestrel_client.client import Client
from kestrel_client.drawing import draw
from kestrel_client.errors import (
    AdapterInvalid,
    AdapterNotFound,
    Cancelled,
    ClientClosed,
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
from kestrel_client.requests import CachePolicy, CallOptions, Length, Priority, SpatialRef
from kestrel_client.results import (
    Adapter,
    Box,
    CaptionAlternative,
    CaptionResult,
    ClearedCache,
    DetectedObject,
    DetectResult,
    EngineInfo,
    EngineLoad,
    EngineStatus,
    FinishReason,
    FrontendLoad,
    GazeResult,
    Grounding,
    Limits,
    Load,
    MemoryPlan,
    Model,
    Point,
    PointResult,
    QueryAlternative,
    QueryResult,
    Reasoning,
    Result,
    Segment,
    SegmentResult,
    ServerInfo,
    ServerLoad,
    SkillDefaults,
    TextChannel,
    TextDelta,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
)

__version__ = _version.VERSION

__all__ = [
    "Adapter",
    "AdapterInvalid",
    "AdapterNotFound",
    "AsyncClient",
    "AsyncSegmentStream",
    "AsyncTextStream",
    "Box",
    "CachePolicy",
    "CallOptions",
    "Cancelled",
    "CaptionAlternative",
    "CaptionResult",
    "ClearedCache",
    "Client",
    "ClientClosed",
    "DeadlineExceeded",
    "DetectResult",
    "DetectedObject",
    "EngineInfo",
    "EngineLoad",
    "EngineStatus",
    "FinishReason",
    "FrontendLoad",
    "GazeResult",
    "Grounding",
    "ImageInput",
    "ImageNotFound",
    "InvalidRequest",
    "Job",
    "KestrelClientError",
    "Length",
    "Limits",
    "Load",
    "MemoryPlan",
    "Model",
    "ModelNotFound",
    "Outcome",
    "Overloaded",
    "PermissionDenied",
    "Point",
    "PointResult",
    "Priority",
    "Progress",
    "QueryAlternative",
    "QueryResult",
    "RawImage",
    "Reasoning",
    "RequestRefused",
    "Result",
    "Segment",
    "SegmentResult",
    "SegmentStream",
    "ServerError",
    "ServerInfo",
    "ServerLoad",
    "SkillDefaults",
    "SkillUnsupported",
    "SpatialRef",
    "StoredImage",
    "StreamIdle",
    "TextChannel",
    "TextDelta",
    "TextStream",
    "Timing",
    "TokenLogprob",
    "TopLogprob",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "Violation",
    "draw",
]
