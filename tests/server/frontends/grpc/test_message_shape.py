"""What a message may look like before it is parsed."""

import contextlib
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kestrel_client.v1 import image_service_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.frontends.grpc import message_shape
from kestrel_grpc.frontends.grpc.message_shape import MAX_FIELDS, MAX_OTHER_BYTES, Shape, check_shape, shape_of
from kestrel_runtime.api.errors import ImageError, InvalidRequest

MIB = 2**20
EMPTY_REF = b"\x22\x00"
SHAPE = shape_of(wire.PointRequest.DESCRIPTOR)
STORED = shape_of(image_service_pb2.PutImageRequest.DESCRIPTOR)
WITHOUT_IMAGE = shape_of(image_service_pb2.GetImageRequest.DESCRIPTOR)
MAX_IMAGE_BYTES = 8 * MIB


def point(**fields: Any) -> bytes:
    given: dict[str, Any] = {"object": "bird", "image": {"data": b"x" * MIB}, **fields}
    return wire.PointRequest(**given).SerializeToString()


def refusal(message: bytes, shape: Shape = SHAPE) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_shape(message, shape, MAX_IMAGE_BYTES)
    (violation,) = caught.value.violations
    return violation.description


@pytest.mark.parametrize("source", ["data", "uri"])
def test_an_image_may_be_of_any_length(source: str):
    payload = b"x" * (4 * MIB) if source == "data" else "x" * (4 * MIB)
    check_shape(point(image={source: payload}), SHAPE, MAX_IMAGE_BYTES)


def test_an_image_above_the_limit_is_refused_before_it_is_copied():
    image = wire.PointRequest(image={"data": b"x" * (MAX_IMAGE_BYTES + 1)}).SerializeToString()
    with pytest.raises(ImageError) as caught:
        check_shape(image, SHAPE, MAX_IMAGE_BYTES)
    assert caught.value.too_large


def test_pixels_may_be_of_any_length_up_to_the_limit_and_nothing_beside_them():
    raw = {"pixels": b"x" * (4 * MIB), "width_px": 1, "height_px": 1}
    check_shape(point(image={"raw": raw}), SHAPE, MAX_IMAGE_BYTES)
    with pytest.raises(ImageError):
        check_shape(point(image={"raw": {"pixels": b"x" * (MAX_IMAGE_BYTES + 1)}}), SHAPE, MAX_IMAGE_BYTES)
    image = wire.PointRequest(image={"raw": raw}).image
    unknown = image.raw.SerializeToString() + b"\x9a\x06" + varint(MIB + 1) + b"x" * (MIB + 1)
    nested = b"\x22" + varint(len(unknown)) + unknown
    assert "apart from its image" in refusal(b"\x12" + varint(len(nested)) + nested)
    many = image.raw.SerializeToString() + b"\x10\x01" * MAX_FIELDS
    nested = b"\x22" + varint(len(many)) + many
    assert "fields" in refusal(b"\x12" + varint(len(nested)) + nested)


def test_a_message_that_is_stored_has_its_image_outside():
    check_shape(
        image_service_pb2.PutImageRequest(data=b"x" * (4 * MIB)).SerializeToString(), STORED, MAX_IMAGE_BYTES
    )
    large = image_service_pb2.PutImageRequest(data=b"x" * (MAX_IMAGE_BYTES + 1)).SerializeToString()
    with pytest.raises(ImageError):
        check_shape(large, STORED, MAX_IMAGE_BYTES)
    crowded = image_service_pb2.PutImageRequest(data=b"x" * MIB, sha256="0" * (MIB - 10)).SerializeToString()
    assert "apart from its image" in refusal(crowded + crowded, STORED)


def test_all_but_the_image_is_small():
    check_shape(point(object="b" * (MAX_OTHER_BYTES - 100)), SHAPE, MAX_IMAGE_BYTES)
    assert "apart from its image" in refusal(point(object="b" * (MAX_OTHER_BYTES + 1)))
    assert "apart from its image" in refusal(point(options={"model": "m" * (MAX_OTHER_BYTES + 1)}))


def test_only_the_field_of_the_image_holds_one():
    assert "apart from its image" in refusal(point(image={"data": b"x" * (4 * MIB)}), WITHOUT_IMAGE)


def test_unknown_fields_count():
    unknown = b"\xfa\x3f" + b"\x80\x80\x80\x01" + b"x" * (2 * MIB)  # field 1023
    assert "apart from its image" in refusal(point() + unknown)
    image = wire.PointRequest.FromString(point()).image.SerializeToString() + unknown
    assert "apart from its image" in refusal(b"\x12" + varint(len(image)) + image)


def test_a_second_payload_counts():
    assert "apart from its image" in refusal(point() + point())


@pytest.mark.parametrize("count", [10**5, 5 * 10**5, 4 * 10**6])
def test_many_empty_fields_are_refused_without_visiting_them(count: int):
    message = point() + EMPTY_REF * count
    assert refusal(message) == f"holds more than {MAX_FIELDS} fields"
    assert refusal(b"\x12" + varint(2 * count) + b"\x0a\x00" * count) == f"holds more than {MAX_FIELDS} fields"


def test_a_message_of_the_largest_count_passes():
    message = point() + EMPTY_REF * (MAX_FIELDS - 3)
    check_shape(message, SHAPE, MAX_IMAGE_BYTES)
    refusal(message + EMPTY_REF)


def test_groups_are_passed_over():
    group = b"\xfb\x3f" + b"\x12\x03abc" + b"\x08\x01" + b"\xfc\x3f"  # field 1023, with an image's number inside
    check_shape(point() + group, SHAPE, MAX_IMAGE_BYTES)
    with pytest.raises(DecodeError):
        check_shape(point() + group[:-2], SHAPE, MAX_IMAGE_BYTES)


@pytest.mark.parametrize("end", [b"\x22\x05ab", b"\x0d\x00", b"\x09\x00", b"\x08", b"\x08" + b"\xff" * 11, b"\x0f"])
def test_what_is_cut_off_or_has_no_meaning_is_no_message(end: bytes):
    with pytest.raises(DecodeError):
        check_shape(point() + end, SHAPE, MAX_IMAGE_BYTES)


fields = st.one_of(
    st.binary(max_size=40),
    st.sampled_from((EMPTY_REF, b"\x12\x04\x0a\x02ab", b"\x08\x01", b"\xfb\x3f", b"\xfc\x3f", b"\x0d1234")),
)


@given(st.lists(fields, max_size=8).map(b"".join))
def test_what_passes_and_what_protobuf_reads_agree(end: bytes):
    message = point(image={"data": b"x" * (MIB // 4)}) + end
    try:
        check_shape(message, SHAPE, MAX_IMAGE_BYTES)
    except DecodeError:
        with pytest.raises(DecodeError):
            wire.PointRequest.FromString(message)
    except InvalidRequest:
        pass


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


def test_short_messages_are_not_looked_at():
    with contextlib.suppress(InvalidRequest):
        check_shape(b"\xff" * message_shape._UNCHECKED_BYTES, SHAPE, MAX_IMAGE_BYTES)
