"""Converts protobuf to the engine's requests, one function per RPC of `VisionService`.

An absent field becomes None or the default of the request type. Violations that only protobuf allows (a oneof
without a member, an unknown enum value) are reported together with those that the request type finds. Knows nothing
about calls, statuses or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from kestrel_client.v1 import generation_pb2, media_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.frontends.grpc.durations import seconds_of
from kestrel_grpc.images.stored_images import BAD_IMAGE_ID, ImageHandle, ImageReference, ImageUri
from kestrel_runtime.api.errors import InvalidRequest, Violation
from kestrel_runtime.api.raw_image import PixelFormat, RawImage, side_violations
from kestrel_runtime.api.requests import (
    MAX_SPATIAL_REFS,
    BoxRef,
    CachePolicy,
    Caption,
    Detect,
    Point,
    PointRef,
    Priority,
    Query,
    RequestOptions,
    SamplingParams,
    Segment,
    SpatialRef,
    too_many_spatial_refs,
)

RequestT = TypeVar("RequestT", Query, Caption, Point, Detect, Segment)
ObjectRequestT = TypeVar("ObjectRequestT", Point, Detect, Segment)

_CAPTION_LENGTHS: Mapping[int, str] = MappingProxyType(
    {
        wire.CAPTION_LENGTH_UNSPECIFIED: "normal",
        wire.CAPTION_LENGTH_SHORT: "short",
        wire.CAPTION_LENGTH_NORMAL: "normal",
        wire.CAPTION_LENGTH_LONG: "long",
    }
)
_PRIORITIES: Mapping[int, Priority] = MappingProxyType(
    {
        generation_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL,
        generation_pb2.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
        generation_pb2.PRIORITY_NORMAL: Priority.NORMAL,
        generation_pb2.PRIORITY_BATCH: Priority.BATCH,
    }
)
_PLACEHOLDER_REF = PointRef(0.0, 0.0)
_CACHE_POLICIES: Mapping[int, CachePolicy] = MappingProxyType(
    {
        generation_pb2.CACHE_POLICY_UNSPECIFIED: CachePolicy.USE,
        generation_pb2.CACHE_POLICY_USE: CachePolicy.USE,
        generation_pb2.CACHE_POLICY_REFRESH: CachePolicy.REFRESH,
        generation_pb2.CACHE_POLICY_BYPASS: CachePolicy.BYPASS,
    }
)
_PIXEL_FORMATS: Mapping[int, PixelFormat] = MappingProxyType(
    {
        media_pb2.PIXEL_FORMAT_RGB8: PixelFormat.RGB8,
        media_pb2.PIXEL_FORMAT_BGR8: PixelFormat.BGR8,
        media_pb2.PIXEL_FORMAT_RGBA8: PixelFormat.RGBA8,
        media_pb2.PIXEL_FORMAT_GRAY8: PixelFormat.GRAY8,
    }
)
# In place of the bytes of an image that the request names by an address or a handle.
_PLACEHOLDER_IMAGE = b"?"
_DEFAULT_SAMPLING = SamplingParams()
_DEFAULT_OPTIONS = RequestOptions()


def query(message: wire.QueryRequest | wire.CompleteQueryRequest) -> Query:
    """A question, streamed or not."""
    violations: list[Violation] = []
    refs = _spatial_refs(message.spatial_refs, violations)
    options = _options(message, violations)
    image = _image(message, violations) if message.HasField("image") else None
    return _build(
        violations,
        lambda: Query(
            question=message.question,
            image=image,
            reasoning=message.reasoning,
            spatial_refs=refs,
            sampling=_sampling(message),
            options=options,
        ),
    )


def caption(message: wire.CaptionRequest | wire.CompleteCaptionRequest) -> Caption:
    """A description, streamed or not."""
    violations: list[Violation] = []
    length = _CAPTION_LENGTHS.get(message.length)
    if length is None:
        violations.append(Violation("length", f"{message.length} is not a known value"))
    options = _options(message, violations)
    image = _image(message, violations)
    return _build(
        violations,
        lambda: Caption(
            image=image,
            length=length or "normal",
            sampling=_sampling(message),
            options=options,
        ),
    )


def point(message: wire.PointRequest) -> Point:
    """Places of objects."""
    return _about_objects(Point, message, _max_objects(message))


def detect(message: wire.DetectRequest) -> Detect:
    """Boxes around objects."""
    return _about_objects(Detect, message, _max_objects(message))


def segment(message: wire.SegmentRequest) -> Segment:
    """The outline of an object."""
    return _about_objects(Segment, message, None)


def image_reference(message: _Generating) -> ImageReference | None:
    """What a message that has been converted has in place of the bytes of its image, which are a placeholder in the
    request; None where it has the bytes or no image."""
    source = message.image.WhichOneof("source")
    if source == "uri":
        return ImageUri(message.image.uri)
    return ImageHandle.parse(message.image.image_id) if source == "image_id" else None


def _about_objects(
    kind: type[ObjectRequestT],
    message: wire.PointRequest | wire.DetectRequest | wire.SegmentRequest,
    max_objects: int | None,
) -> ObjectRequestT:
    violations: list[Violation] = []
    refs = _spatial_refs(message.spatial_refs, violations)
    options = _options(message, violations)
    image = _image(message, violations)
    return _build(
        violations,
        lambda: kind(
            object=message.object,
            image=image,
            max_objects=max_objects,
            spatial_refs=refs,
            sampling=_sampling(message),
            options=options,
        ),
    )


def _build(violations: list[Violation], construct: Callable[[], RequestT]) -> RequestT:
    """The request. Raises `InvalidRequest` with all violations, those found here first."""
    try:
        request = construct()
    except InvalidRequest as error:
        raise InvalidRequest((*violations, *error.violations)) from None
    if violations:
        raise InvalidRequest(tuple(violations))
    return request


def _image(message: _Generating, violations: list[Violation]) -> bytes | RawImage:
    """The image, or a placeholder for one that `image_reference` names."""
    source = message.image.WhichOneof("source")
    if source == "raw":
        return _raw_image(message.image.raw, violations)
    if source == "image_id" and ImageHandle.parse(message.image.image_id) is None:
        violations.append(Violation("image.image_id", BAD_IMAGE_ID))
    return _PLACEHOLDER_IMAGE if source in ("uri", "image_id") else message.image.data


def _raw_image(message: media_pb2.RawImage, violations: list[Violation]) -> bytes | RawImage:
    pixel_format = _PIXEL_FORMATS.get(message.format)
    if pixel_format is None:
        violations.append(Violation("image.raw.format", "must be one of RGB8, BGR8, RGBA8 and GRAY8"))
        violations += side_violations(message.width_px, message.height_px)
        return _PLACEHOLDER_IMAGE
    stride_bytes = message.row_stride_bytes or message.width_px * pixel_format.pixel_bytes
    return RawImage(message.pixels, message.width_px, message.height_px, pixel_format, stride_bytes)


def _max_objects(message: wire.PointRequest | wire.DetectRequest) -> int | None:
    return message.max_objects if message.HasField("max_objects") else None


def _sampling(message: _Generating) -> SamplingParams:
    if not message.HasField("sampling"):
        return _DEFAULT_SAMPLING
    sampling: generation_pb2.SamplingParams = message.sampling
    return SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
    )


def _options(message: _Generating, violations: list[Violation]) -> RequestOptions:
    if not message.HasField("options"):
        return _DEFAULT_OPTIONS
    options: generation_pb2.RequestOptions = message.options
    max_queue_s = None
    if options.HasField("max_queue_duration"):
        max_queue_s = seconds_of(options.max_queue_duration)
        if max_queue_s is None:
            violations.append(Violation("options.max_queue_duration", "is not a well-formed duration"))
    priority = _PRIORITIES.get(options.priority)
    if priority is None:
        violations.append(Violation("options.priority", f"{options.priority} is not a known value"))
        priority = Priority.NORMAL
    cache = _CACHE_POLICIES.get(options.cache)
    if cache is None:
        violations.append(Violation("options.cache", f"{options.cache} is not a known value"))
        cache = CachePolicy.USE
    return RequestOptions(options.model, max_queue_s, priority, cache)


def _spatial_refs(messages: Sequence[media_pb2.SpatialRef], violations: list[Violation]) -> tuple[SpatialRef, ...]:
    if len(messages) > MAX_SPATIAL_REFS:  # before each is looked at
        violations.append(too_many_spatial_refs())
        return ()
    refs: list[SpatialRef] = []
    for index, message in enumerate(messages):
        kind = message.WhichOneof("ref")
        if kind == "point":
            refs.append(PointRef(message.point.x, message.point.y))
        elif kind == "box":
            box = message.box
            refs.append(BoxRef(box.x_min, box.y_min, box.x_max, box.y_max))
        else:
            violations.append(Violation(f"spatial_refs[{index}]", "needs a point or a box"))
            refs.append(_PLACEHOLDER_REF)  # keeps the indices of the following ones
    return tuple(refs)


_Generating = (
    wire.QueryRequest
    | wire.CompleteQueryRequest
    | wire.CaptionRequest
    | wire.CompleteCaptionRequest
    | wire.PointRequest
    | wire.DetectRequest
    | wire.SegmentRequest
)
