"""Shares stored images between all front ends.

The supervisor has the index, with quotas and times to live; the bytes are files in its private folder. A front end
asks the supervisor at each use of a handle, so that a handle ends on all front ends at the same moment, and then
reads the file itself, unless it has read it a short time ago. It writes a new file under a temporary name, and the
supervisor renames the file when it takes the image into the index.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kestrel_grpc.images.image_index import Forget, ImageIndex, StoreLimits
from kestrel_grpc.images.image_store import CachePurges
from kestrel_grpc.images.stored_images import (
    ImageHandle,
    ImageNotFound,
    ImageStoreFull,
    Retention,
    StoredImage,
)
from kestrel_grpc.multiprocess.protocol import messages
from kestrel_grpc.multiprocess.protocol.errors import SupervisorUnavailable
from kestrel_grpc.multiprocess.protocol.link import Link
from kestrel_runtime.api.engine import CacheLoad, Engine, ImageInfo
from kestrel_runtime.api.images import HashedImage

_IN_PLACE_BYTES = 2**18
"""A larger file is read in a thread, so that other calls do not wait for it."""
_STORED, _INCOMING = "images", "incoming"
_MAX_SPARE_BYTES = 16 * 2**20
MAX_RECENT_BYTES = 64 * 2**20
"""The most bytes of files that a front end has read last, and keeps while they are stored."""

_log = logging.getLogger(__name__)

_Key = tuple[str, ImageHandle]
"""The namespace and the handle of an image."""


def forget_expired_images(link: Link, engine: Engine) -> None:
    """Have an engine core remove from its caches what was computed from images that have expired."""
    purges = CachePurges(engine)
    link.on(messages.ImageExpired, lambda note: purges.forget_image(note.namespace, note.sha256))


class SharedImages:
    """The `ImageStore` of a front end. Every method raises `SupervisorUnavailable` without an answer in time.

    `folder` is the supervisor's private folder, and `identity` that of the front end. Belongs to the event loop of
    the link.
    """

    def __init__(self, link: Link, folder: Path, identity: str) -> None:
        self._link = link
        self._folder = folder
        self._identity = identity
        self._numbers = itertools.count(1)
        self._recent = _RecentFiles(self._read)
        link.on(messages.DropFile, lambda note: self._recent.drop((note.namespace, note.handle)))

    async def require_room(self, namespace: str, num_bytes: int) -> None:
        """Raises `ImageQuotaExceeded` or `ImageStoreFull` if a file of this size would not be stored."""
        await self._link.ask(messages.RequireRoom(namespace, num_bytes))

    async def renew(self, namespace: str, handle: ImageHandle, retention: Retention) -> StoredImage | None:
        """Keep a stored image for longer; returns None if it is not stored."""
        return await self._link.ask(messages.RenewImage(namespace, handle, retention))

    async def put(
        self, namespace: str, handle: ImageHandle, data: bytes, info: ImageInfo, retention: Retention
    ) -> StoredImage:
        """Store an image whose digest has been checked, or renew it."""
        known = await self.renew(namespace, handle, retention)
        if known is not None:
            return known
        await self.require_room(namespace, len(data))
        name = f"{self._identity}-{next(self._numbers)}"
        async with self._written(name, data):
            try:
                return await self._link.ask(messages.PutImage(namespace, handle, len(data), info, retention, name))
            except ImageNotFound:
                raise SupervisorUnavailable("the file was removed before it was stored") from None

    async def find(self, namespace: str, handle: ImageHandle) -> StoredImage:
        """Returns an image, which counts as used now."""
        return await self._link.ask(messages.FindImage(namespace, handle))

    async def read(self, namespace: str, image: StoredImage) -> HashedImage:
        """Returns the file of an image that has just been found."""
        return await self._recent.get((namespace, image.handle), image.size_bytes)

    async def delete(self, namespace: str, handle: ImageHandle) -> None:
        """Drop an image."""
        await self._link.ask(messages.DeleteImage(namespace, handle))

    def drop_namespace(self, namespace: str) -> None:
        """Drop all images of a namespace."""
        self._link.notify(messages.DropNamespace(namespace))

    async def _read(self, key: _Key, size_bytes: int) -> HashedImage:
        namespace, handle = key
        path = self._folder / _STORED / _file_name(namespace, handle)
        is_large = size_bytes > _IN_PLACE_BYTES
        try:
            data = await asyncio.to_thread(path.read_bytes) if is_large else path.read_bytes()
        except FileNotFoundError:
            raise ImageNotFound(handle) from None
        return HashedImage(data, bytes.fromhex(handle.sha256))

    @asynccontextmanager
    async def _written(self, name: str, data: bytes) -> AsyncIterator[None]:
        """Writes a new file, and removes it after the block if the supervisor has not taken it.

        Raises `SupervisorUnavailable`.
        """
        path = self._folder / _INCOMING / name
        writing = asyncio.ensure_future(asyncio.to_thread(_write, path, data))

        def remove(_: object = None) -> None:
            with contextlib.suppress(OSError):  # the supervisor has taken it, or the folder cannot be written
                path.unlink()
            if not writing.cancelled() and (error := writing.exception()) is not None:
                _log.error("cannot write a stored image: %s", error)

        try:
            try:
                await asyncio.shield(writing)
            except OSError:
                raise SupervisorUnavailable("the folder of stored images cannot be written") from None
            yield
        finally:
            # A thread cannot be cancelled, so its file may come later.
            remove() if writing.done() else writing.add_done_callback(remove)


class _RecentFiles:
    """A cache of the files that were read last. All requests about one image share its bytes."""

    def __init__(self, read: Callable[[_Key, int], Coroutine[Any, Any, HashedImage]]) -> None:
        self._read = read
        self._files: OrderedDict[_Key, HashedImage] = OrderedDict()  # the one used last at the end
        self._num_bytes = 0
        self._reading: dict[_Key, asyncio.Task[HashedImage]] = {}

    async def get(self, key: _Key, size_bytes: int) -> HashedImage:
        """Returns a file that is stored. Raises what `read` raises."""
        file = self._files.get(key)
        if file is not None:
            self._files.move_to_end(key)
            return file
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = asyncio.ensure_future(self._read(key, size_bytes))
            reading.add_done_callback(lambda done: self._keep(key, done))
        return await asyncio.shield(reading)  # others may wait for the same file

    def drop(self, key: _Key) -> None:
        """Forget a file that is no longer stored."""
        self._reading.pop(key, None)
        file = self._files.pop(key, None)
        if file is not None:
            self._num_bytes -= len(file)

    def _keep(self, key: _Key, done: asyncio.Task[HashedImage]) -> None:
        if self._reading.get(key) is not done:  # it has left while it was read
            return
        del self._reading[key]
        if done.cancelled() or done.exception() is not None or len(done.result()) > MAX_RECENT_BYTES:
            return
        file = self._files[key] = done.result()
        self._num_bytes += len(file)
        while self._num_bytes > MAX_RECENT_BYTES:
            self._num_bytes -= len(self._files.popitem(last=False)[1])


class ImageOwner:
    """The index and the files of all stored images, in the supervisor. Belongs to one event loop.

    `folder` exists and only this user can read it. `forget` has every engine core forget an expired image.
    """

    def __init__(self, folder: Path, limits: StoreLimits, forget: Forget) -> None:
        self._folder = folder
        for name in (_STORED, _INCOMING):
            (folder / name).mkdir(mode=0o700)
        free = _free_bytes(folder)
        self._spare_bytes = min(_MAX_SPARE_BYTES, free // 8)
        """The bytes of the file system that are left free."""
        room = free - self._spare_bytes
        if room < limits.max_bytes:
            _log.warning(
                "stored images take at most %d MiB instead of %d: there is no more space in %s",
                *(room // 2**20, limits.max_bytes // 2**20, folder.parent),
            )
            limits = replace(limits, max_bytes=room, quota_bytes=min(limits.quota_bytes, room))
        self._index = ImageIndex(limits, forget, self._discard)
        self._links: dict[str, Link] = {}
        """The links to front ends, by identity."""

    def load(self) -> CacheLoad:
        """Returns the number and size of stored images, in any thread."""
        return self._index.load()

    async def watch(self) -> None:
        """Drop images that expire, until cancelled."""
        await self._index.watch()

    def join(self, identity: str, link: Link) -> None:
        """Answer a new front end."""
        index = self._index
        self._links[identity] = link
        link.on(messages.RequireRoom, lambda asked: self._require_room(asked.namespace, asked.num_bytes))
        link.on(messages.RenewImage, self._renew)
        link.on(messages.PutImage, self._put)
        link.on(messages.FindImage, self._find)
        link.on(messages.DeleteImage, lambda asked: index.delete(asked.namespace, asked.handle))
        link.on(messages.DropNamespace, lambda note: index.drop_namespace(note.namespace))

    def drop(self, identity: str) -> None:
        """Forget a front end that has ended, and remove the files that it was writing."""
        self._links.pop(identity, None)
        for path in (self._folder / _INCOMING).glob(f"{identity}-*"):
            with contextlib.suppress(OSError):
                path.unlink()

    def _require_room(self, namespace: str, num_bytes: int) -> None:
        """Raises as the index does, also if the file system has no space even after evictions."""
        self._index.require_room(namespace, num_bytes)
        while _free_bytes(self._folder) < num_bytes + self._spare_bytes // 2:
            if not self._index.evict():
                raise ImageStoreFull(self._index.limits.max_bytes)

    def _renew(self, asked: messages.RenewImage | messages.PutImage) -> StoredImage | None:
        self._drop_removed(asked.namespace, asked.handle)
        return self._index.renew(asked.namespace, asked.handle, asked.retention)

    def _find(self, asked: messages.FindImage) -> StoredImage:
        self._drop_removed(asked.namespace, asked.handle)
        return self._index.get(asked.namespace, asked.handle)

    def _drop_removed(self, namespace: str, handle: ImageHandle) -> None:
        """Drop an image if another program has removed its file, so that callers store it again."""
        if self._index.holds(namespace, handle) and not self._path(namespace, handle).exists():
            _log.warning("the file of a stored image was removed from %s", self._folder)
            self._index.delete(namespace, handle)

    def _put(self, asked: messages.PutImage) -> StoredImage:
        known = self._renew(asked)
        if known is not None:  # another call has stored it meanwhile
            return known
        self._index.require_room(asked.namespace, asked.size_bytes)
        written, stored = self._folder / _INCOMING / asked.name, self._path(asked.namespace, asked.handle)
        try:
            stored.parent.mkdir(mode=0o700, exist_ok=True)  # a cleaner may have removed it
            os.replace(written, stored)
        except FileNotFoundError:  # the front end has given up, and reads no answer; or something has removed it
            raise ImageNotFound(asked.handle) from None
        return self._index.add(asked.namespace, asked.handle, asked.size_bytes, asked.info, asked.retention)

    def _discard(self, namespace: str, handle: ImageHandle) -> None:
        with contextlib.suppress(OSError):
            self._path(namespace, handle).unlink()
        for link in self._links.values():
            link.notify(messages.DropFile(namespace, handle))

    def _path(self, namespace: str, handle: ImageHandle) -> Path:
        return self._folder / _STORED / _file_name(namespace, handle)


def _write(path: Path, data: bytes) -> None:
    """Write a new file. Raises `OSError`."""
    path.parent.mkdir(mode=0o700, exist_ok=True)  # a cleaner may have removed it
    path.write_bytes(data)


def _free_bytes(folder: Path) -> int:
    """Returns the bytes for new files; 0 if the file system can hold no more files."""
    space = os.statvfs(folder)
    has_names = space.f_files == 0 or space.f_favail > 0
    return space.f_bavail * space.f_frsize if has_names else 0


def _file_name(namespace: str, handle: ImageHandle) -> str:
    """Returns the name of an image's file. Namespaces share no files, so none can notice what another stores."""
    return f"{hashlib.sha256(namespace.encode()).hexdigest()}-{handle.sha256}"
