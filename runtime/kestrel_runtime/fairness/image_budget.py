"""Counts the bytes of decoded images against a limit: reserved for decoding, and held by decoded images.

Safe in any thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock

from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.fairness.fair_limit import FairLimit

MAX_DECODING_BYTES = 512 * 2**20
"""Limit of the memory for decoding one image, in bytes. A PNG of 64 megapixels takes as much, or a WebP of 32, or a
progressive JPEG without subsampling of 53."""


def least_budget_bytes(decoding_bytes: int) -> int:
    """Returns the smallest budget that admits an image of `decoding_bytes` and leaves a quarter free."""
    return -(-decoding_bytes * 4 // 3)


class MemoryBudget:
    """Counts the bytes in use within a `FairLimit`, by tenant.

    An object's bytes count until the object is freed.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._lock = Lock()
        self._limit = FairLimit(limit_bytes)
        # Filled by finalizers. These may run anywhere, also in the middle of a method of this class: no lock there.
        self._freed: SimpleQueue[tuple[str, int]] = SimpleQueue()
        self._on_freed: Callable[[], None] = lambda: None

    @property
    def limit_bytes(self) -> int:
        """Returns the bytes that all tenants together may use."""
        return self._limit.limit

    @property
    def used_bytes(self) -> int:
        """Returns the bytes in use now."""
        with self._lock:
            self._collect()
            return self._limit.num_taken

    def check_image(self, decoding_bytes: int) -> None:
        """Raises `ImageError` where decoding an image takes too much; a quarter stays free for smaller ones."""
        limit_bytes = min(MAX_DECODING_BYTES, self.limit_bytes * 3 // 4)
        if decoding_bytes > limit_bytes:
            limit_mib = limit_bytes // 2**20
            raise ImageError(f"must take at most {limit_mib} MiB while it is decoded", too_large=True)

    def check_images(self, decoding_bytes: int) -> None:
        """Raises `ImageError` where the images of one request take too much together, while they are decoded."""
        limit_bytes = self.limit_bytes * 3 // 4
        if decoding_bytes > limit_bytes:
            limit_mib, found_mib = limit_bytes // 2**20, -(-decoding_bytes // 2**20)
            raise ImageError(
                f"must take at most {limit_mib} MiB together while they are decoded, and take {found_mib} MiB",
                too_large=True,
                field="messages",
            )

    def on_freed(self, callback: Callable[[], None]) -> None:
        """Has `callback` called when a held object is freed, in any thread; it must not block."""
        self._on_freed = callback

    def has_share(self, tenant: str) -> bool:
        """Returns True if the tenant may take more."""
        with self._lock:
            self._collect()
            return self._limit.has_share(tenant)

    def has_room(self, num_bytes: int) -> bool:
        """Returns True if the limit of all tenants together allows `num_bytes` more."""
        with self._lock:
            self._collect()
            return self._limit.has_room(num_bytes)

    def take(self, tenant: str, num_bytes: int) -> None:
        """Counts bytes until `give_back`. The caller checks `has_share` and `has_room` first."""
        with self._lock:
            self._limit.count(tenant, num_bytes)

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """Gives back bytes that `take` has counted."""
        with self._lock:
            self._limit.give_back(tenant, num_bytes)

    def hold(self, tenant: str, item: object, num_bytes: int) -> None:
        """Counts an object's bytes until it is freed."""
        self.take(tenant, num_bytes)
        finalizer = weakref.finalize(item, self._put_freed, tenant, num_bytes)
        finalizer.atexit = False  # pyrefly: ignore[missing-attribute] a property, which its stub lacks

    def _put_freed(self, tenant: str, num_bytes: int) -> None:
        self._freed.put((tenant, num_bytes))
        self._on_freed()

    def _collect(self) -> None:
        while not self._freed.empty():
            self._limit.give_back(*self._freed.get())
