"""Converts the messages of `ImageService` to Python types."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from kestrel_client.v1 import image_service_pb2 as wire
from kestrel_grpc.frontends.grpc.durations import seconds_of
from kestrel_grpc.images.stored_images import ImageHandle, is_sha256
from kestrel_grpc.images.upload import MAX_CHUNK_BYTES, Announcement, Keeping
from kestrel_runtime.api.errors import ImageError, InvalidRequest, Violation

_NOT_SHA256 = "must be 64 lower-case hexadecimal digits"


def header(message: wire.UploadImageRequest | None, max_image_bytes: int) -> Announcement:
    """The first message of an upload. Raises `InvalidRequest`, for a size above the limit as `ImageError`."""
    if message is None or message.WhichOneof("part") != "header":
        raise InvalidRequest((Violation("header", "must come first"),))
    found = message.header
    violations: list[Violation] = []
    if not is_sha256(found.sha256):
        violations.append(Violation("header.sha256", _NOT_SHA256))
    if found.size_bytes < 1:
        violations.append(Violation("header.size_bytes", "must be positive"))
    ttl_s = _ttl_s(found, "header.ttl", violations)
    if violations:
        raise InvalidRequest(tuple(violations))
    if found.size_bytes > max_image_bytes:
        raise ImageError(f"must not exceed {max_image_bytes} bytes", too_large=True)
    return Announcement(ImageHandle(found.sha256), found.size_bytes, Keeping(ttl_s, found.pin))


def chunk(message: wire.UploadImageRequest) -> bytes:
    """A later message of an upload. Raises `InvalidRequest`."""
    if message.WhichOneof("part") != "chunk":
        raise InvalidRequest((Violation("chunk", "must follow the header"),))
    found = message.chunk
    if not 0 < len(found) <= MAX_CHUNK_BYTES:
        raise InvalidRequest((Violation("chunk", f"must be 1 to {MAX_CHUNK_BYTES} bytes long"),))
    return found


def put_image(message: wire.PutImageRequest) -> tuple[bytes, ImageHandle | None, Keeping]:
    """An image in one message, and its handle where the caller says it. Raises `InvalidRequest`."""
    violations: list[Violation] = []
    data = message.data
    if not data:
        violations.append(Violation("data", "must not be empty"))
    if message.sha256 and not is_sha256(message.sha256):
        violations.append(Violation("sha256", _NOT_SHA256))
    ttl_s = _ttl_s(message, "ttl", violations)
    if violations:
        raise InvalidRequest(tuple(violations))
    return data, ImageHandle(message.sha256) if message.sha256 else None, Keeping(ttl_s, message.pin)


def _ttl_s(
    message: wire.UploadHeader | wire.PutImageRequest, field: str, violations: list[Violation]
) -> float | None:
    if not message.HasField("ttl"):
        return None
    ttl: Duration = message.ttl
    ttl_s = seconds_of(ttl)
    if ttl_s is None:
        violations.append(Violation(field, "is not a well-formed duration"))
    elif ttl_s <= 0.0:
        violations.append(Violation(field, "must be positive"))
    return ttl_s
