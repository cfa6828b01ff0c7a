"""Converts the fields that messages of `VisionService` share to those of the engine's requests.

An absent field becomes None or the default of the request type. Violations that only protobuf allows (a oneof
without a member, an unknown enum value) are reported together with those that the request type finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from kestrel_client.v1 import generation_pb2, media_pb2
from kestrel_grpc.images.stored_images import BAD_IMAGE_ID, ImageHandle, ImageReference, ImageUri
from kestrel_runtime.api.constraints import MAX_CHOICES, Constraint
from kestrel_runtime.api.errors import InvalidRequest, Violation
from kestrel_runtime.api.images import PixelFormat, RawImage, side_violations
from kestrel_runtime.api.requests import (
    MAX_SPATIAL_REFS,
    BoxRef,
    CachePolicy,
    PointRef,
    Priority,
    Request,
    RequestOptions,
    SamplingParams,
    SpatialRef,
    too_many_spatial_refs,
)

RequestT = TypeVar("RequestT", bound=Request)

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
# Stands for the bytes of an image that the request names by an address or a handle.
_PLACEHOLDER_IMAGE = b"?"
_MAX_DURATION_S = 315_576_000_000
_CHOICES = "constraint.choices"
_DEFAULT_SAMPLING = SamplingParams()
_DEFAULT_OPTIONS = RequestOptions()


def image_reference(message: Any) -> ImageReference | None:
    """Returns the address or the handle of the image; None if the message has the bytes of an image, or no image.

    Takes a message that has been converted; its request has a placeholder as its image.
    """
    source = message.image.WhichOneof("source")
    if source == "uri":
        return ImageUri(message.image.uri)
    return ImageHandle.parse(message.image.image_id) if source == "image_id" else None


def new_request(
    kind: type[RequestT], message: Any, violations: list[Violation], *, needs_image: bool = True, **own: Any
) -> RequestT:
    """Returns a request of the fields that all messages share and of its `own` fields.

    Raises `InvalidRequest` with all violations: first `violations`, which the caller has found in `own`, then those
    of shared fields, then those that the request finds.
    """
    options = _options(message, violations)
    own["image"] = _image(message, violations) if needs_image or message.HasField("image") else None
    try:
        request = kind(sampling=_sampling(message), options=options, **own)
    except InvalidRequest as error:
        raise InvalidRequest((*violations, *map(_renamed, error.violations))) from None
    if violations:
        raise InvalidRequest(tuple(violations))
    return request


def _renamed(violation: Violation) -> Violation:
    """Returns the violation with the path of its field in the message, which has choices in a message of their
    own."""
    field = violation.field
    if field.startswith(_CHOICES):
        field = f"{_CHOICES}.values{field.removeprefix(_CHOICES)}"
    return Violation(field, violation.description)


def spatial_refs(messages: Sequence[media_pb2.SpatialRef], violations: list[Violation]) -> tuple[SpatialRef, ...]:
    """Returns the references to parts of the image, in order. Adds their problems to `violations`."""
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


def constraint(message: generation_pb2.Constraint) -> Constraint:
    """Returns the constraint of the answer. A constraint without a kind is refused when it is checked."""
    kind = message.WhichOneof("kind")
    return Constraint(
        choices=tuple(message.choices.values[: MAX_CHOICES + 1]),
        regex=message.regex if kind == "regex" else None,
        json_schema=message.json_schema if kind == "json_schema" else None,
    )


def seconds_of(duration: Duration) -> float | None:
    """Returns the length of a duration in seconds; None if it is not well formed."""
    same_sign = duration.seconds == 0 or duration.nanos == 0 or (duration.seconds > 0) == (duration.nanos > 0)
    if not same_sign or abs(duration.nanos) >= 10**9 or abs(duration.seconds) > _MAX_DURATION_S:
        return None
    return duration.seconds + duration.nanos * 1e-9


def _image(message: Any, violations: list[Violation]) -> bytes | RawImage:
    """Returns the image, or a placeholder for one that `image_reference` names."""
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


def _sampling(message: Any) -> SamplingParams:
    """Returns the given settings, which have the same names in the request."""
    if not message.HasField("sampling"):
        return _DEFAULT_SAMPLING
    sampling: generation_pb2.SamplingParams = message.sampling
    values: dict[str, Any] = {field.name: value for field, value in sampling.ListFields()}
    if "stop" in values:
        values["stop"] = tuple(sampling.stop)
    if "logit_bias" in values:
        values["logit_bias"] = tuple((item.token_id, item.bias) for item in sampling.logit_bias)
    return SamplingParams(**values)


def _options(message: Any, violations: list[Violation]) -> RequestOptions:
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
    return RequestOptions(options.model, max_queue_s, priority, cache, options.adapter)
