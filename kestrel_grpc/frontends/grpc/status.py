"""Writes a `CallFailure` as a gRPC status with the details of google.rpc.

Every status carries an ErrorInfo of domain `kestrel.dev` whose metadata names the request.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from kestrel_grpc.calls.call_context import REQUEST_ID_KEY
from kestrel_grpc.calls.errors import (
    DOMAIN,
    BadFields,
    CallFailure,
    Detail,
    MissingResource,
    UnmetPrecondition,
)

TrailingMetadata = tuple[tuple[str, str | bytes], ...]

_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"


def status_code(failure: CallFailure) -> grpc.StatusCode:
    """Returns the code as a value of gRPC's library."""
    return grpc.StatusCode[failure.code.name]


def trailing_metadata(failure: CallFailure, request_id: str) -> TrailingMetadata:
    """Returns the trailing metadata: the request's id and the details."""
    status = status_pb2.Status(
        code=failure.code.value,
        message=failure.message,
        details=[_packed(detail) for detail in _details(failure, request_id)],
    )
    metadata = ((REQUEST_ID_KEY, request_id), (_DETAILS_KEY, status.SerializeToString()))
    if failure.has_pushback and failure.retry_after_s is not None:
        return (*metadata, (_PUSHBACK_KEY, str(round(failure.retry_after_s * 1000))))
    return metadata


def _details(failure: CallFailure, request_id: str) -> Iterator[Message]:
    yield error_details_pb2.ErrorInfo(
        reason=failure.reason, domain=DOMAIN, metadata={"requestId": request_id, **failure.facts}
    )
    for detail in failure.details:
        yield _detail(detail)
    if failure.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(failure.retry_after_s * 1e9))
        yield error_details_pb2.RetryInfo(retry_delay=delay)


def _detail(detail: Detail) -> Message:
    if isinstance(detail, BadFields):
        violation = error_details_pb2.BadRequest.FieldViolation
        return error_details_pb2.BadRequest(
            field_violations=[
                violation(field=item.field, description=item.description) for item in detail.violations
            ]
        )
    if isinstance(detail, MissingResource):
        return error_details_pb2.ResourceInfo(resource_type=detail.kind, resource_name=detail.name)
    if isinstance(detail, UnmetPrecondition):
        unmet = error_details_pb2.PreconditionFailure.Violation(
            type=detail.kind, subject=detail.subject, description=detail.description
        )
        return error_details_pb2.PreconditionFailure(violations=[unmet])
    exceeded = error_details_pb2.QuotaFailure.Violation(subject=detail.subject, description=detail.description)
    return error_details_pb2.QuotaFailure(violations=[exceeded])


def _packed(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed
