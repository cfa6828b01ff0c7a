"""One call, as a servicer sees it: who it is and how long it may take. Knows no socket."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable

REQUEST_ID_KEY = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Call:
    """Made when a call arrives. `deadline_s` counts from then; None where the caller set no deadline."""

    __slots__ = ("arrived", "deadline_s", "request_id")

    def __init__(self, metadata: Iterable[tuple[str, str | bytes]], deadline_s: float | None) -> None:
        self.arrived = time.monotonic()
        self.deadline_s = deadline_s
        self.request_id = _request_id(metadata)

    @property
    def duration_ms(self) -> float:
        """How long the call has taken so far."""
        return (time.monotonic() - self.arrived) * 1000.0


def _request_id(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The caller's name for the call if it is fit for a log, else a new one."""
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return secrets.token_hex(16)
