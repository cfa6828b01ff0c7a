"""Limits on serialized requests, checked before protobuf turns them into objects.

A field that takes two bytes on the wire takes forty in memory, and checking it takes a microsecond: a message as
large as an image could hold millions. So apart from the payload of one image a message is small, and it has few
fields.
Only the outermost fields and those of the image are visited, and no payload is copied.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from kestrel_client.v1 import media_pb2
from kestrel_runtime.api.errors import ImageError, InvalidRequest, Violation

MAX_OTHER_BYTES = 2**20
"""For everything in a message but the payload of its image."""
MAX_FIELDS = 1000
"""For the message and its image together, as they come on the wire: each item of a repeated field counts."""
_UNCHECKED_BYTES = 128 * 1024
"""A message up to here holds too little to take long."""
_IMAGE: Any = media_pb2.Image.DESCRIPTOR
_DATA_FIELD: int = _IMAGE.fields_by_name["data"].number
_RAW_FIELD: int = _IMAGE.fields_by_name["raw"].number
_WITHIN_IMAGE, _WITHIN_RAW = 0, -1
"""In place of the number of the field of the image: the fields are those of an `Image`, or of a `RawImage`."""
_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_MAX_VARINT_BYTES = 10


def check_shape(message: bytes, image_field: int | None, max_image_bytes: int) -> None:
    """Raise `InvalidRequest` for a message that is too large or has too many fields, apart from its image.

    `image_field` is the number of the field that holds a `kestrel.v1.Image`, whose longest field is the payload;
    None where there is no such field, and 0 for a message that has its image as an `Image` has it, in `data`.
    Raises `ImageError` for an image above `max_image_bytes`, and `DecodeError` where the bytes are no protobuf
    message.
    """
    num_bytes = len(message)
    if num_bytes <= _UNCHECKED_BYTES:
        return
    payload_bytes, payload_field, _ = _walk(message, 0, num_bytes, image_field, 0)
    if num_bytes - payload_bytes > MAX_OTHER_BYTES:
        raise _refusal(f"holds more than {MAX_OTHER_BYTES} bytes besides its image")
    if payload_field in (_DATA_FIELD, _RAW_FIELD) and payload_bytes > max_image_bytes:
        raise ImageError(f"must not exceed {max_image_bytes} bytes", too_large=True)


def _walk(
    message: bytes, position: int, end: int, image_field: int | None, num_fields: int
) -> tuple[int, int, int]:
    """The length and the number of the longest field of the image, and how many fields there are with `num_fields`.

    Within the image itself `image_field` is `_WITHIN_IMAGE`, which no field has: then every field with a length is
    a candidate, and of a `RawImage` its longest field.
    """
    payload_bytes = payload_field = depth = 0
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
            if image_field == _WITHIN_IMAGE and tag >> 3 == _RAW_FIELD and not depth:
                field_bytes, _, num_fields = _walk(message, position, position + length, _WITHIN_RAW, num_fields)
                field = _RAW_FIELD
            elif image_field in (_WITHIN_IMAGE, _WITHIN_RAW):
                field, field_bytes = tag >> 3, length
            elif tag >> 3 == image_field and not depth:
                field_bytes, field, num_fields = _walk(
                    message, position, position + length, _WITHIN_IMAGE, num_fields
                )
            else:
                field = field_bytes = 0
            if field_bytes > payload_bytes:
                payload_bytes, payload_field = field_bytes, field
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
    return payload_bytes, payload_field, num_fields


def _varint(message: bytes, position: int, end: int) -> tuple[int, int]:
    """A number, and the position behind it."""
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
