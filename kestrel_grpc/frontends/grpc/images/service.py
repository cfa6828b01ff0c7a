"""`ImageService`: stores, describes and drops images in the namespace of the caller."""

# ruff: noqa: N802 (methods bear the names of their RPCs)

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from kestrel_client.v1 import image_service_pb2 as wire
from kestrel_grpc.frontends.grpc.images import parsing
from kestrel_grpc.images.image_store import ImageStore
from kestrel_grpc.images.intake import ImageIntake
from kestrel_grpc.images.stored_images import ImageHandle, StoredImage
from kestrel_grpc.images.upload import Upload
from kestrel_grpc.wire.call_context import CallContext
from kestrel_grpc.wire.message_gate import TooManyCalls
from kestrel_grpc.wire.shares import Shares
from kestrel_runtime.api.engine import Engine

_MAX_SENT_AT_ONCE = 8
"""Files that are on their way to callers: each is held until its caller has read it."""


class ImageService:
    """Each upload is stored when all of it has come and has been checked; until then nothing of it is kept."""

    def __init__(self, engine: Engine, store: ImageStore) -> None:
        self._store = store
        self._max_image_bytes = engine.info.config.max_image_bytes
        self._intake = ImageIntake(engine, store)
        self._sending = Shares(_MAX_SENT_AT_ONCE)

    async def UploadImage(
        self, messages: AsyncIterator[wire.UploadImageRequest], call: CallContext
    ) -> wire.UploadImageResponse:
        self._intake.require_serving()
        announced = parsing.header(await anext(messages, None), self._max_image_bytes)
        handle, keeping = announced.handle, announced.keeping
        image = self._intake.renewed(call.namespace, handle, keeping)
        if image is None:
            self._store.require_room(call.namespace, announced.size_bytes)
            upload = Upload(announced)
            async for message in messages:
                upload.add(parsing.chunk(message))
            image = self._intake.stored(call.namespace, handle, upload.finish(), keeping)
        return wire.UploadImageResponse(image=self._rendered(image))

    async def PutImage(self, message: wire.PutImageRequest, call: CallContext) -> wire.PutImageResponse:
        self._intake.require_serving()
        data, announced, keeping = parsing.put_image(message)
        del message
        image = await self._intake.put(call.namespace, data, announced, keeping)
        return wire.PutImageResponse(image=self._rendered(image))

    async def GetImage(self, message: wire.GetImageRequest, call: CallContext) -> wire.GetImageResponse:
        image = self._intake.found(call.namespace, ImageHandle.require(message.image_id))
        if message.include_data:
            self._hold_place(call.principal)
        return wire.GetImageResponse(image=self._rendered(image), data=image.data if message.include_data else b"")

    async def DeleteImage(self, message: wire.DeleteImageRequest, call: CallContext) -> wire.DeleteImageResponse:
        await self._intake.delete(call.namespace, ImageHandle.require(message.image_id))
        return wire.DeleteImageResponse()

    def _hold_place(self, principal: str) -> None:
        """Count a file that is sent, until the call is over. Raises `TooManyCalls`."""
        if not self._sending.take(principal):
            raise TooManyCalls(f"all of the {self._sending.limit} files that may be sent, or this caller's share")
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._sending.give_back(principal))

    def _rendered(self, image: StoredImage) -> wire.StoredImage:
        remaining_s = self._intake.remaining_s(image)
        return wire.StoredImage(
            image_id=str(image.handle),
            size_bytes=image.size_bytes,
            media_type=image.info.media_type,
            width_px=image.info.width_px,
            height_px=image.info.height_px,
            expire_time=datetime.fromtimestamp(time.time() + remaining_s, UTC),
            pinned=image.is_pinned,
        )
