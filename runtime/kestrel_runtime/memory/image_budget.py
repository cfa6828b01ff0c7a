"""Counts bytes of decoded images against a limit: those set aside for decoding, and those of images that exist.

Safe in any thread.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock


class MemoryBudget:
    """Bytes in use, by who they are used for.

    Rules
      M1  Bytes are taken only while the total stays within the limit. An object's bytes are counted until it is
          freed, wherever it goes.
      M2  A named owner may take more only while it holds less than what is free: alone it gets half, two get a
          third each. So another owner always gets a share. The owner "" stands for callers that are not
          distinguished.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = Lock()
        self._total = 0
        self._held: Counter[str] = Counter()
        # Filled by finalizers. These may run anywhere, also in the middle of a method of this class: no lock there.
        self._freed: SimpleQueue[tuple[str, int]] = SimpleQueue()
        self._on_freed: Callable[[], None] = lambda: None

    @property
    def used_bytes(self) -> int:
        """The bytes in use now."""
        with self._lock:
            self._collect()
            return self._total

    def on_freed(self, callback: Callable[[], None]) -> None:
        """Have `callback` run when an object that was held is freed. It runs anywhere, and must not block."""
        self._on_freed = callback

    def has_share(self, owner: str) -> bool:
        """Whether M2 lets the owner take more."""
        with self._lock:
            self._collect()
            return not owner or self._held[owner] < self.limit_bytes - self._total

    def has_room(self, num_bytes: int) -> bool:
        """Whether the limit of all tenants together allows `num_bytes` more."""
        with self._lock:
            self._collect()
            return self._total + num_bytes <= self.limit_bytes

    def take(self, owner: str, num_bytes: int) -> None:
        """Count bytes until they are given back. Whether they may be taken is for the caller to ask."""
        with self._lock:
            self._count(owner, num_bytes)

    def give_back(self, owner: str, num_bytes: int) -> None:
        """Bytes that were taken are not in use any more."""
        with self._lock:
            self._count(owner, -num_bytes)

    def hold(self, owner: str, item: object, num_bytes: int) -> None:
        """Count an object's bytes until it is freed."""
        self.take(owner, num_bytes)
        weakref.finalize(item, self._put_freed, owner, num_bytes).atexit = False

    def _put_freed(self, owner: str, num_bytes: int) -> None:
        self._freed.put((owner, num_bytes))
        self._on_freed()

    def _collect(self) -> None:
        while not self._freed.empty():
            owner, num_bytes = self._freed.get()
            self._count(owner, -num_bytes)

    def _count(self, owner: str, num_bytes: int) -> None:
        self._total += num_bytes
        self._held[owner] += num_bytes
        if not self._held[owner]:
            del self._held[owner]
