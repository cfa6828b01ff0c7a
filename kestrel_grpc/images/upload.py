"""One image on its way into the store, in pieces: counts and hashes them as they come."""

from __future__ import annotations

import asyncio
import hashlib
import io
from dataclasses import dataclass

from kestrel_grpc.images.stored_images import ImageDigestMismatch, ImageHandle, ImageSizeMismatch

MAX_CHUNK_BYTES = 2**20
_HASHED_AT_ONCE_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class Keeping:
    """How long an image is to be kept; `ttl_s` None means the default of the store."""

    ttl_s: float | None = None
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Announcement:
    """The digest and size that a caller announces before it sends an image."""

    handle: ImageHandle
    size_bytes: int
    keeping: Keeping


class Upload:
    """Collects the pieces of an announced image."""

    def __init__(self, announcement: Announcement) -> None:
        self._announcement = announcement
        # Its value shares the buffer, so that no second copy of the image is made.
        self._data = io.BytesIO()
        self._digest = hashlib.sha256()

    def add(self, chunk: bytes) -> None:
        """Take the next piece. Raises `ImageSizeMismatch` where that makes more than was announced."""
        if self._data.tell() + len(chunk) > self._announcement.size_bytes:
            raise ImageSizeMismatch(self._announcement.size_bytes, None)
        self._data.write(chunk)
        self._digest.update(chunk)

    def finish(self) -> bytes:
        """The whole image. Raises `ImageSizeMismatch` or `ImageDigestMismatch`."""
        announced = self._announcement
        if self._data.tell() != announced.size_bytes:
            raise ImageSizeMismatch(announced.size_bytes, self._data.tell())
        actual = ImageHandle(self._digest.hexdigest())
        if actual != announced.handle:
            raise ImageDigestMismatch("header.sha256", actual)
        return self._data.getvalue()


async def handle_of(data: bytes) -> ImageHandle:
    """The handle of an image that came whole; a large one is hashed in a thread beside the event loop."""
    if len(data) <= _HASHED_AT_ONCE_BYTES:
        return ImageHandle(hashlib.sha256(data).hexdigest())
    digest = await asyncio.to_thread(hashlib.sha256, data)
    return ImageHandle(digest.hexdigest())
