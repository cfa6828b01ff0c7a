"""Which requests broke the engine, so that none does it twice. Knows fingerprints, not requests' text."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import fields
from threading import Lock

from kestrel_runtime.requests import Request

_CAPACITY = 256


class Culprits:
    """Fingerprints of requests that failed alone; the oldest of too many are forgotten. For any thread."""

    def __init__(self) -> None:
        self._fingerprints: OrderedDict[str, None] = OrderedDict()
        self._lock = Lock()

    def __contains__(self, fingerprint: str) -> bool:
        return fingerprint in self._fingerprints

    def remember(self, fingerprint: str) -> None:
        """Refuse this one from now on."""
        with self._lock:
            self._fingerprints[fingerprint] = None
            self._fingerprints.move_to_end(fingerprint)
            if len(self._fingerprints) > _CAPACITY:
                self._fingerprints.popitem(last=False)


def fingerprint_of(request: Request) -> str:
    """Equal for requests that ask the engine for the same work, whatever they say about their handling."""
    digest = hashlib.sha256(request.skill.encode())
    for item in fields(request):
        if item.name == "options":
            continue
        value = getattr(request, item.name)
        # Lengths keep the border between two values from moving.
        data = value if isinstance(value, bytes) else repr(value).encode()
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return f"{request.skill}-{digest.hexdigest()[:32]}"
