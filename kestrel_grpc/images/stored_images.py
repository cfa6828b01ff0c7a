"""Defines the values of stored images: references, stored images, uploads in pieces, and their errors."""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import time
from dataclasses import dataclass

from kestrel_runtime.api.engine import ImageInfo
from kestrel_runtime.api.errors import InvalidRequest, Violation

MAX_CHUNK_BYTES = 2**20
_HASHED_AT_ONCE_BYTES = 2**18
_PREFIX = "sha256:"
BAD_SHA256 = "must be 64 lower-case hexadecimal digits"
BAD_IMAGE_ID = "must be `sha256:` and 64 lower-case hexadecimal digits"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ImageUri:
    """Names an image that the server fetches for a request."""

    uri: str


@dataclass(frozen=True, slots=True)
class ImageHandle:
    """Names an image that is stored in the caller's namespace; `sha256` is the digest of its file in
    hexadecimal."""

    sha256: str

    def __str__(self) -> str:
        return f"{_PREFIX}{self.sha256}"

    @classmethod
    def parse(cls, image_id: str) -> ImageHandle | None:
        """Returns the handle that an `image_id` names; None if the id is not well formed."""
        sha256 = image_id.removeprefix(_PREFIX)
        return cls(sha256) if sha256 != image_id and is_sha256(sha256) else None

    @classmethod
    def require(cls, image_id: str) -> ImageHandle:
        """Returns the handle that an `image_id` names. Raises `InvalidRequest` if the id is not well formed."""
        handle = cls.parse(image_id)
        if handle is None:
            raise InvalidRequest((Violation("image_id", BAD_IMAGE_ID),))
        return handle


ImageReference = ImageUri | ImageHandle
"""The name that a request may have in place of the bytes of its image."""


def is_sha256(text: str) -> bool:
    """Returns True if the text is a digest as in handles: 64 lower-case hexadecimal digits."""
    return _SHA256.fullmatch(text) is not None


@dataclass(slots=True, eq=False)
class StoredImage:
    """Describes an image in the store. `size_bytes` is that of the file; times are of `time.monotonic`, in
    seconds."""

    handle: ImageHandle
    size_bytes: int
    info: ImageInfo
    stored_at: float
    expires_at: float
    is_pinned: bool

    @property
    def remaining_s(self) -> float:
        """The remaining time to live, in seconds."""
        return self.expires_at - time.monotonic()


class ImageNotFound(Exception):
    """The namespace of the caller holds no image of this name."""

    def __init__(self, handle: ImageHandle) -> None:
        super().__init__(str(handle))
        self.image_id = str(handle)


class ImageQuotaExceeded(Exception):
    """The image does not fit next to the pinned images of its namespace into the quota of
    `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.limit_bytes = limit_bytes


class ImageStoreFull(Exception):
    """The image does not fit next to the pinned images of all namespaces into the store of
    `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.limit_bytes = limit_bytes
        self.retry_after_s = 10.0
        """An estimate: pinned images leave when they expire."""


class ImageSizeMismatch(InvalidRequest):
    """The size of the received image differs from the announced size.

    `num_bytes` is None if the image is larger and was not counted to its end.
    """

    def __init__(self, announced_bytes: int, num_bytes: int | None) -> None:
        received = "more" if num_bytes is None else str(num_bytes)
        super().__init__(
            (Violation("header.size_bytes", f"is {announced_bytes}, but {received} bytes were received"),)
        )


class ImageDigestMismatch(InvalidRequest):
    """The digest of the received image differs from the digest that the caller announced."""

    def __init__(self, field: str, actual: ImageHandle) -> None:
        super().__init__((Violation(field, f"the received bytes have the digest {actual.sha256}"),))


@dataclass(frozen=True, slots=True)
class Retention:
    """Says how long an image must be kept, in seconds; `ttl_s` None means the default of the store."""

    ttl_s: float | None = None
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Announcement:
    """Holds the digest and size that a caller announces before it sends an image."""

    handle: ImageHandle
    size_bytes: int
    retention: Retention


class Upload:
    """Collects the pieces of an announced image."""

    def __init__(self, announcement: Announcement) -> None:
        self._announcement = announcement
        # Its value shares the buffer, so that no second copy of the image is made.
        self._data = io.BytesIO()
        self._digest = hashlib.sha256()

    def add(self, chunk: bytes) -> None:
        """Adds the next piece. Raises `ImageSizeMismatch` if the image exceeds its announced size."""
        if self._data.tell() + len(chunk) > self._announcement.size_bytes:
            raise ImageSizeMismatch(self._announcement.size_bytes, None)
        self._data.write(chunk)
        self._digest.update(chunk)

    def finish(self) -> bytes:
        """Returns the whole image. Raises `ImageSizeMismatch` or `ImageDigestMismatch`."""
        announced = self._announcement
        if self._data.tell() != announced.size_bytes:
            raise ImageSizeMismatch(announced.size_bytes, self._data.tell())
        actual = ImageHandle(self._digest.hexdigest())
        if actual != announced.handle:
            raise ImageDigestMismatch("header.sha256", actual)
        return self._data.getvalue()


async def handle_of(data: bytes) -> ImageHandle:
    """Returns the handle of an image that was received whole. A large one is hashed in a thread."""
    if len(data) <= _HASHED_AT_ONCE_BYTES:
        return ImageHandle(hashlib.sha256(data).hexdigest())
    digest = await asyncio.to_thread(hashlib.sha256, data)
    return ImageHandle(digest.hexdigest())
