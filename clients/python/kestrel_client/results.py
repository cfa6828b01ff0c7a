"""Defines the results of calls as frozen values, and reads them from response messages.

Coordinates are fractions of the image's width and height, from 0 to 1, measured from its top left corner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import grpc
from google.protobuf import duration_pb2

from kestrel_client.errors import SCORES_MISSING, Failure, KestrelClientError, ServerError, of_object
from kestrel_client.images import StoredImage
from kestrel_client.outlines import area, mask, png, polygons_in, run_length_counts
from kestrel_client.v1 import (
    engine_service_pb2,
    generation_pb2,
    image_service_pb2,
    media_pb2,
    vision_service_pb2,
)

if TYPE_CHECKING:
    from PIL.Image import Image

AnyValue = TypeVar("AnyValue")
AnyFound = TypeVar("AnyFound", "DetectResult", "PointResult")


class FinishReason(StrEnum):
    """The reason why generation ended."""

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


class TextChannel(StrEnum):
    """The text that a piece belongs to."""

    ANSWER = "answer"
    REASONING = "reasoning"
    UNKNOWN = "unknown"
    """A text that this version of the client does not know."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A token that might have been generated. `logprob` is the natural logarithm of its probability."""

    text: str
    bytes: bytes
    logprob: float
    token_id: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that was generated, and the most likely ones in its place, the most likely first."""

    text: str
    bytes: bytes
    logprob: float
    token_id: int
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """A place in the image."""

    x: float
    y: float

    def to_pixels(self, width_px: int, height_px: int) -> tuple[int, int]:
        """Returns the pixel of an image of this size, as x and y."""
        return min(int(self.x * width_px), width_px - 1), min(int(self.y * height_px), height_px - 1)


@dataclass(frozen=True, slots=True)
class Box:
    """An upright rectangle in the image."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float

    def to_pixels(self, width_px: int, height_px: int) -> tuple[int, int, int, int]:
        """Returns left, top, right and bottom in an image of this size, as Pillow takes boxes."""
        x_min, x_max = round(self.x_min * width_px), round(self.x_max * width_px)
        y_min, y_max = round(self.y_min * height_px), round(self.y_max * height_px)
        return x_min, y_min, x_max, y_max


@dataclass(frozen=True, slots=True)
class PointedObject:
    """An object found, and its place."""

    point: Point
    score: float | None = None
    """The confidence of the model, from 0 to 1, for sorting; None from an older server. It is no share of right
    answers."""


@dataclass(frozen=True, slots=True)
class DetectedObject:
    """An object found, and the box around it."""

    box: Box
    score: float | None = None
    """The confidence of the model, from 0 to 1, for sorting; None from an older server. It is no share of right
    answers."""
    track_id: int | None = None
    """Names the object through the frames of a stream with `track`, from 1; None everywhere else."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The outline of an object.

    Attributes:
        svg_path: An SVG path (the `d` attribute) whose coordinates run from 0 to 1 over `box`, not over the image:
            x from its left side to its right side, y from its top to its bottom.
        box: The box around the object, in fractions of the image's width and height.
        is_partial: Whether the path lacks something: the model wrote what is no path, or was stopped too early.
    """

    svg_path: str
    box: Box
    is_partial: bool = False

    def polygons(self, width: float = 1, height: float = 1) -> list[list[tuple[float, float]]]:
        """Returns each closed or open line of the outline as its corners; curves become short straight lines.

        Args:
            width: The width of the image; the default leaves x as a fraction of it.
            height: The height of the image.
        """
        box = self.box
        return polygons_in(self.svg_path, (box.x_min, box.y_min, box.x_max, box.y_max), width, height)

    def polygon(self, width: float = 1, height: float = 1) -> list[tuple[float, float]]:
        """Returns the corners of the outline's largest polygon; none where the outline draws nothing.

        Args:
            width: The width of the image; the default leaves x as a fraction of it.
            height: The height of the image.
        """
        return max(self.polygons(width, height), key=lambda polygon: abs(area(polygon)), default=[])

    def to_pil_mask(self, width: int, height: int) -> Image:
        """Returns a PIL image of mode "L" that is 255 inside the outline and 0 outside. Needs Pillow.

        Args:
            width: The width of the image, in pixels.
            height: The height of the image, in pixels.

        Raises:
            ValueError: If the image has more than 67,108,864 pixels, or the outline too many lines for its size.
        """
        return mask(self.polygons(width, height), width, height)

    def to_png(self, width: int, height: int) -> bytes:
        """Returns the mask of `to_pil_mask` as the file of a PNG. Needs Pillow.

        Args:
            width: The width of the image, in pixels.
            height: The height of the image, in pixels.

        Raises:
            ValueError: As of `to_pil_mask`.
        """
        return png(self.polygons(width, height), width, height)

    def to_rle(self, width: int, height: int) -> dict[str, Any]:
        """Returns the same mask in COCO's compressed run-length encoding: `size`, which is height and width, and
        `counts`. `pycocotools.mask.decode` reads it.

        Args:
            width: The width of the image, in pixels.
            height: The height of the image, in pixels.

        Raises:
            ValueError: If a side is longer than 65,536 pixels, or the outline has too many lines for its size.
        """
        return {"size": [height, width], "counts": run_length_counts(self.polygons(width, height), width, height)}


@dataclass(frozen=True, slots=True)
class Grounding:
    """The points that `text[start_char:end_char]` of a reasoning refers to."""

    start_char: int
    end_char: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning of the model before its answer."""

    text: str
    groundings: tuple[Grounding, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of a text. `token_index` counts the tokens of its channel that came before."""

    text: str
    channel: TextChannel
    token_index: int
    token_count: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. The input includes the image."""

    input_token_count: int
    output_token_count: int
    image_token_count: int
    cached_token_count: int = 0
    """Input tokens that the server did not compute, since it had them cached."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of the stages on the server, in seconds."""

    queue_s: float
    preprocess_s: float
    prefill_s: float
    time_to_first_token_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The fields that every result has. `request_id` identifies the request in the server's log.

    `width_px` and `height_px` are the size of the upright image; None without an image, or from an older server.
    """

    request_id: str
    model: str
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    stop_sequence: str | None = None
    """The string in `stop` that came; None where generation ended for another reason."""
    width_px: int | None = None
    height_px: int | None = None

    def _size_px(self) -> tuple[int, int]:
        if self.width_px is None or self.height_px is None:
            raise ValueError("the server did not report the size of the image")
        return self.width_px, self.height_px


@dataclass(frozen=True, slots=True)
class QueryAlternative:
    """A further sample of an answer."""

    answer: str
    reasoning: Reasoning | None
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop_sequence: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult(Result):
    """A whole answer; `reasoning` is None where none was requested."""

    answer: str
    reasoning: Reasoning | None
    logprobs: tuple[TokenLogprob, ...] = ()
    """The logprobs of the answer's tokens, where `logprobs` asks for them."""
    alternatives: tuple[QueryAlternative, ...] = ()
    """Further samples, where `n` asks for several. `usage` counts the output of all."""


@dataclass(frozen=True, slots=True)
class CaptionAlternative:
    """A further sample of a description."""

    caption: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop_sequence: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionResult(Result):
    """A whole description."""

    caption: str
    logprobs: tuple[TokenLogprob, ...] = ()
    alternatives: tuple[CaptionAlternative, ...] = ()


@dataclass(frozen=True, slots=True)
class PointGroup:
    """The places of one of several objects; `error` is None where it has an answer.

    Attributes:
        object: What was looked for.
        points: One place per object found, in the order of the model.
        finish_reason: Why generation ended; UNKNOWN where there is an error.
        error: The exception that a call about this object alone would raise.
        objects: The places with their scores.
    """

    object: str
    points: tuple[Point, ...]
    finish_reason: FinishReason
    error: KestrelClientError | None = None
    objects: tuple[PointedObject, ...] = ()


@dataclass(frozen=True, slots=True)
class DetectGroup:
    """The boxes around one of several objects; `error` is None where it has an answer.

    Attributes:
        object: What was looked for.
        objects: One entry per object found, in the order of the model.
        finish_reason: Why generation ended; UNKNOWN where there is an error.
        error: The exception that a call about this object alone would raise.
    """

    object: str
    objects: tuple[DetectedObject, ...]
    finish_reason: FinishReason
    error: KestrelClientError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult(Result):
    """One place per object found. `object` is what was looked for; if that was several objects, it is empty, and
    `groups` has the places of each, in their order."""

    points: tuple[Point, ...]
    object: str = ""
    groups: tuple[PointGroup, ...] = ()
    objects: tuple[PointedObject, ...] = ()
    """The places with their scores; empty from an older server."""

    @property
    def points_px(self) -> tuple[tuple[int, int], ...]:
        """Returns the places in pixels, as x and y. Raises ValueError where the size of the image is not known."""
        return tuple(point.to_pixels(*self._size_px()) for point in self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectResult(Result):
    """The objects found. `object` is what was looked for; if that was several objects, it is empty, and `groups`
    has the boxes of each, in their order."""

    objects: tuple[DetectedObject, ...]
    object: str = ""
    groups: tuple[DetectGroup, ...] = ()

    @property
    def boxes_px(self) -> tuple[tuple[int, int, int, int], ...]:
        """Returns the boxes in pixels: left, top, right, bottom.

        Raises ValueError where the image's size is not known.
        """
        return tuple(item.box.to_pixels(*self._size_px()) for item in self.objects)


@dataclass(frozen=True, slots=True)
class FrameResult(Generic[AnyFound]):
    """A frame of a stream with what was found in it.

    Attributes:
        index: Which frame: how many of the frames given to the stream came before it.
        result: What was found; None where there is an error.
        error: The exception that a call about this frame alone would raise; the stream goes on.
        dropped_count: How many frames the server has dropped so far, since newer ones came.
        waiting_s: How long the frame waited in the server until the model was asked about it, in seconds.
    """

    index: int
    result: AnyFound | None
    error: KestrelClientError | None
    dropped_count: int
    waiting_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentResult(Result):
    """The outlines found. `object` is what was looked for."""

    segments: tuple[Segment, ...]
    object: str = ""

    @property
    def polygons_px(self) -> tuple[list[tuple[float, float]], ...]:
        """Returns the largest polygon of each outline, in pixels.

        Raises ValueError where the image's size is not known.
        """
        return tuple(segment.polygon(*self._size_px()) for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class GazeResult(Result):
    """The place that is looked at; `target` is None where none was found in the image."""

    target: Point | None

    @property
    def target_px(self) -> tuple[int, int] | None:
        """Returns the place in pixels, as x and y. Raises ValueError where the size of the image is not known."""
        return None if self.target is None else self.target.to_pixels(*self._size_px())


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult(Result):
    """The embeddings of an image, which has `patch_count` patches: in rows from the top, each from the left."""

    mean: tuple[float, ...]
    """The mean of the embeddings of all patches."""
    patch_count: int
    patches: bytes = field(default=b"", repr=False)
    """The embeddings of the patches one after the other, as little-endian numbers of the format that was asked for:
    `numpy.frombuffer(result.patches, "<f2").reshape(result.patch_count, -1)`. Empty unless they were asked for."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server."""

    max_message_bytes: int
    max_image_bytes: int
    max_image_pixels: int
    max_queued_requests: int
    max_running_requests: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division of the memory of a device at the start.

    `utilization` is the share of the memory that the server may take. The terms from `weight_bytes` on together are
    `total_bytes`; `other_bytes` is what others had taken before, and `free_bytes` is planned for nothing.
    """

    total_bytes: int
    utilization: float
    weight_bytes: int
    cache_bytes: int
    activation_bytes: int
    graph_bytes: int
    image_bytes: int
    image_cache_bytes: int
    crop_cache_bytes: int
    adapter_bytes: int
    other_bytes: int
    margin_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine of a server, which has one for each device.

    Attributes:
        index: The number of the engine, from 0, as in the label `engine` of metrics.
        device: Where it runs, such as "cpu" or "cuda"; empty while its process starts and has not reported yet.
        device_uuid: Names the GPU, as `nvidia-smi -L` does after "GPU-"; empty on the host.
        max_running_requests: How many of its requests generate at a time; 0 while it has not reported yet.
        memory_plan: None where it divided no memory.
        device_name: Names the device for people, such as "NVIDIA H200"; empty while its process starts.
    """

    index: int
    device: str
    device_uuid: str
    max_running_requests: int
    memory_plan: MemoryPlan | None
    device_name: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The identity of a server, and the name of its model. `instance_id` changes with every start."""

    server_version: str
    instance_id: str
    capabilities: tuple[str, ...]
    limits: Limits
    model: str
    engines: tuple[EngineInfo, ...] = ()
    """The engines by index; empty from an older server."""
    frontend_count: int = 0
    """Processes that take calls; 0 where one process takes the calls and runs the engine."""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    """The options that say how the engines compute, by name, such as "kv_dtype"; empty from an older server."""


@dataclass(frozen=True, slots=True)
class SkillDefaults:
    """Defaults of a skill, for fields that a request leaves out; None where the skill has no such field."""

    skill: str
    temperature: float
    top_p: float
    max_tokens: int | None
    max_objects: int | None
    reasoning: bool | None


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a server serves. `revision` is empty where none is known."""

    name: str
    revision: str
    architecture: str
    skills: tuple[str, ...]
    device: str
    dtype: str
    max_context_token_count: int
    parameter_count: int
    defaults: tuple[SkillDefaults, ...]


@dataclass(frozen=True, slots=True)
class ClearedCache:
    """The content that was removed from the server's caches."""

    page_count: int
    image_count: int
    crop_count: int = 0


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter (LoRA) that is loaded."""

    name: str
    digest: str
    """SHA-256 of its files, in hexadecimal digits."""
    request_count: int
    """Requests that use it now."""
    is_current: bool
    """True if new requests that name it use it; else only requests that run still do."""


@dataclass(frozen=True, slots=True)
class UploadedAdapter:
    """An adapter that has been added to the server's folder of adapters."""

    name: str
    digest: str
    """SHA-256 of its files, in hexadecimal digits, as `Adapter.digest`."""
    replaced: bool
    """True if it has replaced another adapter of this name."""


class EngineStatus(StrEnum):
    """The state of an engine towards new requests."""

    SERVING = "serving"
    DRAINING = "draining"
    """It finishes the requests that it has, and takes no others."""
    RECOVERING = "recovering"
    """It takes no requests while it recovers from a failure, or its process is started again."""
    DEAD = "dead"
    UNKNOWN = "unknown"
    """A status that this version of the client does not know."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of an engine, or of all engines of a server together."""

    running_request_count: int
    waiting_request_count: int
    preprocessing_request_count: int
    used_page_count: int
    page_count: int
    output_tokens_per_second: float
    requests_per_second: float = 0.0
    """Requests that got their whole answer; 0 also from a server that is older than this field."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of one engine of a server. `index` and `device` are those of its `EngineInfo`."""

    index: int
    device: str
    status: EngineStatus
    process_id: int | None
    """The id of its process; None while that is started again."""
    load: Load | None
    """The counts; None while its process is started again."""


@dataclass(frozen=True, slots=True)
class FrontendLoad:
    """The load of a process that takes calls."""

    name: str
    """The name of the process in the log and in the label `process` of metrics; empty where one process is the
    whole server."""
    process_id: int
    open_request_count: int
    """Requests to the model, of every API, that it has open now."""


@dataclass(frozen=True, slots=True)
class ServerLoad(Load):
    """The load of a server: all its engines together, each of them, and the processes that take calls."""

    engines: tuple[EngineLoad, ...] = ()
    """The engines by index; empty from an older server."""
    frontends: tuple[FrontendLoad, ...] = ()
    """The processes by name; only the one that answered if another did not in time. Empty from an older server."""


@dataclass(frozen=True, slots=True)
class CallerUsage:
    """Counts what a caller has asked of the model since the server was started."""

    token: str
    """The name of the token; empty for all callers without one that the server knows."""
    answered_request_count: int
    failed_request_count: int
    """Requests that ended without an answer: invalid, cancelled, late or failed."""
    refused_request_count: int
    """Requests that were not let in, for the token or for a limit."""
    input_token_count: int
    """Tokens of the prompts and images of answered requests, with those that were cached."""
    cached_token_count: int
    output_token_count: int


def query_result(message: vision_service_pb2.QueryResult) -> QueryResult:
    """Reads an answer."""
    return QueryResult(
        answer=message.answer,
        reasoning=_reasoning(message),
        logprobs=_token_logprobs(message.logprobs),
        **_info(message.info),
    )


def complete_query(
    message: vision_service_pb2.CompleteQueryResponse | vision_service_pb2.CompleteChatResponse,
) -> QueryResult:
    """Reads an answer and its alternatives."""
    alternatives = tuple(
        QueryAlternative(item.answer, _reasoning(item), **_ending(item)) for item in message.alternatives
    )
    return replace(query_result(message.result), alternatives=alternatives)


def caption_result(message: vision_service_pb2.CaptionResult) -> CaptionResult:
    """Reads a description."""
    return CaptionResult(caption=message.caption, logprobs=_token_logprobs(message.logprobs), **_info(message.info))


def complete_caption(message: vision_service_pb2.CompleteCaptionResponse) -> CaptionResult:
    """Reads a description and its alternatives."""
    alternatives = tuple(CaptionAlternative(item.caption, **_ending(item)) for item in message.alternatives)
    return replace(caption_result(message.result), alternatives=alternatives)


def point_result(
    message: vision_service_pb2.PointResponse, object: str | Sequence[str], min_score: float | None = None
) -> PointResult:
    """Reads points. Raises `ServerError` if some have no score and the request has a least one."""
    for found in (message, *message.groups):
        items = found.objects if found.objects or not found.points else (None,)
        require_scores(items, min_score, message.info.request_id)
    points = tuple(_point(point) for point in message.points)
    groups = tuple(
        PointGroup(
            group.object,
            tuple(map(_point, group.points)),
            objects=_pointed(group.objects),
            **_group(group, message.info.request_id),
        )
        for group in message.groups
    )
    return PointResult(
        points=points,
        object=_one(object),
        groups=groups,
        objects=_pointed(message.objects),
        **_info(message.info),
    )


def detect_result(
    message: vision_service_pb2.DetectResponse, object: str | Sequence[str], min_score: float | None = None
) -> DetectResult:
    """Reads objects. Raises `ServerError` if some have no score and the request has a least one."""
    for found in (message, *message.groups):
        require_scores(found.objects, min_score, message.info.request_id)
    groups = tuple(
        DetectGroup(group.object, _detected(group.objects), **_group(group, message.info.request_id))
        for group in message.groups
    )
    return DetectResult(
        objects=_detected(message.objects), object=_one(object), groups=groups, **_info(message.info)
    )


def require_scores(found: Iterable[Any], min_score: float | None, request_id: str = "") -> None:
    """Raises `ServerError` if an object that was found has no score, although the request has a least one.

    None stands for an object of a server that has no place for scores: an older one, which ignores `min_score`.
    """
    if min_score is not None and any(item is None or not item.HasField("score") for item in found):
        text = "the server makes no scores, so that min_score leaves out nothing"
        raise ServerError(Failure(grpc.StatusCode.UNIMPLEMENTED, text, SCORES_MISSING, request_id=request_id))


def pointed_object(message: vision_service_pb2.PointedObject) -> PointedObject:
    """Reads an object pointed at."""
    return PointedObject(_point(message.point), _score(message))


def detected_object(message: vision_service_pb2.DetectedObject) -> DetectedObject:
    """Reads an object with its box."""
    return DetectedObject(box(message.box), _score(message), message.track_id or None)


def _score(message: vision_service_pb2.PointedObject | vision_service_pb2.DetectedObject) -> float | None:
    return message.score if message.HasField("score") else None


def _pointed(items: Iterable[vision_service_pb2.PointedObject]) -> tuple[PointedObject, ...]:
    return tuple(map(pointed_object, items))


def _detected(items: Iterable[vision_service_pb2.DetectedObject]) -> tuple[DetectedObject, ...]:
    return tuple(map(detected_object, items))


def frame_result(
    message: vision_service_pb2.DetectFramesResponse | vision_service_pb2.PointFramesResponse,
    read: Callable[[Any], AnyFound],
    request_id: str,
) -> FrameResult[AnyFound]:
    """Reads what became of a frame; `read` reads the result."""
    has_result = message.HasField("result")
    error = of_object(message.error.code, message.error.reason, message.error.message, request_id)
    return FrameResult(
        index=message.frame_index,
        result=read(message.result) if has_result else None,
        error=None if has_result else error,
        dropped_count=message.dropped_frame_count,
        waiting_s=_seconds(message.waiting_duration),
    )


def _one(object: str | Sequence[str]) -> str:
    """Returns the object that was looked for; empty for several, which have groups."""
    return object if isinstance(object, str) else ""


def _group(
    group: vision_service_pb2.PointGroup | vision_service_pb2.DetectGroup, request_id: str
) -> dict[str, Any]:
    """Returns the fields that groups of all kinds have."""
    error = of_object(group.error.code, group.error.reason, group.error.message, request_id)
    return {
        "finish_reason": _finish_reason(group.finish_reason),
        "error": error if group.HasField("error") else None,
    }


def segment_result(message: vision_service_pb2.SegmentResponse, object: str) -> SegmentResult:
    """Reads outlines."""
    segments = tuple(Segment(item.svg_path, box(item.box), item.is_partial) for item in message.segments)
    return SegmentResult(segments=segments, object=object, **_info(message.info))


def gaze_result(message: vision_service_pb2.GazeResponse) -> GazeResult:
    """Reads a target."""
    target = _point(message.target) if message.HasField("target") else None
    return GazeResult(target=target, **_info(message.info))


def embed_result(message: vision_service_pb2.EmbedImageResponse, patches: bytes = b"") -> EmbedResult:
    """Reads embeddings; `patches` have come before the message."""
    return EmbedResult(
        mean=tuple(message.mean), patch_count=message.patch_count, patches=patches, **_info(message.info)
    )


def text_delta(message: generation_pb2.TextDelta) -> TextDelta:
    """Reads a piece of text."""
    channel = _CHANNELS.get(message.channel, TextChannel.UNKNOWN)
    return _same(TextDelta, message, channel=channel, logprobs=_token_logprobs(message.logprobs))


def box(message: media_pb2.NormalizedBox) -> Box:
    """Reads a box."""
    return Box(message.x_min, message.y_min, message.x_max, message.y_max)


def server_info(message: engine_service_pb2.GetServerInfoResponse) -> ServerInfo:
    """Reads the information about a server."""
    limits = _same(Limits, message.limits)
    engines = tuple(map(_engine_info, message.engines))
    return _same(
        ServerInfo,
        message,
        capabilities=tuple(message.capabilities),
        limits=limits,
        engines=engines,
        settings={setting.name: setting.value for setting in message.settings},
    )


def models(message: engine_service_pb2.ListModelsResponse) -> tuple[Model, ...]:
    """Reads the models served."""
    return tuple(
        _same(
            Model,
            model,
            skills=tuple(model.skills),
            defaults=tuple(_skill_defaults(item) for item in model.defaults),
        )
        for model in message.models
    )


def load(message: engine_service_pb2.GetLoadResponse) -> ServerLoad:
    """Reads the load."""
    return _same(
        ServerLoad,
        message.load,
        engines=tuple(map(_engine_load, message.engines)),
        frontends=tuple(_same(FrontendLoad, frontend) for frontend in message.frontends),
    )


def usage(message: engine_service_pb2.GetUsageResponse) -> tuple[CallerUsage, ...]:
    """Reads what each caller has asked."""
    return tuple(_same(CallerUsage, caller) for caller in message.callers)


def cleared_cache(message: engine_service_pb2.ClearCacheResponse) -> ClearedCache:
    """Returns the content that was removed from the server's caches."""
    return _same(ClearedCache, message)


def adapter(message: engine_service_pb2.Adapter) -> Adapter:
    """Returns an adapter that is loaded."""
    return _same(Adapter, message)


def uploaded_adapter(message: engine_service_pb2.UploadAdapterResponse) -> UploadedAdapter:
    """Returns an adapter that has been added."""
    return _same(UploadedAdapter, message)


def stored_image(message: image_service_pb2.StoredImage) -> StoredImage:
    """Returns the image as the server stores it."""
    return _same(StoredImage, message, expires=message.expire_time.ToDatetime(UTC))


def _info(message: generation_pb2.ResponseInfo) -> dict[str, Any]:
    """Returns the fields of `Result`."""
    timing = message.timing
    return {
        "request_id": message.request_id,
        "model": message.model,
        "finish_reason": _finish_reason(message.finish_reason),
        "usage": _same(Usage, message.usage),
        "timing": Timing(
            queue_s=_seconds(timing.queue_duration),
            preprocess_s=_seconds(timing.preprocess_duration),
            prefill_s=_seconds(timing.prefill_duration),
            time_to_first_token_s=_seconds(timing.time_to_first_token),
            decode_s=_seconds(timing.decode_duration),
        ),
        "stop_sequence": message.stop_sequence or None,
        "width_px": message.image_width_px or None,
        "height_px": message.image_height_px or None,
    }


def _ending(message: vision_service_pb2.QueryAlternative | vision_service_pb2.CaptionAlternative) -> dict[str, Any]:
    """Returns the fields that alternatives of answers and of descriptions share."""
    return {
        "logprobs": _token_logprobs(message.logprobs),
        "finish_reason": _finish_reason(message.finish_reason),
        "stop_sequence": message.stop_sequence or None,
    }


def _reasoning(message: vision_service_pb2.QueryResult | vision_service_pb2.QueryAlternative) -> Reasoning | None:
    if not message.HasField("reasoning"):
        return None
    reasoning = message.reasoning
    groundings = tuple(
        Grounding(item.start_char, item.end_char, tuple(_point(point) for point in item.points))
        for item in reasoning.groundings
    )
    return Reasoning(reasoning.text, groundings, _token_logprobs(reasoning.logprobs))


def _token_logprobs(messages: Iterable[generation_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        _same(TokenLogprob, item, top=tuple(_same(TopLogprob, top) for top in item.top)) for item in messages
    )


def _finish_reason(number: int) -> FinishReason:
    return _FINISH_REASONS.get(number, FinishReason.UNKNOWN)


_FINISH_REASONS: dict[int, FinishReason] = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_MAX_OBJECTS: FinishReason.MAX_OBJECTS,
    generation_pb2.FINISH_REASON_STOP_SEQUENCE: FinishReason.STOP_SEQUENCE,
}
_ENGINE_STATUSES: dict[int, EngineStatus] = {
    engine_service_pb2.ENGINE_STATUS_SERVING: EngineStatus.SERVING,
    engine_service_pb2.ENGINE_STATUS_DRAINING: EngineStatus.DRAINING,
    engine_service_pb2.ENGINE_STATUS_RECOVERING: EngineStatus.RECOVERING,
    engine_service_pb2.ENGINE_STATUS_DEAD: EngineStatus.DEAD,
}
_CHANNELS: dict[int, TextChannel] = {
    generation_pb2.TEXT_CHANNEL_ANSWER: TextChannel.ANSWER,
    generation_pb2.TEXT_CHANNEL_REASONING: TextChannel.REASONING,
}


def _skill_defaults(message: engine_service_pb2.SkillDefaults) -> SkillDefaults:
    given = {
        name: getattr(message, name) if message.HasField(name) else None
        for name in ("max_tokens", "max_objects", "reasoning")
    }
    return _same(SkillDefaults, message, **given)


def _engine_info(message: engine_service_pb2.EngineInfo) -> EngineInfo:
    return _same(
        EngineInfo,
        message,
        memory_plan=_same(MemoryPlan, message.memory_plan) if message.HasField("memory_plan") else None,
    )


def _engine_load(message: engine_service_pb2.EngineLoad) -> EngineLoad:
    return _same(
        EngineLoad,
        message,
        status=_ENGINE_STATUSES.get(message.status, EngineStatus.UNKNOWN),
        process_id=message.process_id or None,
        load=_same(Load, message.load) if message.HasField("load") else None,
    )


def _same(kind: type[AnyValue], message: Any, **converted: Any) -> AnyValue:
    """Returns a value with the fields of a message; `converted` has those that differ in name or type."""
    same = {
        item.name: getattr(message, item.name) for item in fields(cast(Any, kind)) if item.name not in converted
    }
    return kind(**same, **converted)


def _seconds(message: duration_pb2.Duration) -> float:
    return message.ToTimedelta().total_seconds()


def _point(message: media_pb2.NormalizedPoint) -> Point:
    return Point(message.x, message.y)
