"""Converts the fields that messages of `VisionService` share to those of the engine's requests.

An absent field becomes None or the default of the request type. Violations that only protobuf allows (a oneof
without a member, an unknown enum value) are reported together with those that the request type finds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from kestrel_client.v1 import generation_pb2, media_pb2, vision_service_pb2
from kestrel_grpc.images.stored_images import BAD_IMAGE_ID, MAX_CHUNK_BYTES, ImageHandle, ImageReference, ImageUri
from kestrel_runtime.api.constraints import MAX_CHOICES, Constraint
from kestrel_runtime.api.errors import InvalidRequest, Violation
from kestrel_runtime.api.images import Image, PixelFormat, RawImage, side_violations
from kestrel_runtime.api.requests import (
    MAX_CHAT_MESSAGES,
    MAX_SPATIAL_REFS,
    BoxRef,
    CachePolicy,
    Chat,
    ChatMessage,
    PointRef,
    Priority,
    Request,
    RequestOptions,
    Role,
    SamplingParams,
    SpatialRef,
    too_many_messages,
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
_ROLES: Mapping[int, Role] = MappingProxyType(
    {
        vision_service_pb2.CHAT_ROLE_SYSTEM: Role.SYSTEM,
        vision_service_pb2.CHAT_ROLE_USER: Role.USER,
        vision_service_pb2.CHAT_ROLE_ASSISTANT: Role.ASSISTANT,
    }
)
_MAX_PARTS = 1024
"""The most parts of all messages of a conversation together."""
_MAX_DURATION_S = 315_576_000_000
_CHOICES = "constraint.choices"
_DEFAULT_SAMPLING = SamplingParams()
_DEFAULT_OPTIONS = RequestOptions()


@dataclass(frozen=True, slots=True)
class Parsed:
    """Holds a request, and what its message says about its images."""

    request: Request
    references: tuple[ImageReference | None, ...]
    """The address or the handle of each image of the request; None for an image whose bytes the message has."""
    field_name: Callable[[str], str]
    """Converts the path of a field of the engine's requests to its path in the message."""


def parsed(parse: Callable[[Any], Request], message: Any) -> Parsed:
    """Returns the request that `parse` makes of a message. Raises `InvalidRequest`."""
    request = parse(message)
    if isinstance(request, Chat):
        places = _image_places(message.messages)
        images = [message.messages[index].parts[place].image for index, row in enumerate(places) for place in row]
        return Parsed(request, tuple(map(_reference, images)), partial(_chat_path, places))
    return Parsed(request, (_reference(message.image),) if request.images else (), str)


def framed(request: RequestT, image: media_pb2.Image) -> Parsed:
    """Returns the request with the image of a frame in place of its own. Raises `InvalidRequest`."""
    violations: list[Violation] = []
    own = _image(image, "image", violations)
    if violations:
        raise InvalidRequest(tuple(violations))
    return Parsed(request.with_images((own,)), (_reference(image),), str)


def _reference(image: media_pb2.Image) -> ImageReference | None:
    source = image.WhichOneof("source")
    if source == "uri":
        return ImageUri(image.uri)
    return ImageHandle.parse(image.image_id) if source == "image_id" else None


def new_request(
    kind: type[RequestT], message: Any, violations: list[Violation], *, needs_image: bool = True, **own: Any
) -> RequestT:
    """Returns a request of the fields that messages about one image share and of its `own` fields.

    Raises `InvalidRequest` with all violations: first `violations`, which the caller has found in `own`, then those
    of shared fields, then those that the request finds.
    """
    has_image = needs_image or message.HasField("image")
    own["image"] = _image(message.image, "image", violations) if has_image else None
    return _made(kind, message, violations, own, str)


def new_chat(message: Any, violations: list[Violation]) -> Chat:
    """Returns a conversation, as `new_request` returns requests about one image."""
    if len(message.messages) > MAX_CHAT_MESSAGES:  # before each is looked at
        raise InvalidRequest((*violations, too_many_messages()))
    num_parts = sum(len(item.parts) for item in message.messages)
    if num_parts > _MAX_PARTS:
        text = f"must have at most {_MAX_PARTS} parts together, and have {num_parts}"
        raise InvalidRequest((*violations, Violation("messages", text)))
    turns = enumerate(message.messages)
    own = {
        "messages": tuple(_chat_message(turn, f"messages[{index}]", violations) for index, turn in turns),
        "reasoning": message.reasoning,
        "constraint": constraint(message.constraint) if message.HasField("constraint") else None,
    }
    return _made(Chat, message, violations, own, partial(_chat_path, _image_places(message.messages)))


def _made(
    kind: type[RequestT],
    message: Any,
    violations: list[Violation],
    own: dict[str, Any],
    field_name: Callable[[str], str],
) -> RequestT:
    options = _options(message, violations)
    if "sampling" in message.DESCRIPTOR.fields_by_name:
        own["sampling"] = _sampling(message)
    try:
        request = kind(options=options, **own)
    except InvalidRequest as error:
        error.rename(field_name)
        raise InvalidRequest((*violations, *map(_renamed, error.violations))) from None
    if violations:
        raise InvalidRequest(tuple(violations))
    return request


def _chat_message(message: vision_service_pb2.ChatMessage, path: str, violations: list[Violation]) -> ChatMessage:
    role = _ROLES.get(message.role)
    if role is None:
        violations.append(Violation(f"{path}.role", "must be one of SYSTEM, USER and ASSISTANT"))
        role = Role.USER
    texts: list[str] = []
    images: list[Image] = []
    for index, part in enumerate(message.parts):
        kind = part.WhichOneof("part")
        if kind == "text":
            texts.append(part.text)
        elif kind == "image":
            images.append(_image(part.image, f"{path}.parts[{index}].image", violations))
        else:
            violations.append(Violation(f"{path}.parts[{index}]", "needs a text or an image"))
    return ChatMessage(role, "\n".join(texts), tuple(images))


def _image_places(messages: Sequence[vision_service_pb2.ChatMessage]) -> list[list[int]]:
    """Returns for each message the indices of its parts that are images."""
    return [
        [index for index, part in enumerate(message.parts) if part.WhichOneof("part") == "image"]
        for message in messages
    ]


_CHAT_FIELD = re.compile(r"messages\[(\d+)\]\.(content|images)(?:\[(\d+)\])?(.*)")


def _chat_path(places: Sequence[Sequence[int]], field: str) -> str:
    """Returns the path in the message of a field of the engine's conversation, whose texts and images are parts."""
    found = _CHAT_FIELD.fullmatch(field)
    if found is None:
        return field
    index, kind, place, rest = found.groups()
    if kind == "content":
        return f"messages[{index}].parts"
    return f"messages[{index}].parts[{places[int(index)][int(place or 0)]}].image{rest}"


def _renamed(violation: Violation) -> Violation:
    """Returns the violation with the path of its field in the message, which has choices in a message of their
    own."""
    field = violation.field
    if field.startswith(_CHOICES):
        field = f"{_CHOICES}.values{field.removeprefix(_CHOICES)}"
    return Violation(field, violation.description)


def header_of(message: Any) -> Any:
    """Returns the header in the first message of an upload, which is None if none came. Raises `InvalidRequest`."""
    if message is None or message.WhichOneof("part") != "header":
        raise InvalidRequest((Violation("header", "must come first"),))
    return message.header


def chunk_of(message: Any) -> bytes:
    """Returns the bytes in a later message of an upload. Raises `InvalidRequest`."""
    if message.WhichOneof("part") != "chunk":
        raise InvalidRequest((Violation("chunk", "must follow the header"),))
    if not 0 < len(message.chunk) <= MAX_CHUNK_BYTES:
        raise InvalidRequest((Violation("chunk", f"must be 1 to {MAX_CHUNK_BYTES} bytes long"),))
    return message.chunk


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


def _image(message: media_pb2.Image, path: str, violations: list[Violation]) -> bytes | RawImage:
    """Returns the image in the field at `path`, or a placeholder for one that it only names."""
    source = message.WhichOneof("source")
    if source == "raw":
        return _raw_image(message.raw, path, violations)
    if source == "image_id" and ImageHandle.parse(message.image_id) is None:
        violations.append(Violation(f"{path}.image_id", BAD_IMAGE_ID))
    return _PLACEHOLDER_IMAGE if source in ("uri", "image_id") else message.data


def _raw_image(message: media_pb2.RawImage, path: str, violations: list[Violation]) -> bytes | RawImage:
    pixel_format = _PIXEL_FORMATS.get(message.format)
    if pixel_format is None:
        violations.append(Violation(f"{path}.raw.format", "must be one of RGB8, BGR8, RGBA8 and GRAY8"))
        sides = side_violations(message.width_px, message.height_px)
        violations += (Violation(f"{path}{side.field.removeprefix('image')}", side.description) for side in sides)
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
