"""One call: who it is, how long it may take, what it asked and was answered, and how it ended. Knows no socket."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Caption, Query, Request

REQUEST_ID_KEY = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

# A deadline passes on the caller's clock first, and all that comes of it here is that the caller hangs up: earlier
# than the deadline known here by the call's time on its way, and by what gRPC rounded up when it wrote it.
_ON_THE_WAY_S = 0.02
_ROUNDED_UP = 0.01


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: the name of its status, and the reason that the caller was told."""

    code: str
    reason: str

    @property
    def is_ok(self) -> bool:
        return self.code == "OK"


OK = Outcome("OK", "OK")


class Asked:
    """What a request asks for, for whoever counts and traces; without the image, which would be held for long."""

    __slots__ = ("image_bytes", "sampling", "skill", "text")

    def __init__(self, request: Request) -> None:
        self.skill = request.skill
        self.sampling = request.sampling
        if isinstance(request, Query):
            self.text = request.question
        else:
            self.text = request.length if isinstance(request, Caption) else request.object
        """The question, the name of the object or the length of the caption."""
        self.image_bytes = None if request.image is None else len(request.image)
        """None where there is no image."""


class Call:
    """Made when a call arrives. `deadline_s` counts from then; None where the caller set no deadline.

    The servicer notes `asked` and `finished` for whoever counts and traces: None where it did not get so far. It
    calls `release` once it holds nothing of the call's message any more; the end of the call does so too.
    """

    __slots__ = (
        "arrived",
        "asked",
        "deadline_s",
        "finished",
        "metadata",
        "method",
        "release",
        "request_id",
        "tenant",
        "trace_id",
    )

    def __init__(self, metadata: Iterable[tuple[str, str | bytes]], deadline_s: float | None, method: str) -> None:
        self.arrived = time.monotonic()
        self.deadline_s = deadline_s
        self.metadata = metadata
        self.method = method
        """As `kestrel.v1.VisionService/Query`."""
        self.request_id = _request_id(metadata)
        self.asked: Asked | None = None
        self.finished: Finished | None = None
        self.tenant = ""
        """The name on the caller's token; empty where none was needed, or none was good."""
        self.trace_id = ""
        """The trace that the call belongs to, once it is known."""
        self.release: Callable[[], None] = _nothing
        """Gives back the room that the call's message takes up."""

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
        return self.duration_s >= self.deadline_s * (1.0 - _ROUNDED_UP) - _ON_THE_WAY_S

    @property
    def duration_ms(self) -> float:
        """How long the call has taken so far."""
        return self.duration_s * 1000.0


def _nothing() -> None:
    """There is no room to give back."""


def _request_id(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The caller's name for the call if it is fit for a log, else a new one."""
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return secrets.token_hex(16)
