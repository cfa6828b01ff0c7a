"""Describes one call, independent of its transport: id, principal, deadline, trace, facts for metrics,
interruption."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from kestrel_runtime.api.deadlines import deadline_error
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Priority, Request

REQUEST_ID_KEY = "x-request-id"
_ROUTE_KEY = "x-kestrel-route"
_MAX_ROUTE_CHARS = 256
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

# When a deadline passes, the caller cancels the call. The server sees that before the deadline, by the time in
# which the call arrived and by the amount that gRPC added when it rounded the deadline up.
_TRANSIT_S = 0.02
_ROUNDED_UP = 0.01

Headers = Iterable[tuple[str, str | bytes]]
"""The headers of a call, with names in lower case. gRPC calls them metadata."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Describes how a call ended: the name of its gRPC code, and the reason that was sent to the caller."""

    code: str
    reason: str

    @property
    def is_ok(self) -> bool:
        return self.code == "OK"


OK = Outcome("OK", "OK")
AUDITED_METHODS = frozenset(
    f"kestrel.v1.EngineService/{name}"
    for name in ("ClearCache", "CancelRequests", "LoadAdapter", "UnloadAdapter", "UploadAdapter", "DeleteAdapter")
)
"""The methods by which operators change what a server does. Each such call leaves a line of its own in the log."""
CANCELLED = Outcome("CANCELLED", "CANCELLED")
DEADLINE_EXCEEDED = Outcome("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")


class RequestCancelled(Exception):
    """An operator has cancelled the call."""


class StreamIdle(Exception):
    """The caller has taken no message of a stream for `limit_s` seconds, or with `is_reader` False sent none."""

    def __init__(self, limit_s: float, *, is_reader: bool = True) -> None:
        super().__init__(limit_s)
        self.limit_s = limit_s
        self.is_reader = is_reader


class StreamExpired(Exception):
    """The stream has lasted for `limit_s` seconds, as long as one may."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        self.limit_s = limit_s


class Interruptible(AbstractContextManager[None]):
    """Lets others on the event loop end a block of the current task with an error, as `asyncio.timeout` does."""

    __slots__ = ("_error", "_num_cancels", "_task")

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._num_cancels = self._task.cancelling()

    def interrupt(self, error: Exception) -> bool:
        """Ends the block with this error. Returns False if the block is not running, or was interrupted before."""
        if self._task is None or self._error is not None:
            return False
        self._error = error
        self._task.cancel()
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if self._error is None:
            return
        assert task is not None
        # If the caller cancelled the call at the same moment, its cancellation ends the block.
        is_ours = task.uncancel() <= self._num_cancels
        if is_ours and isinstance(error, asyncio.CancelledError):
            raise self._error from None


class RequestSummary:
    """Holds the facts about a request for metrics and traces, without its image, which would take much memory."""

    __slots__ = ("adapter", "image_bytes", "sampling", "skill", "text")

    def __init__(self, request: Request) -> None:
        self.skill = request.skill
        self.adapter = request.options.adapter
        self.sampling = request.sampling
        self.text = request.text
        """The question, the name of the object or the length of the caption."""
        self.image_bytes = sum(map(len, request.images)) if request.images else None
        """The size of all encoded images; None if the request has none."""

    def model(self, served: str) -> str:
        """Returns the name of the model that answers: `served`, or with an adapter `served/adapter`."""
        return f"{served}/{self.adapter}" if self.adapter else served


class CallContext:
    """Holds the state of a call from its arrival on.

    `request` and `finished` are set while the call runs, for metrics, traces and logs; they stay None if the call
    ends earlier. `release` is called once nothing refers to the message of the call, at the latest at its end.
    """

    __slots__ = (
        "arrived",
        "audited",
        "count_further",
        "deadline",
        "default_route",
        "finished",
        "headers",
        "interruptible",
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

    def __init__(self, headers: Headers, deadline: float | None, method: str) -> None:
        self.arrived = time.monotonic()
        self.deadline = deadline
        """The moment of the monotonic clock after which the caller no longer waits; None without one."""
        self.headers = headers
        self.method = method
        """The name of the method, such as `kestrel.v1.VisionService/Query`."""
        self.peer: Callable[[], str] = _unknown
        """Returns the address of the connection, ending with `:port`."""
        self.request_id = _request_id(headers)
        self.audited: Mapping[str, str | int] | None = None
        """The changes that an operator's call has made, for the log; None for other calls."""
        self.request: RequestSummary | None = None
        self.finished: Finished | None = None
        self.principal = ""
        """The name of the caller's token; empty if none was needed, or none was valid."""
        self.namespace = ""
        """The only namespace in which the caller's stored images and cached results are found."""
        self.max_priority = Priority.NORMAL
        """The highest priority of its requests when they compete with those of other callers."""
        self.trace_id = ""
        """The trace that the call belongs to, once it is known."""
        self.interruptible = Interruptible()
        """The part of the call from its admission to its end."""
        self.count_further: Callable[[int], Awaitable[None]] = _count_nothing
        """Counts so many further requests of the call towards the limits of its token."""
        self.default_route = ""
        """The `route` of a call whose caller does not say it."""
        self.release: Callable[[], None] = _nothing
        """Releases the memory of the call's message."""

    @property
    def route(self) -> str:
        """Returns what the caller's calls for one server have in common, cut to a bounded length; "" if there is
        nothing."""
        found = (value for key, value in self.headers if key == _ROUTE_KEY and isinstance(value, str))
        return next(found, self.default_route)[:_MAX_ROUTE_CHARS]

    @property
    def duration_s(self) -> float:
        """Returns the seconds that the call has taken so far."""
        return time.monotonic() - self.arrived

    @property
    def is_late(self) -> bool:
        """Returns True if its deadline has passed on the caller's clock, as far as this process can know."""
        if self.deadline is None:
            return False
        early_s = (self.deadline - self.arrived) * _ROUNDED_UP + _TRANSIT_S
        return deadline_error(self.deadline - early_s) is not None


def _nothing() -> None:
    """Releases nothing: the message has no memory yet."""


async def _count_nothing(count: int) -> None:
    """Counts nothing: the call is not admitted yet."""


def _unknown() -> str:
    return ""


def _request_id(headers: Headers) -> str:
    """Returns the id that the caller sent if it is fit for a log, else a new one."""
    for key, value in headers:
        if key == REQUEST_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return secrets.token_hex(16)
