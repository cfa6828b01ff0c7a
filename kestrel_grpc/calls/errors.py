"""Maps errors to statuses for every frontend: error class → reason → gRPC code → HTTP status.

`describe` turns any exception into a `CallFailure`, which a frontend writes in its own protocol. No text of an
exception reaches a caller. An exception without a row is a bug of the server: INTERNAL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from kestrel_grpc.access.access import ScopeRequired, TokenInvalid
from kestrel_grpc.access.limits import RateLimited
from kestrel_grpc.access.sources import SourceNotAllowed
from kestrel_grpc.adapter_folder import (
    AdapterDiskFull,
    AdapterExists,
    AdapterFolderUnwritable,
    AdapterTooLarge,
)
from kestrel_grpc.calls.call_context import RequestCancelled, StreamExpired, StreamIdle
from kestrel_grpc.calls.message_gate import MessageTimeout, MessageTooLarge, StreamEvicted, TooManyCalls
from kestrel_grpc.calls.readiness import ServiceUnknown
from kestrel_grpc.images.image_uris import ImageFetchFailed, ImageUriNotAllowed
from kestrel_grpc.images.stored_images import (
    ImageDigestMismatch,
    ImageNotFound,
    ImageQuotaExceeded,
    ImageSizeMismatch,
    ImageStoreFull,
)
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AnswerOutsideSchema,
    ConstraintFailed,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    ImageError,
    InvalidRequest,
    ModelNotFound,
    NumbersOverflowed,
    Overloaded,
    QueueBound,
    QueueTimeout,
    RequestRefused,
    SkillUnsupported,
    Violation,
)

DOMAIN = "kestrel.dev"
# gRPC trailers must stay below the 8 KiB that clients accept, so lists and texts of callers are truncated.
MAX_VIOLATIONS = 20
MAX_ECHO_CHARS = 128
_RETRY_ELSEWHERE_S = 1.0


class MediaTypeUnsupported(Exception):
    """The message is compressed, or is not of the type that the method takes; `expected` says what it must be."""

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected


class Unsupported(Exception):
    """The protocol defines this function, but the server does not have it.

    `description` is a sentence without its full stop.
    """

    def __init__(self, description: str) -> None:
        super().__init__(description)
        self.description = description


class ResourceMissing(Exception):
    """The object that the caller names does not exist; `kind` is the kind of object."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(kind, name)
        self.kind = kind
        self.name = name


class ResourceExists(Exception):
    """The object that the caller creates exists already."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(kind, name)
        self.kind = kind
        self.name = name


class MethodUnknown(Exception):
    """The method does not exist. `allowed` lists the verbs that the path supports; empty if no path matches."""

    def __init__(self, name: str, allowed: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self.name = name
        self.allowed = allowed


class Code(Enum):
    """Lists the gRPC status codes in use, with their numbers."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True)
class BadFields:
    """Lists the faults of the fields of a request; the last item may count faults that are left out."""

    violations: tuple[Violation, ...]


@dataclass(frozen=True, slots=True)
class MissingResource:
    """Names the resource that does not exist."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class UnmetPrecondition:
    """Says why this server cannot serve a request that is well formed."""

    kind: str
    subject: str
    description: str


@dataclass(frozen=True, slots=True)
class QuotaExceeded:
    """Names the limit that a call exceeds."""

    subject: str
    description: str


Detail = BadFields | MissingResource | UnmetPrecondition | QuotaExceeded


@dataclass(frozen=True, slots=True)
class CallFailure:
    """Says why a call failed, independent of the transport. Everything in it may be sent to the caller."""

    code: Code
    http_status: int
    reason: str
    message: str
    facts: Mapping[str, str]
    """Further values for programs, such as the limit that was exceeded."""
    details: tuple[Detail, ...]
    retry_after_s: float | None
    """The delay before another attempt, in seconds; None if a retry does not help."""
    has_pushback: bool
    """True if clients that retry automatically must wait for `retry_after_s`."""


def describe(error: Exception, engine_status: EngineStatus | None = None) -> CallFailure:
    """Turns an exception into a `CallFailure`; `engine_status` selects the reason of an unavailable engine."""
    rows = next((_ROWS_BY_TYPE[kind] for kind in type(error).__mro__ if kind in _ROWS_BY_TYPE), (INTERNAL,))
    row = next(row for row in rows if row.applies(error, engine_status))
    return CallFailure(
        row.code,
        row.http_status,
        row.reason,
        row.message(error),
        row.facts(error),
        tuple(row.details(error)),
        row.retry_after_s(error),
        row.has_pushback,
    )


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Maps one class of errors. Every function takes an error of type `error`."""

    error: type[Exception]
    reason: str
    code: Code
    http_status: int
    message: Callable[[Any], str]
    details: Callable[[Any], Iterable[Detail]] = lambda error: ()
    facts: Callable[[Any], Mapping[str, str]] = lambda error: {}
    retry_after_s: Callable[[Any], float | None] = lambda error: None
    has_pushback: bool = False
    applies: Callable[[Any, EngineStatus | None], bool] = lambda error, engine_status: True
    """Selects among several rows of one type: the first row whose `applies` returns True is used."""


def _shown(error: InvalidRequest) -> tuple[Violation, ...]:
    """Returns the first violations, and an item that counts the violations left out."""
    num_hidden = len(error.violations) - MAX_VIOLATIONS
    if num_hidden <= 0:
        return error.violations
    return (*error.violations[:MAX_VIOLATIONS], Violation("", f"and {num_hidden} more"))


def _violations_text(error: InvalidRequest) -> str:
    texts = (f"{item.field}: {item.description}" if item.field else item.description for item in _shown(error))
    return "; ".join(texts)


def _bad_fields(error: InvalidRequest) -> Iterable[Detail]:
    yield BadFields(_shown(error))


def _overload_text(error: Overloaded) -> str:
    if error.bound is QueueBound.WAIT:
        return f"the wait would be about {error.retry_after_s:.1f} s, longer than this request may wait"
    what = "this caller's share of the queue" if error.is_tenant_share else "the queue"
    return f"{what} is full: {error.limit:.0f} {error.bound.value} may wait in all"


def _overflow_text(error: NumbersOverflowed) -> str:
    of_adapter = f" with the adapter {error.adapter[:MAX_ECHO_CHARS]!r}" if error.adapter else ""
    return f"the numbers of the model{of_adapter} became too large to compute the answer"


_SOURCE_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "Origin": "its option --http-origins names them",
        "Host": "its option --http-hosts names them",
        "Sec-Fetch-Site": "pages of other sites send JSON, not forms and images",
    }
)


def _token_text(error: TokenInvalid) -> str:
    if error.expires_at is not None:
        return f"the token {error.name!r} has expired; it was valid until {error.expires_at:%Y-%m-%d %H:%M} UTC"
    if error.name:
        return f"the token {error.name!r} was revoked"
    return "`authorization: Bearer <token>` must bring a token that this server knows"


def _engine_unavailable(
    reason: str, applies: Callable[[Any, EngineStatus | None], bool] = lambda error, engine_status: True
) -> ErrorRow:
    return ErrorRow(
        EngineUnavailable,
        reason,
        Code.UNAVAILABLE,
        503,
        lambda error: "the engine takes no requests now",
        retry_after_s=lambda error: _RETRY_ELSEWHERE_S,
        applies=applies,
    )


ERRORS = (
    ErrorRow(InvalidRequest, "INVALID_REQUEST", Code.INVALID_ARGUMENT, 400, _violations_text, _bad_fields),
    ErrorRow(
        ImageError,
        "IMAGE_TOO_LARGE",
        Code.INVALID_ARGUMENT,
        413,
        _violations_text,
        _bad_fields,
        applies=lambda error, engine_status: error.too_large,
    ),
    ErrorRow(ImageError, "IMAGE_DECODE_FAILED", Code.INVALID_ARGUMENT, 400, _violations_text, _bad_fields),
    ErrorRow(
        ContextLengthExceeded,
        "CONTEXT_LENGTH_EXCEEDED",
        Code.INVALID_ARGUMENT,
        400,
        _violations_text,
        _bad_fields,
        facts=lambda error: {
            "promptTokenCount": str(error.num_prompt_tokens),
            "maxContextTokenCount": str(error.max_context_tokens),
            **({"messageTokenCounts": ",".join(map(str, error.message_tokens))} if error.message_tokens else {}),
        },
    ),
    ErrorRow(
        ImageUriNotAllowed, "IMAGE_URI_NOT_ALLOWED", Code.INVALID_ARGUMENT, 400, _violations_text, _bad_fields
    ),
    ErrorRow(ImageFetchFailed, "IMAGE_FETCH_FAILED", Code.INVALID_ARGUMENT, 400, _violations_text, _bad_fields),
    ErrorRow(ImageSizeMismatch, "IMAGE_SIZE_MISMATCH", Code.INVALID_ARGUMENT, 400, _violations_text, _bad_fields),
    ErrorRow(
        ImageDigestMismatch, "IMAGE_DIGEST_MISMATCH", Code.INVALID_ARGUMENT, 400, _violations_text, _bad_fields
    ),
    ErrorRow(
        ImageNotFound,
        "IMAGE_NOT_FOUND",
        Code.NOT_FOUND,
        404,
        lambda error: f"no image {error.image_id} is stored for this caller",
        lambda error: (MissingResource("image", error.image_id),),
    ),
    ErrorRow(
        ImageQuotaExceeded,
        "IMAGE_QUOTA_EXCEEDED",
        Code.RESOURCE_EXHAUSTED,
        429,
        lambda error: f"the image and the pinned ones of this caller exceed {error.limit_bytes} bytes",
        lambda error: (QuotaExceeded("images", f"{error.limit_bytes} bytes of this caller"),),
    ),
    ErrorRow(
        ImageStoreFull,
        "IMAGE_STORE_FULL",
        Code.RESOURCE_EXHAUSTED,
        429,
        lambda error: f"the image and the pinned ones of all callers exceed {error.limit_bytes} bytes",
        lambda error: (QuotaExceeded("images", f"{error.limit_bytes} bytes of all callers"),),
        retry_after_s=lambda error: error.retry_after_s,
    ),
    ErrorRow(
        ModelNotFound,
        "MODEL_NOT_FOUND",
        Code.NOT_FOUND,
        404,
        lambda error: f"no model named {error.model[:MAX_ECHO_CHARS]!r} is served{error.hint}",
        lambda error: (MissingResource("model", error.model[:MAX_ECHO_CHARS]),),
    ),
    ErrorRow(
        AdapterNotFound,
        "ADAPTER_NOT_FOUND",
        Code.NOT_FOUND,
        404,
        lambda error: f"no adapter named {error.name[:MAX_ECHO_CHARS]!r}{error.hint}",
        lambda error: (MissingResource("adapter", error.name[:MAX_ECHO_CHARS]),),
    ),
    ErrorRow(
        AdapterInvalid,
        "ADAPTER_INVALID",
        Code.FAILED_PRECONDITION,
        400,
        lambda error: f"the adapter {error.name[:MAX_ECHO_CHARS]!r} cannot be used: {'; '.join(error.problems)}",
        lambda error: [UnmetPrecondition("ADAPTER", error.name[:MAX_ECHO_CHARS], text) for text in error.problems],
    ),
    ErrorRow(AdapterTooLarge, "ADAPTER_TOO_LARGE", Code.INVALID_ARGUMENT, 413, _violations_text, _bad_fields),
    ErrorRow(
        AdapterExists,
        "ADAPTER_EXISTS",
        Code.ALREADY_EXISTS,
        409,
        lambda error: f"the adapter {error.name[:MAX_ECHO_CHARS]!r} {error.reason}",
    ),
    ErrorRow(
        AdapterFolderUnwritable,
        "ADAPTER_FOLDER_UNWRITABLE",
        Code.FAILED_PRECONDITION,
        400,
        lambda error: f"the server cannot change its folder of adapters: {error.reason}",
        lambda error: (UnmetPrecondition("ADAPTER", "folder", error.reason),),
    ),
    ErrorRow(
        AdapterDiskFull,
        "ADAPTER_DISK_FULL",
        Code.RESOURCE_EXHAUSTED,
        429,
        lambda error: "the file system of the folder of adapters has too little free space",
        lambda error: (QuotaExceeded("adapters", "free space of the file system"),),
    ),
    ErrorRow(
        SkillUnsupported,
        "SKILL_UNSUPPORTED",
        Code.FAILED_PRECONDITION,
        400,
        lambda error: f"the model {error.model} has no skill {error.skill!r}",
        lambda error: (UnmetPrecondition("SKILL", error.skill, f"the model {error.model} has no such skill"),),
    ),
    ErrorRow(
        RequestRefused,
        "REQUEST_REFUSED",
        Code.FAILED_PRECONDITION,
        400,
        lambda error: "an equal request broke the engine before, and is not tried again",
        lambda error: (UnmetPrecondition("REQUEST", "request", "an equal request broke the engine before"),),
    ),
    ErrorRow(
        ConstraintFailed,
        "CONSTRAINT_FAILED",
        Code.FAILED_PRECONDITION,
        422,
        lambda error: "the answer cannot go on under its constraint, which takes too much work; use a simpler one",
        lambda error: (UnmetPrecondition("CONSTRAINT", "constraint", "it takes too much work"),),
    ),
    ErrorRow(
        NumbersOverflowed,
        "NUMBERS_OVERFLOWED",
        Code.FAILED_PRECONDITION,
        422,
        _overflow_text,
        lambda error: (
            UnmetPrecondition(
                "ADAPTER" if error.adapter else "MODEL", error.adapter[:MAX_ECHO_CHARS], _overflow_text(error)
            ),
        ),
    ),
    ErrorRow(
        AnswerOutsideSchema,
        "ANSWER_OUTSIDE_SCHEMA",
        Code.FAILED_PRECONDITION,
        422,
        lambda error: f"{str(error)[:MAX_ECHO_CHARS]}; ask again, or bound fewer numbers",
        lambda error: (UnmetPrecondition("CONSTRAINT", "constraint.json_schema", str(error)[:MAX_ECHO_CHARS]),),
    ),
    ErrorRow(
        Overloaded,
        "QUEUE_FULL",
        Code.RESOURCE_EXHAUSTED,
        429,
        _overload_text,
        lambda error: (QuotaExceeded("queue", _overload_text(error)),),
        retry_after_s=lambda error: error.retry_after_s,
    ),
    ErrorRow(
        QueueTimeout,
        "QUEUE_TIMEOUT",
        Code.UNAVAILABLE,
        503,
        lambda error: f"not started within {error.waited_s:.3f} s",
        retry_after_s=lambda error: _RETRY_ELSEWHERE_S,
        has_pushback=True,
    ),
    ErrorRow(
        DeadlineExceeded,
        "DEADLINE_EXCEEDED",
        Code.DEADLINE_EXCEEDED,
        504,
        lambda error: "the deadline passed before the answer was complete",
    ),
    _engine_unavailable("DRAINING", lambda error, engine_status: engine_status is EngineStatus.DRAINING),
    _engine_unavailable("RECOVERING", lambda error, engine_status: engine_status is EngineStatus.RECOVERING),
    _engine_unavailable("ENGINE_UNAVAILABLE"),
    ErrorRow(
        TokenInvalid,
        "TOKEN_INVALID",
        Code.UNAUTHENTICATED,
        401,
        _token_text,
    ),
    ErrorRow(
        ScopeRequired,
        "SCOPE_REQUIRED",
        Code.PERMISSION_DENIED,
        403,
        lambda error: f"the token {error.name!r} needs the scope {' or '.join(error.scopes)}",
        facts=lambda error: {"scopes": ",".join(error.scopes)},
    ),
    ErrorRow(
        RateLimited,
        "RATE_LIMITED",
        Code.RESOURCE_EXHAUSTED,
        429,
        lambda error: f"the token {error.name!r} allows {error.limit}",
        lambda error: (QuotaExceeded(f"token:{error.name}", error.limit),),
        retry_after_s=lambda error: error.retry_after_s,
    ),
    ErrorRow(
        TooManyCalls,
        "TOO_MANY_CALLS",
        Code.RESOURCE_EXHAUSTED,
        429,
        lambda error: f"the server takes no further call now: {error.description}",
        lambda error: (QuotaExceeded("calls", error.description),),
        retry_after_s=lambda error: error.retry_after_s,
    ),
    ErrorRow(
        MessageTimeout,
        "MESSAGE_TIMEOUT",
        Code.DEADLINE_EXCEEDED,
        408,
        lambda error: f"the message of the call was not complete within {error.limit_s:g} s",
    ),
    ErrorRow(
        RequestCancelled,
        "REQUEST_CANCELLED",
        Code.CANCELLED,
        499,
        lambda error: "an operator of the server has cancelled the request",
    ),
    ErrorRow(
        StreamIdle,
        "STREAM_IDLE",
        Code.ABORTED,
        409,
        lambda error: (
            f"no message of the stream was {'taken' if error.is_reader else 'sent'} for {error.limit_s:g} s"
        ),
    ),
    ErrorRow(
        StreamExpired,
        "STREAM_EXPIRED",
        Code.UNAVAILABLE,
        503,
        lambda error: f"the stream has lasted for {error.limit_s:g} s, as long as one may; open a new one",
        retry_after_s=lambda error: 0.0,
    ),
    ErrorRow(
        StreamEvicted,
        "STREAM_EVICTED",
        Code.UNAVAILABLE,
        503,
        lambda error: "the stream waited for its next request, and other streams needed its place; open a new one",
        retry_after_s=lambda error: _RETRY_ELSEWHERE_S,
    ),
    ErrorRow(
        ResourceExists,
        "RESOURCE_EXISTS",
        Code.ALREADY_EXISTS,
        409,
        lambda error: f"{error.kind} {error.name[:MAX_ECHO_CHARS]!r} exists already",
    ),
    ErrorRow(
        ResourceMissing,
        "RESOURCE_MISSING",
        Code.NOT_FOUND,
        404,
        lambda error: f"there is no {error.kind} {error.name[:MAX_ECHO_CHARS]!r}",
        lambda error: (MissingResource(error.kind, error.name[:MAX_ECHO_CHARS]),),
    ),
    ErrorRow(Unsupported, "UNSUPPORTED", Code.UNIMPLEMENTED, 501, lambda error: error.description),
    ErrorRow(
        ServiceUnknown,
        "SERVICE_UNKNOWN",
        Code.NOT_FOUND,
        404,
        lambda error: "no service of this name is served",
    ),
    ErrorRow(
        SourceNotAllowed,
        "SOURCE_NOT_ALLOWED",
        Code.PERMISSION_DENIED,
        403,
        lambda error: (
            f"the {error.header} {error.value[:MAX_ECHO_CHARS]!r} is not one that this server answers; "
            f"{_SOURCE_REMEDIES[error.header]}"
        ),
    ),
    ErrorRow(
        MessageTooLarge,
        "MESSAGE_TOO_LARGE",
        Code.RESOURCE_EXHAUSTED,
        413,
        lambda error: f"the message must not exceed {error.limit_bytes} bytes",
    ),
    ErrorRow(
        MediaTypeUnsupported,
        "MEDIA_TYPE_UNSUPPORTED",
        Code.INVALID_ARGUMENT,
        415,
        lambda error: f"the message must be {error.expected}",
    ),
    ErrorRow(
        MethodUnknown,
        "METHOD_NOT_ALLOWED",
        Code.UNIMPLEMENTED,
        405,
        lambda error: f"{error.name[:MAX_ECHO_CHARS]!r} takes {', '.join(error.allowed)} only",
        facts=lambda error: {"allowed": ", ".join(error.allowed)},
        applies=lambda error, engine_status: bool(error.allowed),
    ),
    ErrorRow(
        MethodUnknown,
        "METHOD_UNKNOWN",
        Code.UNIMPLEMENTED,
        404,
        lambda error: f"there is no {error.name[:MAX_ECHO_CHARS]!r}",
    ),
)
INTERNAL = ErrorRow(Exception, "INTERNAL", Code.INTERNAL, 500, lambda error: "internal error")
"""The row of every exception that has none of its own."""

_ROWS_BY_TYPE: Mapping[type, tuple[ErrorRow, ...]] = MappingProxyType(
    {kind: tuple(row for row in ERRORS if row.error is kind) for kind in {row.error for row in ERRORS}}
)
