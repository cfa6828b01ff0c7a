"""What can go wrong, and the one table from error to gRPC status. No text of an exception reaches a caller.

    kestrel_runtime.api.errors            status                reason                   details beside ErrorInfo
    KestrelError
    ├── InvalidRequest                INVALID_ARGUMENT      INVALID_REQUEST          BadRequest
    │   ├── ImageError                INVALID_ARGUMENT      IMAGE_DECODE_FAILED      BadRequest
    │   │      … too large            INVALID_ARGUMENT      IMAGE_TOO_LARGE          BadRequest
    │   ├── ContextLengthExceeded     INVALID_ARGUMENT      CONTEXT_LENGTH_EXCEEDED  BadRequest
    │   ├── ImageUriNotAllowed        INVALID_ARGUMENT      IMAGE_URI_NOT_ALLOWED    BadRequest
    │   └── ImageFetchFailed          INVALID_ARGUMENT      IMAGE_FETCH_FAILED       BadRequest
    ├── ModelNotFound                 NOT_FOUND             MODEL_NOT_FOUND          ResourceInfo
    ├── SkillUnsupported              FAILED_PRECONDITION   SKILL_UNSUPPORTED        PreconditionFailure
    ├── RequestRefused                FAILED_PRECONDITION   REQUEST_REFUSED          PreconditionFailure
    ├── Overloaded                    RESOURCE_EXHAUSTED    QUEUE_FULL               RetryInfo, QuotaFailure
    ├── QueueTimeout                  UNAVAILABLE           QUEUE_TIMEOUT            RetryInfo, and pushback
    ├── DeadlineExceeded              DEADLINE_EXCEEDED     DEADLINE_EXCEEDED        –
    └── EngineUnavailable             UNAVAILABLE           ENGINE_UNAVAILABLE       RetryInfo
           … while draining           UNAVAILABLE           DRAINING                 RetryInfo
           … while it restarts        UNAVAILABLE           RECOVERING               RetryInfo
    kestrel_grpc.access.access
    AccessRefused
    ├── TokenInvalid                  UNAUTHENTICATED       TOKEN_INVALID            –
    ├── ScopeRequired                 PERMISSION_DENIED     SCOPE_REQUIRED           –
    └── RateLimited                   RESOURCE_EXHAUSTED    RATE_LIMITED             RetryInfo, QuotaFailure
    kestrel_grpc.frontends.grpc.reader_watch
    StreamIdle                        ABORTED               STREAM_IDLE              –
    kestrel_grpc.frontends.grpc.receiving
    MessageTimeout                    DEADLINE_EXCEEDED     MESSAGE_TIMEOUT          –
    TooManyCalls                      RESOURCE_EXHAUSTED    TOO_MANY_CALLS           RetryInfo, QuotaFailure
    kestrel_grpc.frontends.grpc.health
    ServiceUnknown                    NOT_FOUND             SERVICE_UNKNOWN          –

    anything else: our bug            INTERNAL              INTERNAL                 –

Every status carries an ErrorInfo of domain `kestrel.dev` whose metadata names the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from kestrel_grpc.access.access import RateLimited, ScopeRequired, TokenInvalid
from kestrel_grpc.frontends.grpc.health import ServiceUnknown
from kestrel_grpc.frontends.grpc.reader_watch import StreamIdle
from kestrel_grpc.frontends.grpc.receiving import MessageTimeout, TooManyCalls
from kestrel_grpc.images.image_uris import ImageFetchFailed, ImageUriNotAllowed
from kestrel_grpc.wire.call_context import REQUEST_ID_KEY
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    ImageError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    QueueBound,
    QueueTimeout,
    RequestRefused,
    SkillUnsupported,
    Violation,
)

DOMAIN = "kestrel.dev"
# Trailers must stay below the 8 KiB that peers accept, so what a caller or a list can make long is cut.
MAX_VIOLATIONS = 20
MAX_ECHO_CHARS = 128
_RETRY_ELSEWHERE_S = 1.0
_DETAILS_KEY = "grpc-status-details-bin"
# Why an engine is unavailable that will be there again, here or elsewhere.
_PASSING_STATES = MappingProxyType({EngineStatus.DRAINING: "DRAINING", EngineStatus.RECOVERING: "RECOVERING"})


@dataclass(frozen=True, slots=True)
class CallStatus:
    """How a call ends. `reason` is for the log; everything else goes to the caller."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]
    reason: str


def to_status(error: Exception, request_id: str, engine_status: EngineStatus | None = None) -> CallStatus:
    """The status for any exception; `engine_status` tells why an engine is unavailable."""
    row = next((_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE), _BUG)
    reason = row.reason if isinstance(row.reason, str) else row.reason(error)
    if engine_status is not None and isinstance(error, EngineUnavailable):
        reason = _PASSING_STATES.get(engine_status, reason)
    retry_s = row.retry_s(error)
    info = error_details_pb2.ErrorInfo(
        reason=reason, domain=DOMAIN, metadata={"requestId": request_id, **row.facts(error)}
    )
    details = [info, *row.details(error)]
    if retry_s is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=_duration(retry_s)))
    status = status_pb2.Status(
        code=row.code.value[0], message=row.message(error), details=[_packed(detail) for detail in details]
    )
    metadata: list[tuple[str, str | bytes]] = [
        (REQUEST_ID_KEY, request_id),
        (_DETAILS_KEY, status.SerializeToString()),
    ]
    if retry_s is not None and row.has_pushback:
        metadata.append(("grpc-retry-pushback-ms", str(round(retry_s * 1000))))
    return CallStatus(row.code, status.message, tuple(metadata), reason)


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of the table. The functions take the error; its type is that of the line."""

    code: grpc.StatusCode
    reason: str | Callable[[Any], str]
    message: Callable[[Any], str]
    details: Callable[[Any], Iterable[Message]] = lambda error: ()
    facts: Callable[[Any], Mapping[str, str]] = lambda error: {}
    retry_s: Callable[[Any], float | None] = lambda error: None
    has_pushback: bool = False


def _shown(error: InvalidRequest) -> tuple[Violation, ...]:
    """The first violations, and one that says how many more there are."""
    num_hidden = len(error.violations) - MAX_VIOLATIONS
    if num_hidden <= 0:
        return error.violations
    return (*error.violations[:MAX_VIOLATIONS], Violation("", f"and {num_hidden} more"))


def _violations_text(error: InvalidRequest) -> str:
    texts = (f"{item.field}: {item.description}" if item.field else item.description for item in _shown(error))
    return "; ".join(texts)


def _bad_request(error: InvalidRequest) -> Iterable[Message]:
    yield error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field=item.field, description=item.description)
            for item in _shown(error)
        ]
    )


def _resource_info(error: ModelNotFound) -> Iterable[Message]:
    yield error_details_pb2.ResourceInfo(resource_type="model", resource_name=error.model[:MAX_ECHO_CHARS])


def _precondition_failure(error: SkillUnsupported) -> Iterable[Message]:
    violation = error_details_pb2.PreconditionFailure.Violation(
        type="SKILL", subject=error.skill, description=f"the model {error.model} has no such skill"
    )
    yield error_details_pb2.PreconditionFailure(violations=[violation])


def _refusal(error: RequestRefused) -> Iterable[Message]:
    violation = error_details_pb2.PreconditionFailure.Violation(
        type="REQUEST", subject="request", description="an equal request broke the engine before"
    )
    yield error_details_pb2.PreconditionFailure(violations=[violation])


def _overload_text(error: Overloaded) -> str:
    if error.bound is QueueBound.WAIT:
        return f"the wait would be about {error.retry_after_s:.1f} s, longer than this request may wait"
    whose = "this caller's share of" if error.is_tenant_share else "all of"
    return f"{whose} the {error.limit:.0f} {error.bound.value} that may wait is taken"


def _quota_failure(error: Overloaded) -> Iterable[Message]:
    violation = error_details_pb2.QuotaFailure.Violation(subject="queue", description=_overload_text(error))
    yield error_details_pb2.QuotaFailure(violations=[violation])


def _call_quota_failure(error: TooManyCalls) -> Iterable[Message]:
    violation = error_details_pb2.QuotaFailure.Violation(subject="calls", description=error.description)
    yield error_details_pb2.QuotaFailure(violations=[violation])


def _token_quota_failure(error: RateLimited) -> Iterable[Message]:
    violation = error_details_pb2.QuotaFailure.Violation(subject=f"token:{error.name}", description=error.limit)
    yield error_details_pb2.QuotaFailure(violations=[violation])


def _duration(duration_s: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(duration_s * 1e9))
    return duration


def _packed(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed


_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_BUG = _Row(grpc.StatusCode.INTERNAL, "INTERNAL", lambda error: "internal error")
_TABLE: Mapping[type, _Row] = MappingProxyType(
    {
        InvalidRequest: _Row(_INVALID, "INVALID_REQUEST", _violations_text, _bad_request),
        ImageError: _Row(
            _INVALID,
            lambda error: "IMAGE_TOO_LARGE" if error.too_large else "IMAGE_DECODE_FAILED",
            _violations_text,
            _bad_request,
        ),
        ContextLengthExceeded: _Row(
            _INVALID,
            "CONTEXT_LENGTH_EXCEEDED",
            _violations_text,
            _bad_request,
            facts=lambda error: {
                "promptTokenCount": str(error.num_prompt_tokens),
                "maxContextTokenCount": str(error.max_context_tokens),
            },
        ),
        ImageUriNotAllowed: _Row(_INVALID, "IMAGE_URI_NOT_ALLOWED", _violations_text, _bad_request),
        ImageFetchFailed: _Row(_INVALID, "IMAGE_FETCH_FAILED", _violations_text, _bad_request),
        ModelNotFound: _Row(
            grpc.StatusCode.NOT_FOUND,
            "MODEL_NOT_FOUND",
            lambda error: f"no model named {error.model[:MAX_ECHO_CHARS]!r} is served",
            _resource_info,
        ),
        SkillUnsupported: _Row(
            grpc.StatusCode.FAILED_PRECONDITION,
            "SKILL_UNSUPPORTED",
            lambda error: f"the model {error.model} has no skill {error.skill!r}",
            _precondition_failure,
        ),
        RequestRefused: _Row(
            grpc.StatusCode.FAILED_PRECONDITION,
            "REQUEST_REFUSED",
            lambda error: "an equal request broke the engine before, and is not tried again",
            _refusal,
        ),
        Overloaded: _Row(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
            _overload_text,
            _quota_failure,
            retry_s=lambda error: error.retry_after_s,
        ),
        QueueTimeout: _Row(
            grpc.StatusCode.UNAVAILABLE,
            "QUEUE_TIMEOUT",
            lambda error: f"not started within {error.waited_s:.3f} s",
            retry_s=lambda error: _RETRY_ELSEWHERE_S,
            has_pushback=True,
        ),
        DeadlineExceeded: _Row(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "DEADLINE_EXCEEDED",
            lambda error: "the deadline passed before the answer was complete",
        ),
        TokenInvalid: _Row(
            grpc.StatusCode.UNAUTHENTICATED,
            "TOKEN_INVALID",
            lambda error: "`authorization: Bearer <token>` must bring a token that this server knows",
        ),
        ScopeRequired: _Row(
            grpc.StatusCode.PERMISSION_DENIED,
            "SCOPE_REQUIRED",
            lambda error: f"the token needs the scope {' or '.join(error.scopes)}",
            facts=lambda error: {"scopes": ",".join(error.scopes)},
        ),
        RateLimited: _Row(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "RATE_LIMITED",
            lambda error: f"the token allows {error.limit}",
            _token_quota_failure,
            retry_s=lambda error: error.retry_after_s,
        ),
        StreamIdle: _Row(
            grpc.StatusCode.ABORTED,
            "STREAM_IDLE",
            lambda error: f"no message of the stream was taken for {error.limit_s:g} s",
        ),
        MessageTimeout: _Row(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "MESSAGE_TIMEOUT",
            lambda error: f"the message of the call was not complete within {error.limit_s:g} s",
        ),
        TooManyCalls: _Row(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "TOO_MANY_CALLS",
            lambda error: f"no room for this call: {error.description}",
            _call_quota_failure,
            retry_s=lambda error: error.retry_after_s,
        ),
        ServiceUnknown: _Row(
            grpc.StatusCode.NOT_FOUND, "SERVICE_UNKNOWN", lambda error: "no service of this name is served"
        ),
        EngineUnavailable: _Row(
            grpc.StatusCode.UNAVAILABLE,
            "ENGINE_UNAVAILABLE",
            lambda error: "the engine takes no requests now",
            retry_s=lambda error: _RETRY_ELSEWHERE_S,
        ),
    }
)
