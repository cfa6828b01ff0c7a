"""Fingerprints of requests that broke the engine, so that they are refused the next time."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from operator import attrgetter
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from kestrel_runtime.api.images import image_digest
from kestrel_runtime.api.requests import REQUEST_TYPES, Request

LIFETIME_S = 3600.0
_VALUES: Mapping[str, Callable[[Request], tuple[Any, ...]]] = MappingProxyType(
    {
        kind.skill: attrgetter(*(item.name for item in fields(kind) if item.name not in ("image", "options")))
        for kind in REQUEST_TYPES
    }
)
"""The values of a request's fields that say what work it is, in addition to its image."""
_encoder = msgspec.msgpack.Encoder()
_CAPACITY = 256


class _Entry(NamedTuple):
    expires: float
    survives_restart: bool


class OffendingRequests:
    """Fingerprints of offending requests, each refused for `LIFETIME_S` after it was learned. For any thread.

    They expire, since the request may not have been the cause, and the device or the software may have changed. The
    oldest of too many are forgotten earlier. `clock` returns monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the one learned last at the end
        self._on_cleared: Callable[[str], None] = lambda fingerprint: None
        self._suspects: OrderedDict[str, None] = OrderedDict()  # the one learned last at the end
        self._lock = Lock()

    def __contains__(self, fingerprint: str) -> bool:
        with self._lock:
            entry = self._entries.get(fingerprint)
            return entry is not None and self._clock() < entry.expires

    def remember(self, fingerprint: str, *, survives_restart: bool = False) -> None:
        """Refuse this one from now on. `survives_restart` says that a restart raises no doubt about it."""
        with self._lock:
            now = self._clock()
            while self._entries and next(iter(self._entries.values())).expires <= now:
                self._entries.popitem(last=False)
            self._entries[fingerprint] = _Entry(now + LIFETIME_S, survives_restart)
            self._entries.move_to_end(fingerprint)
            if len(self._entries) > _CAPACITY:
                self._entries.popitem(last=False)

    def suspect(self, fingerprints: Iterable[str]) -> None:
        """Requests that were in a step during which the process ended: each runs alone once."""
        with self._lock:
            for fingerprint in fingerprints:
                self._suspects[fingerprint] = None
            while len(self._suspects) > _CAPACITY:
                self._suspects.popitem(last=False)

    def is_suspect(self, fingerprint: str) -> bool:
        """Returns True if the request is to run alone."""
        return fingerprint in self._suspects

    def clear(self, fingerprint: str) -> None:
        """The request ran to its end."""
        if fingerprint in self._suspects:
            with self._lock:
                self._suspects.pop(fingerprint, None)
            self._on_cleared(fingerprint)

    def on_cleared(self, callback: Callable[[str], None]) -> None:
        """Have `callback` run, in the engine thread, with each suspect that ran to its end."""
        self._on_cleared = callback

    def forget_learned_before_restart(self) -> None:
        """The engine has restarted: forget all but those that survive it."""
        with self._lock:
            for fingerprint in [name for name, entry in self._entries.items() if not entry.survives_restart]:
                del self._entries[fingerprint]


def fingerprint_of(request: Request, digest_of_image: bytes | None = None) -> str:
    """Equal for requests that ask the engine for the same work, whatever they say about their handling.

    `digest_of_image`: the `image_digest` of the request's image, where it is known already.
    """
    if digest_of_image is None and request.image is not None:
        digest_of_image = image_digest(request.image)
    values = (digest_of_image, *_VALUES[request.skill](request))
    try:
        data = _encoder.encode(values)
    except UnicodeEncodeError:  # half of a surrogate pair, which MessagePack does not have
        data = repr(values).encode()
    return f"{request.skill}-{hashlib.sha256(data).hexdigest()[:32]}"
