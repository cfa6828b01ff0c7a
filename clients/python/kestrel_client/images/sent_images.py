"""Decides how a call sends its image: in its message, or stored on the server and named.

A client remembers the digests of the images that it has sent. An image that it sends a second time is stored on the
server first, and from then on named. Where the server does not have it any more it is stored again.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

import grpc

from kestrel_client.errors import ImageNotFound, KestrelClientError, PermissionDenied
from kestrel_client.v1 import image_service_pb2, media_pb2

DEFAULT_STORE_FROM_BYTES = 2**20
"""Below this, sending an image again takes hardly longer than hashing and naming it, see `bench/NOTES.md`."""
_MAX_REMEMBERED = 4096

_IN_MESSAGE, _STORE_FIRST, _BY_NAME = "in message", "store first", "by name"


class SentImages:
    """The images that a client has sent. May be used by several threads.

    Images of at least `store_from_bytes` are stored when they are sent again; None means never.
    """

    def __init__(self, store_from_bytes: int | None) -> None:
        self._store_from_bytes = store_from_bytes
        self._is_stored: OrderedDict[str, bool] = OrderedDict()  # those used last at the end
        self._lock = threading.Lock()

    def delivery(self, data: bytes) -> Delivery:
        """How a call sends an image, which counts as sent from now on."""
        if self._store_from_bytes is None or len(data) < self._store_from_bytes:
            return Delivery(self, data, "", [_IN_MESSAGE])
        image_id = f"sha256:{hashlib.sha256(data).hexdigest()}"
        with self._lock:
            is_stored = self._is_stored.get(image_id)
            self._is_stored[image_id] = bool(is_stored)
            self._is_stored.move_to_end(image_id)
            if len(self._is_stored) > _MAX_REMEMBERED:
                self._is_stored.popitem(last=False)
        ways = [_IN_MESSAGE]
        if is_stored is not None:
            ways.insert(0, _STORE_FIRST)
        if is_stored:
            ways.insert(0, _BY_NAME)
        return Delivery(self, data, image_id, ways)

    def note_stored(self, image_id: str) -> None:
        """The server has the image now."""
        with self._lock:
            self._is_stored[image_id] = True

    def give_up(self) -> None:
        """The server stores no images for this client: send all of them in messages."""
        self._store_from_bytes = None


class Delivery:
    """How one call sends its image. Begins with the best way and falls back to the next where that fails."""

    def __init__(self, sent: SentImages, data: bytes, image_id: str, ways: list[str]) -> None:
        self._sent = sent
        self._data = data
        self._image_id = image_id
        self._ways = ways

    @property
    def must_store(self) -> bool:
        """Whether the image is to be stored before the call."""
        return self._ways[0] is _STORE_FIRST

    def put_request(self) -> image_service_pb2.PutImageRequest:
        """The request that stores the image."""
        return image_service_pb2.PutImageRequest(data=self._data)

    def note_stored(self) -> None:
        """The image is stored."""
        self._sent.note_stored(self._image_id)

    def note_not_stored(self, error: KestrelClientError) -> None:
        """The image could not be stored."""
        self._ways.pop(0)
        if isinstance(error, PermissionDenied) or error.code is grpc.StatusCode.UNIMPLEMENTED:
            self._sent.give_up()

    def fill(self, message: media_pb2.Image) -> None:
        """Put the image or its name into a message."""
        if self._ways[0] is _IN_MESSAGE:
            message.data = self._data
        else:
            message.image_id = self._image_id

    def can_retry(self, error: KestrelClientError) -> bool:
        """Whether to try again after a failed call, since the server did not have the image."""
        if not isinstance(error, ImageNotFound) or len(self._ways) == 1:
            return False
        self._ways.pop(0)
        return True
