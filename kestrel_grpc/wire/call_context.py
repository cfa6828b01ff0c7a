"""One call, independent of its transport: id, principal, deadline, trace, and what metrics report of it."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Priority, Request

REQUEST_ID_KEY = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

# When a deadline passes, the caller cancels the call. Seen from here, that happens earlier than the deadline by the
# time that the call took to arrive, and by what gRPC rounded up when it wrote the deadline.
_TRANSIT_S = 0.02
_ROUNDED_UP = 0.01

Headers = Iterable[tuple[str, str | bytes]]
"""Names in lower case. gRPC calls them metadata."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: the name of its gRPC code, and the reason that the caller was told."""

    code: str
    reason: str

    @property
    def is_ok(self) -> bool:
        return self.code == "OK"


OK = Outcome("OK", "OK")
CANCELLED = Outcome("CANCELLED", "CANCELLED")
DEADLINE_EXCEEDED = Outcome("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")


class RequestSummary:
    """The facts about a request for metrics and traces, without its image, which would take much memory."""

    __slots__ = ("adapter", "image_bytes", "sampling", "skill", "text")

    def __init__(self, request: Request) -> None:
        self.skill = request.skill
        self.adapter = request.options.adapter
        self.sampling = request.sampling
        self.text = request.text
        """The question, the name of the object or the length of the caption."""
        self.image_bytes = None if request.image is None else len(request.image)
        """None where there is no image."""


class CallContext:
    """Made when a call arrives. `deadline_s` counts from then; None where the caller set no deadline.

    `request` and `finished` are set while the call runs, for metrics, traces and logs; None where the call ended
    before. `release` is called once nothing refers to the call's message any more, at the latest when the call
    ends.
    """

    __slots__ = (
        "arrived",
        "deadline_s",
        "finished",
        "headers",
        "max_priority",
        "method",
        "namespace",
        "peer",
        "principal",
        "release",
        "request",
        "request_id",
        "trace_id",
    )

    def __init__(self, headers: Headers, deadline_s: float | None, method: str) -> None:
        self.arrived = time.monotonic()
        self.deadline_s = deadline_s
        self.headers = headers
        self.method = method
        """As `kestrel.v1.VisionService/Query`."""
        self.peer: Callable[[], str] = _unknown
        """Gives the address of the connection, ending with `:port`."""
        self.request_id = _request_id(headers)
        self.request: RequestSummary | None = None
        self.finished: Finished | None = None
        self.principal = ""
        """The name on the caller's token; empty where none was needed, or none was valid."""
        self.namespace = ""
        """What the caller stores, and what is computed for it, is known in this namespace and in no other."""
        self.max_priority = Priority.NORMAL
        """The highest priority that its requests have compared with those of other callers."""
        self.trace_id = ""
        """The trace that the call belongs to, once it is known."""
        self.release: Callable[[], None] = _nothing
        """Gives back the place of the call's message."""

    @property
    def duration_s(self) -> float:
        """How long the call has taken so far."""
        return time.monotonic() - self.arrived

    @property
    def remaining_s(self) -> float | None:
        """How long it may still take; None where the caller set no deadline."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - self.duration_s)

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed on the caller's clock, as far as can be told from here."""
        if self.deadline_s is None:
            return False
        return self.duration_s >= self.deadline_s * (1.0 - _ROUNDED_UP) - _TRANSIT_S


def _nothing() -> None:
    """The message has no place yet."""


def _unknown() -> str:
    return ""


def _request_id(headers: Headers) -> str:
    """The id that the caller sent if it is fit for a log, else a new one."""
    for key, value in headers:
        if key == REQUEST_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return secrets.token_hex(16)
