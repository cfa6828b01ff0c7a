"""Implements `ImageService`: stores, describes and drops images in the namespace of the caller."""

# ruff: noqa: N802 (methods bear the names of their RPCs)

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from google.protobuf.duration_pb2 import Duration

from kestrel_client.v1 import image_service_pb2 as wire
from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.message_gate import TooManyCalls
from kestrel_grpc.frontends.grpc.parsing import chunk_of, header_of, seconds_of
from kestrel_grpc.images.image_store import ImageIntake, ImageStore
from kestrel_grpc.images.stored_images import (
    BAD_SHA256,
    Announcement,
    ImageHandle,
    Retention,
    StoredImage,
    Upload,
    is_sha256,
)
from kestrel_runtime.api.engine import Engine
from kestrel_runtime.api.errors import ImageError, InvalidRequest, Violation
from kestrel_runtime.fairness.fair_limit import FairLimit

_MAX_SENT_AT_ONCE = 8
"""The most files that are being sent. Each stays in memory until its caller has read it."""


class ImageService:
    """Stores an upload once it is complete and checked. Nothing of a failed upload is kept."""

    def __init__(self, engine: Engine, store: ImageStore) -> None:
        self._max_image_bytes = engine.info.config.max_image_bytes
        self._intake = ImageIntake(engine, store)
        self._sending = FairLimit(_MAX_SENT_AT_ONCE)

    async def UploadImage(
        self, messages: AsyncIterator[wire.UploadImageRequest], call: CallContext
    ) -> wire.UploadImageResponse:
        self._intake.require_serving()
        announced = upload_header(await anext(messages, None), self._max_image_bytes)
        handle, retention = announced.handle, announced.retention
        image = await self._intake.renewed(announced, call.namespace)
        if image is None:
            upload = Upload(announced)
            async for message in messages:
                upload.add(chunk_of(message))
            image = await self._intake.stored(call.namespace, handle, upload.finish(), retention)
        return wire.UploadImageResponse(image=_rendered(image))

    async def PutImage(self, message: wire.PutImageRequest, call: CallContext) -> wire.PutImageResponse:
        self._intake.require_serving()
        data, announced, retention = put_image(message)
        del message
        image = await self._intake.put(call.namespace, data, announced, retention)
        return wire.PutImageResponse(image=_rendered(image))

    async def GetImage(self, message: wire.GetImageRequest, call: CallContext) -> wire.GetImageResponse:
        image, data = await self._intake.found(call.namespace, ImageHandle.require(message.image_id)), b""
        if message.include_data:
            self._count_sent_file(call.principal)
            data = await self._intake.read(call.namespace, image)
        return wire.GetImageResponse(image=_rendered(image), data=data)

    async def DeleteImage(self, message: wire.DeleteImageRequest, call: CallContext) -> wire.DeleteImageResponse:
        await self._intake.delete(call.namespace, ImageHandle.require(message.image_id))
        return wire.DeleteImageResponse()

    def _count_sent_file(self, principal: str) -> None:
        """Counts a file that is being sent until the call ends. Raises `TooManyCalls`."""
        if not self._sending.take(principal):
            raise TooManyCalls(f"all of the {self._sending.limit} files that may be sent, or this caller's share")
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._sending.give_back(principal))


def upload_header(message: wire.UploadImageRequest | None, max_image_bytes: int) -> Announcement:
    """Reads the first message of an upload. Raises `InvalidRequest`, or `ImageError` for a size above the limit."""
    found = header_of(message)
    violations: list[Violation] = []
    if not is_sha256(found.sha256):
        violations.append(Violation("header.sha256", BAD_SHA256))
    if found.size_bytes < 1:
        violations.append(Violation("header.size_bytes", "must be positive"))
    ttl_s = _ttl_s(found, "header.ttl", violations)
    if violations:
        raise InvalidRequest(tuple(violations))
    if found.size_bytes > max_image_bytes:
        raise ImageError(f"must not exceed {max_image_bytes} bytes", too_large=True)
    return Announcement(ImageHandle(found.sha256), found.size_bytes, Retention(ttl_s, found.pin))


def put_image(message: wire.PutImageRequest) -> tuple[bytes, ImageHandle | None, Retention]:
    """Reads an image in one message, and its handle if the caller gives one. Raises `InvalidRequest`."""
    violations: list[Violation] = []
    data = message.data
    if not data:
        violations.append(Violation("data", "must not be empty"))
    if message.sha256 and not is_sha256(message.sha256):
        violations.append(Violation("sha256", BAD_SHA256))
    ttl_s = _ttl_s(message, "ttl", violations)
    if violations:
        raise InvalidRequest(tuple(violations))
    return data, ImageHandle(message.sha256) if message.sha256 else None, Retention(ttl_s, message.pin)


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


def _rendered(image: StoredImage) -> wire.StoredImage:
    return wire.StoredImage(
        image_id=str(image.handle),
        size_bytes=image.size_bytes,
        media_type=image.info.media_type,
        width_px=image.info.width_px,
        height_px=image.info.height_px,
        expire_time=datetime.fromtimestamp(time.time() + image.remaining_s, UTC),
        pinned=image.is_pinned,
    )
