"""Reads inputs from regions of POSIX shared memory, in which callers on this machine put them instead of sending
them.

The server copies from the file of a region and never maps it, so that a caller who shortens the file cannot end the
server with SIGBUS. Only callers on this machine may name regions. The name of a shared memory object must begin
with the prefix of the server. Each caller has regions of its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.errors import ResourceExists, ResourceMissing, Unsupported
from kestrel_runtime.api.errors import InvalidRequest, Violation

KIND = "shared memory region"
FOLDER = Path("/dev/shm")
MAX_REGIONS = 64
"""The most regions of one caller. Each takes a file descriptor."""
MAX_ALL_REGIONS = 512
_MAX_NAME_CHARS = 128
_LENGTH_BYTES = 4
_KEY = re.compile(r"/?([A-Za-z0-9][A-Za-z0-9._-]{0,199})")
_LOCAL_PEERS = (
    "unix:",
    *("ipv4:127.", "ipv6:[::1]", "ipv6:[::ffff:127.", "ipv6:%5B::1%5D", "ipv6:%5B::ffff:127."),
)


@dataclass(frozen=True, slots=True)
class Region:
    """Describes a part of a shared memory object, whose file is open under `descriptor`."""

    name: str
    key: str
    offset: int
    num_bytes: int
    descriptor: int


class SharedMemory:
    """Holds the regions of all callers. Belongs to one event loop. Without a `prefix` there are none.

    A read takes at most `max_image_bytes` and the length before an image. `owners` returns the names of those who
    may call now; None means that callers have no names.
    """

    def __init__(
        self,
        prefix: str | None,
        max_image_bytes: int,
        owners: Callable[[], Collection[str]] | None = None,
        folder: Path = FOLDER,
    ) -> None:
        self._prefix = prefix
        self._max_bytes = max_image_bytes + _LENGTH_BYTES
        self._owners = owners
        self._folder = folder
        self._regions: dict[str, dict[str, Region]] = {}

    @property
    def is_on(self) -> bool:
        """True if callers may register regions."""
        return self._prefix is not None

    def regions(self, call: CallContext, name: str = "") -> Mapping[str, Region]:
        """Returns the regions of a caller: all, or the one named. Raises `ResourceMissing`."""
        self._check(call)
        regions = self._regions.get(call.principal, {})
        if not name:
            return regions
        return {name: self._region(call, name)}

    def register(self, call: CallContext, name: str, key: str, offset: int, num_bytes: int) -> None:
        """Adds a region. Raises `ResourceExists`, and `InvalidRequest` if it cannot be used."""
        self._check(call)
        self._drop_gone()
        regions = self._regions.setdefault(call.principal, {})
        if name in regions:
            raise ResourceExists(KIND, name)
        if not 1 <= len(name) <= _MAX_NAME_CHARS:
            raise _refusal("name", f"must have 1 to {_MAX_NAME_CHARS} characters")
        if len(regions) >= MAX_REGIONS or sum(map(len, self._regions.values())) >= MAX_ALL_REGIONS:
            raise _refusal("name", f"at most {MAX_REGIONS} regions of a caller, {MAX_ALL_REGIONS} of all callers")
        descriptor = self._open(key)
        try:
            size = os.fstat(descriptor).st_size
            if num_bytes < 1 or offset + num_bytes > size:
                raise _refusal(
                    "byte_size", f"the region ends at byte {offset + num_bytes} of a memory of {size} bytes"
                )
        except BaseException:
            os.close(descriptor)
            raise
        regions[name] = Region(name, key, offset, num_bytes, descriptor)

    def unregister(self, call: CallContext, name: str = "") -> None:
        """Drops the caller's region of this name, or all of the caller's regions. An unknown name is no error."""
        self._check(call)
        regions = self._regions.get(call.principal, {})
        for item in (name,) if name else tuple(regions):
            if (region := regions.pop(item, None)) is not None:
                os.close(region.descriptor)
        if not regions:
            self._regions.pop(call.principal, None)

    async def read(self, call: CallContext, name: str, offset: int, num_bytes: int) -> bytes:
        """Returns a copy of a part of the caller's region.

        Raises `ResourceMissing`, and `InvalidRequest`, for example if the file has been shortened.
        """
        self._check(call)
        region = self._region(call, name)
        if offset < 0 or num_bytes < 0 or offset + num_bytes > region.num_bytes:
            raise _refusal("", f"Invalid offset + byte size for shared memory region: '{region.name}'")
        if num_bytes > self._max_bytes:
            raise _refusal("", f"must not exceed {self._max_bytes} bytes")
        # A separate descriptor: while a thread reads, the region may be dropped and its number be reused.
        descriptor = os.dup(region.descriptor)
        try:
            # Shielded, since the thread closes the descriptor.
            data = await asyncio.shield(asyncio.to_thread(_read, descriptor, region.offset + offset, num_bytes))
        except OSError:
            data = b""
        if len(data) != num_bytes:
            raise _refusal("", f"the memory of the shared memory region '{region.name}' is shorter than registered")
        return data

    def close(self) -> None:
        """Drops all regions."""
        for regions in self._regions.values():
            for region in regions.values():
                os.close(region.descriptor)
        self._regions.clear()

    def _check(self, call: CallContext) -> None:
        if self._prefix is None:
            raise Unsupported("shared memory is off; the server turns it on with --triton-shared-memory")
        if not call.peer().startswith(_LOCAL_PEERS):
            raise Unsupported("shared memory is for callers on the machine of the server")

    def _region(self, call: CallContext, name: str) -> Region:
        region = self._regions.get(call.principal, {}).get(name)
        if region is None:
            raise ResourceMissing(KIND, name)
        return region

    def _open(self, key: str) -> int:
        """Opens the file of a shared memory object and returns its descriptor. Raises `InvalidRequest`."""
        assert self._prefix is not None
        parts = _KEY.fullmatch(key)
        if parts is None or not parts[1].startswith(self._prefix.lstrip("/")):
            raise _refusal("key", f"must be the name of a shared memory object that begins with '{self._prefix}'")
        try:
            # Without O_NONBLOCK, opening a pipe would wait.
            descriptor = os.open(
                self._folder / parts[1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError as error:
            raise _refusal("key", f"Unable to open shared memory region: '{parts[1]}'") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _refusal("key", f"Unable to open shared memory region: '{parts[1]}'")
        return descriptor

    def _drop_gone(self) -> None:
        """Drops the regions of callers that may not call any more."""
        if self._owners is None:
            return
        known = self._owners()
        for owner in [owner for owner in self._regions if owner not in known]:
            for region in self._regions.pop(owner).values():
                os.close(region.descriptor)


def _read(descriptor: int, offset: int, num_bytes: int) -> bytes:
    """Returns up to `num_bytes` bytes, fewer if the file ends before. Closes the descriptor."""
    try:
        parts: list[bytes] = []
        while num_bytes > 0:
            part = os.pread(descriptor, num_bytes, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            num_bytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(descriptor)


def _refusal(field: str, description: str) -> InvalidRequest:
    return InvalidRequest((Violation(field, description),))
