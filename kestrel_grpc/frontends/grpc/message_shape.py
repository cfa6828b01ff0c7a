"""Limits serialized requests, before protobuf turns them into objects.

A field of two bytes on the wire takes forty in memory, and a microsecond to check: a message as large as an image
could hold millions of them. So a message must be small apart from its images, and must have few fields. The check
visits only the outermost fields and those around an image, and copies no payload.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from kestrel_runtime.api.errors import ImageError, InvalidRequest, Violation
from kestrel_runtime.api.requests import MAX_CHAT_IMAGES

MAX_OTHER_BYTES = 2**20
"""The most bytes of a message apart from the payloads of its images."""
MAX_FIELDS = 1000
"""The most fields of a message and its image together, as serialized: each item of a repeated field counts."""
MAX_CHAT_FIELDS = 4000
"""The same of a conversation: each of 256 messages takes two fields, each of 1,024 parts two, each image four."""
_UNCHECKED_BYTES = 128 * 1024
"""The size up to which a message is not checked: it holds too little to take long."""
_IMAGE_URI = "kestrel.v1.Image.uri"
"""The text field that may hold an image."""
_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class Payload:
    """Marks a field that may hold an image. `is_image`: it holds the bytes of the image and nothing else."""

    is_image: bool


Layout = Mapping[int, "Payload | Layout"]
"""The fields of a message that may hold an image, or whose own fields may, by number."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Bounds the messages of a type."""

    layout: Layout
    max_images: int
    """The most images: 1, or `MAX_CHAT_IMAGES` for a type with images in a repeated field."""

    @property
    def max_fields(self) -> int:
        """The most fields of a message and its images together."""
        return MAX_FIELDS if self.max_images == 1 else MAX_CHAT_FIELDS


def shape_of(descriptor: Any) -> Shape:
    """Returns the shape of the messages of a type, which must not contain itself."""
    layout = _layout_of(descriptor)
    repeats = any(field.is_repeated and _has_image(field) for field in descriptor.fields)
    return Shape(layout, MAX_CHAT_IMAGES if repeats else 1)


def _has_image(field: Any) -> bool:
    """Returns True if the field holds an `Image`, unlike repeated bytes of other contracts."""
    if field.type != FieldDescriptor.TYPE_MESSAGE:
        return field.full_name == _IMAGE_URI
    return any(map(_has_image, field.message_type.fields))


def _layout_of(descriptor: Any) -> Layout:
    found: dict[int, Payload | Layout] = {}
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_BYTES:
            found[field.number] = Payload(is_image=not field.is_repeated)
        elif field.full_name == _IMAGE_URI:
            found[field.number] = Payload(is_image=False)
        elif field.type == FieldDescriptor.TYPE_MESSAGE and (inner := _layout_of(field.message_type)):
            found[field.number] = inner
    return MappingProxyType(found)


def check_shape(message: bytes, shape: Shape, max_image_bytes: int) -> None:
    """Raises `InvalidRequest` for a message that is too large or has too many fields, apart from its images.

    Raises `ImageError` for the one image of a message above `max_image_bytes`, and `DecodeError` if the bytes are
    no protobuf message. The images are the longest of the fields that may hold one. Those of a conversation are
    checked later, with their paths.
    """
    num_bytes = len(message)
    if num_bytes <= _UNCHECKED_BYTES:
        return
    payloads: list[tuple[int, bool]] = []
    _walk(message, 0, num_bytes, shape.layout, 0, shape.max_fields, payloads)
    images = heapq.nlargest(shape.max_images, payloads)
    if num_bytes - sum(length for length, _ in images) > MAX_OTHER_BYTES:
        name = "image" if shape.max_images == 1 else f"{shape.max_images} largest images"
        raise _refusal(f"holds more than {MAX_OTHER_BYTES} bytes apart from its {name}")
    if shape.max_images == 1 and any(is_image and length > max_image_bytes for length, is_image in images):
        raise ImageError(f"must not exceed {max_image_bytes} bytes", too_large=True)


def _walk(
    message: bytes,
    position: int,
    end: int,
    layout: Layout,
    num_fields: int,
    max_fields: int,
    payloads: list[tuple[int, bool]],
) -> int:
    """Adds each payload to `payloads`: its length, and True if it is an image and nothing else.

    Returns the number of fields added to `num_fields`.
    """
    depth = 0
    while position < end:
        num_fields += 1
        if num_fields > max_fields:
            raise _refusal(f"holds more than {max_fields} fields")
        tag, position = _varint(message, position, end)
        kind = tag & 7
        if kind == _LENGTH:
            length, position = _varint(message, position, end)
            if length > end - position:
                raise DecodeError
            field = None if depth else layout.get(tag >> 3)
            if isinstance(field, Payload):
                payloads.append((length, field.is_image))
            elif field is not None:
                inner_end = position + length
                num_fields = _walk(message, position, inner_end, field, num_fields, max_fields, payloads)
            position += length
        elif kind == _VARINT:
            _, position = _varint(message, position, end)
        elif kind == _FIXED32:
            position += 4
        elif kind == _FIXED64:
            position += 8
        elif kind == _START_GROUP:
            depth += 1
        elif kind == _END_GROUP:
            depth -= 1
        else:
            raise DecodeError
    if position > end or depth:
        raise DecodeError
    return num_fields


def _varint(message: bytes, position: int, end: int) -> tuple[int, int]:
    """Returns a number, and the position after it."""
    if position >= end:
        raise DecodeError
    byte = message[position]
    if byte < 0x80:
        return byte, position + 1
    value, shift = byte & 0x7F, 7
    for index in range(position + 1, min(end, position + _MAX_VARINT_BYTES)):
        byte = message[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    raise DecodeError


def _refusal(description: str) -> InvalidRequest:
    return InvalidRequest((Violation("", description),))
