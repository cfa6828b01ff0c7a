"""Isolates and quarantines poison requests, which broke the engine, by their fingerprints."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from kestrel_runtime.api.images import image_digest
from kestrel_runtime.api.requests import REQUEST_TYPES, Request, fields_without_images

LIFETIME_S = 3600.0
_VALUES: Mapping[str, Callable[[Request], tuple[Any, ...]]] = MappingProxyType(
    {
        kind.skill: attrgetter(*(name for name in fields_without_images(kind) if name != "options"))
        for kind in REQUEST_TYPES
    }
)
"""The values of a request's fields that define its work, in addition to its images."""
_encoder = msgspec.msgpack.Encoder()
_CAPACITY = 256


class _Entry(NamedTuple):
    expires: float
    survives_restart: bool


class PoisonRequests:
    """The quarantine of poison requests, and the requests that run alone to find them. For any thread.

    A quarantined fingerprint is refused for `LIFETIME_S`. The quarantine expires, since the request may not have
    been the cause, and the device or the software may have changed. If there are too many, the oldest are forgotten
    earlier. `clock` returns monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the one quarantined last at the end
        self._on_completed_alone: Callable[[str], None] = lambda fingerprint: None
        self._isolated: OrderedDict[str, None] = OrderedDict()  # the one isolated last at the end
        self._lock = Lock()

    def __contains__(self, fingerprint: str) -> bool:
        """Returns True while the fingerprint is quarantined."""
        if not self._entries:  # most often
            return False
        with self._lock:
            entry = self._entries.get(fingerprint)
            return entry is not None and self._clock() < entry.expires

    @property
    def are_any(self) -> bool:
        """True while any fingerprint is kept here."""
        return bool(self._entries or self._isolated)

    def quarantine(self, fingerprint: str, *, survives_restart: bool = False) -> None:
        """Refuse requests of this fingerprint from now on.

        `survives_restart`: a restart of the engine does not clear it.
        """
        with self._lock:
            now = self._clock()
            while self._entries and next(iter(self._entries.values())).expires <= now:
                self._entries.popitem(last=False)
            self._entries[fingerprint] = _Entry(now + LIFETIME_S, survives_restart)
            self._entries.move_to_end(fingerprint)
            if len(self._entries) > _CAPACITY:
                self._entries.popitem(last=False)

    def isolate(self, fingerprints: Iterable[str]) -> None:
        """Have each of these requests run alone once: the process ended during a step that they were in."""
        with self._lock:
            for fingerprint in fingerprints:
                self._isolated[fingerprint] = None
            while len(self._isolated) > _CAPACITY:
                self._isolated.popitem(last=False)

    def is_isolated(self, fingerprint: str) -> bool:
        """Returns True if the request must run alone."""
        return fingerprint in self._isolated

    def completed(self, fingerprint: str) -> None:
        """End the isolation of a request that completed."""
        if fingerprint in self._isolated:
            with self._lock:
                self._isolated.pop(fingerprint, None)
            self._on_completed_alone(fingerprint)

    def on_completed_alone(self, callback: Callable[[str], None]) -> None:
        """Call `callback`, in the engine thread, with the fingerprint of each isolated request that completed."""
        self._on_completed_alone = callback

    def forget_learned_before_restart(self) -> None:
        """Clear the quarantine after a restart of the engine, except for entries that survive it."""
        with self._lock:
            for fingerprint in [name for name, entry in self._entries.items() if not entry.survives_restart]:
                del self._entries[fingerprint]


def fingerprint_of(request: Request, digests: tuple[bytes, ...] | None = None) -> str:
    """Returns a fingerprint that is equal for requests for the same work, whatever they say about their handling.

    `digests`: the `image_digest` of each of the request's images, if they are already known.
    """
    if digests is None:
        digests = tuple(map(image_digest, request.images))
    values = (digests, *_VALUES[request.skill](request))
    try:
        data = _encoder.encode(values)
    except UnicodeEncodeError:  # half of a surrogate pair, which MessagePack does not have
        data = repr(values).encode()
    return f"{request.skill}-{hashlib.sha256(data).hexdigest()[:32]}"
