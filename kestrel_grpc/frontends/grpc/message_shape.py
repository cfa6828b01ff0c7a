"""Limits serialized requests, before protobuf turns them into objects.

A field of two bytes on the wire takes forty in memory, and a microsecond to check: a message as large as an image
could hold millions of them. So a message must be small apart from one image, and must have few fields. The check
visits only the outermost fields and those around an image, and copies no payload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from kestrel_runtime.api.errors import ImageError, InvalidRequest, Violation

MAX_OTHER_BYTES = 2**20
"""The most bytes of a message apart from the payload of its image."""
MAX_FIELDS = 1000
"""The most fields of a message and its image together, as serialized: each item of a repeated field counts."""
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


def layout_of(descriptor: Any) -> Layout:
    """Returns the layout of the messages of a type, which must not contain itself."""
    found: dict[int, Payload | Layout] = {}
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_BYTES:
            found[field.number] = Payload(is_image=not field.is_repeated)
        elif field.full_name == _IMAGE_URI:
            found[field.number] = Payload(is_image=False)
        elif field.type == FieldDescriptor.TYPE_MESSAGE and (inner := layout_of(field.message_type)):
            found[field.number] = inner
    return MappingProxyType(found)


def check_shape(message: bytes, layout: Layout, max_image_bytes: int) -> None:
    """Raises `InvalidRequest` for a message that is too large or has too many fields, apart from its image.

    Raises `ImageError` for an image above `max_image_bytes`, and `DecodeError` if the bytes are no protobuf
    message. The image is the longest of the fields that may hold one.
    """
    num_bytes = len(message)
    if num_bytes <= _UNCHECKED_BYTES:
        return
    payload_bytes, is_image, _ = _walk(message, 0, num_bytes, layout, 0)
    if num_bytes - payload_bytes > MAX_OTHER_BYTES:
        raise _refusal(f"holds more than {MAX_OTHER_BYTES} bytes apart from its image")
    if is_image and payload_bytes > max_image_bytes:
        raise ImageError(f"must not exceed {max_image_bytes} bytes", too_large=True)


def _walk(message: bytes, position: int, end: int, layout: Layout, num_fields: int) -> tuple[int, bool, int]:
    """Returns the length of the longest payload, True if that is an image and nothing else, and the number of
    fields added to `num_fields`."""
    payload_bytes = depth = 0
    is_image = False
    while position < end:
        num_fields += 1
        if num_fields > MAX_FIELDS:
            raise _refusal(f"holds more than {MAX_FIELDS} fields")
        tag, position = _varint(message, position, end)
        kind = tag & 7
        if kind == _LENGTH:
            length, position = _varint(message, position, end)
            if length > end - position:
                raise DecodeError
            field = None if depth else layout.get(tag >> 3)
            if isinstance(field, Payload):
                found_bytes, found_is_image = length, field.is_image
            elif field is None:
                found_bytes, found_is_image = 0, False
            else:
                found_bytes, found_is_image, num_fields = _walk(
                    message, position, position + length, field, num_fields
                )
            if found_bytes > payload_bytes:
                payload_bytes, is_image = found_bytes, found_is_image
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
    return payload_bytes, is_image, num_fields


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
