"""Defines the exceptions of calls, and turns a gRPC status into one of them.

    KestrelClientError
    ├── InvalidRequest       the request breaks a rule; carries every violation
    ├── Unauthenticated      the server requires a token, and the call has no valid one
    ├── PermissionDenied     the token does not allow this call
    ├── ModelNotFound        the server serves no model of that name
    ├── AdapterNotFound      the server has no adapter of that name
    ├── AdapterInvalid       the adapter's files do not fit the model
    ├── AdapterExists        the name of an uploaded adapter is taken
    ├── AdapterFolderUnwritable  the server cannot add adapters to a folder
    ├── ImageNotFound        the server has no stored image of that name for this caller
    ├── SkillUnsupported     the model has no such skill
    ├── RequestRefused       an equal request made the server fail before; it does not try again
    ├── Overloaded           a limit of the server or of the token is reached; carries when to try again
    ├── Unavailable          no server, or one that is starting, stopping or lost; carries when to try again
    ├── DeadlineExceeded     no answer within `timeout_s`
    ├── Cancelled            the call was cancelled
    ├── StreamIdle           the caller did not read the stream's messages
    ├── ClientClosed         the client was closed before the call
    └── ServerError          anything else; see the server's log

Every one carries the status `code`, a stable `reason`, the server's `metadata`, which is empty where no server
answered, and the `request_id`, by which the server's log names the request. Where no server gave a reason, it is
one of `LOCAL_REASONS`, or the name of the code. An image file that cannot be read raises an `OSError`, as reading
any file does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

CLIENT_CLOSED = "CLIENT_CLOSED"
INVALID_REQUEST = "INVALID_REQUEST"
RESULT_MISSING = "RESULT_MISSING"
SCORES_MISSING = "SCORES_MISSING"
SERVER_LOST = "SERVER_LOST"
SERVER_UNREACHABLE = "SERVER_UNREACHABLE"
TOKEN_INVALID = "TOKEN_INVALID"
LOCAL_REASONS: Mapping[grpc.StatusCode, str] = {
    grpc.StatusCode.INVALID_ARGUMENT: INVALID_REQUEST,
    grpc.StatusCode.DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    grpc.StatusCode.CANCELLED: "CANCELLED",
    grpc.StatusCode.UNAVAILABLE: SERVER_UNREACHABLE,
    # The transport refuses a message over its size limit with this code and without any detail.
    grpc.StatusCode.RESOURCE_EXHAUSTED: "MESSAGE_TOO_LARGE",
}
"""The reasons of failures that have none from a server."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a request breaks. `field` is a path such as `sampling.temperature`."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The facts about a failed call.

    `request_id` is the id that the client sent; that in `metadata` is the server's, and wins.
    """

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[Violation, ...] = ()
    retry_after_s: float | None = None
    request_id: str = ""
    is_from_server: bool = False
    """True if a server of this contract gave the reason."""


class KestrelClientError(Exception):
    """The base class of all exceptions of calls.

    Attributes:
        code: The gRPC status of the call; for a mistake that the client found, the one that a server would send.
        message: What went wrong.
        reason: The stable name of the failure, such as `QUEUE_FULL`: the server's, or the client's where no server
            gave one.
        metadata: Further facts from the server, such as the limit that was exceeded.
        request_id: Names the request in the server's log. The caller's where the call had one, else made by the
            client.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure
        self.code = failure.code
        self.message = failure.message
        self.reason = failure.reason
        self.metadata = failure.metadata
        self.request_id = failure.metadata.get("requestId") or failure.request_id

    def __str__(self) -> str:
        return self.message or self.code.name


class InvalidRequest(KestrelClientError):
    """The request breaks a rule. `violations` lists every breach, as far as the server knows them."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.violations = failure.violations

    def __str__(self) -> str:
        listed = "; ".join(f"{item.field}: {item.description}" for item in self.violations)
        return listed or super().__str__()


class Unauthenticated(KestrelClientError):
    """The server requires a token, and the call has no valid one."""


class PermissionDenied(KestrelClientError):
    """The token does not allow this call."""


class ModelNotFound(KestrelClientError):
    """The server serves no model of that name."""


class AdapterNotFound(KestrelClientError):
    """The server has no adapter of that name."""


class AdapterInvalid(KestrelClientError):
    """The files of the adapter do not fit the model. The message lists why."""


class AdapterExists(KestrelClientError):
    """The name of the uploaded adapter is taken, by one that is not to be replaced or cannot be."""


class AdapterFolderUnwritable(KestrelClientError):
    """The server has no folder of adapters, or cannot write to it. The message says why."""


class ImageNotFound(KestrelClientError):
    """The server has no stored image of that name for this caller. Its time may be over: store it again."""


class SkillUnsupported(KestrelClientError):
    """The model has no such skill."""


class RequestRefused(KestrelClientError):
    """An equal request made the server fail before, so it does not try this one. A retry does not help."""


class Overloaded(KestrelClientError):
    """A limit of the server or of the token is reached. `retry_after_s` says when to try again, None if unknown."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.retry_after_s = failure.retry_after_s


class Unavailable(KestrelClientError):
    """The server does not answer, is starting or stopping, or the request waited for too long.

    `retry_after_s` says when to try again; None if no server said so.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.retry_after_s = failure.retry_after_s


class DeadlineExceeded(KestrelClientError):
    """The answer was not complete within `timeout_s`."""


class Cancelled(KestrelClientError):
    """The call was cancelled, here or by the server."""


class StreamIdle(KestrelClientError):
    """The server ended a stream that was not read for too long: iterate over a stream, or cancel it."""


class ClientClosed(KestrelClientError):
    """The client was closed before the call."""


class ServerError(KestrelClientError):
    """The server failed, or sent a response that this client does not understand."""


def invalid_argument(field: str, description: str) -> InvalidRequest:
    """Returns the exception for an argument that no server needs to see, such as a caption of an unknown length."""
    return InvalidRequest(
        Failure(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{field}: {description}",
            INVALID_REQUEST,
            violations=(Violation(field, description),),
        )
    )


def client_closed() -> ClientClosed:
    """Returns the exception for a call after `close`."""
    return ClientClosed(Failure(grpc.StatusCode.FAILED_PRECONDITION, "the client is closed", CLIENT_CLOSED))


def explained(error: KestrelClientError, message: str) -> KestrelClientError:
    """Returns the same error with another message."""
    return type(error)(replace(error.failure, message=message, request_id=error.request_id))


def from_rpc_error(error: grpc.RpcError, request_id: str = "") -> KestrelClientError:
    """Returns the exception for the status of a failed call, which was sent with this request id."""
    failure = _failure(error, request_id)
    return _kind(failure)(failure)


def of_object(code: int, reason: str, message: str, request_id: str) -> KestrelClientError:
    """Returns the exception for one of several objects that has no answer, of a call with this request id."""
    codes = {status.value[0]: status for status in grpc.StatusCode}
    found = codes.get(code, grpc.StatusCode.UNKNOWN)
    failure = Failure(found, message, reason or found.name, request_id=request_id, is_from_server=bool(reason))
    return _kind(failure)(failure)


@contextmanager
def errors_of(request_id: str) -> Iterator[None]:
    """Raises every failure of a call inside as a `KestrelClientError` that has a request id."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, request_id) from error
    except KestrelClientError as error:
        error.request_id = error.request_id or request_id
        raise


_KINDS: Mapping[grpc.StatusCode, type[KestrelClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}
# Codes that stand for several failures are distinguished by the server's reason.
_KINDS_BY_REASON: Mapping[tuple[grpc.StatusCode, str], type[KestrelClientError]] = {
    (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"): ModelNotFound,
    (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND"): AdapterNotFound,
    (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_INVALID"): AdapterInvalid,
    (grpc.StatusCode.ALREADY_EXISTS, "ADAPTER_EXISTS"): AdapterExists,
    (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_FOLDER_UNWRITABLE"): AdapterFolderUnwritable,
    (grpc.StatusCode.NOT_FOUND, "IMAGE_NOT_FOUND"): ImageNotFound,
    (grpc.StatusCode.FAILED_PRECONDITION, "SKILL_UNSUPPORTED"): SkillUnsupported,
    (grpc.StatusCode.FAILED_PRECONDITION, "REQUEST_REFUSED"): RequestRefused,
    (grpc.StatusCode.ABORTED, "STREAM_IDLE"): StreamIdle,
    # Waiting does not make that request fit.
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"): InvalidRequest,
}


def _kind(failure: Failure) -> type[KestrelClientError]:
    kind = _KINDS_BY_REASON.get((failure.code, failure.reason))
    return kind or _KINDS.get(failure.code, ServerError)


# A proxy that loses a server in the middle of an answer can only reset the stream, and gRPC makes INTERNAL of that.
_LOST_BY_PROXY = re.compile(r"RST_STREAM with error code [02]\b")


def _failure(error: grpc.RpcError, request_id: str) -> Failure:
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return Failure(grpc.StatusCode.UNKNOWN, str(error), "UNKNOWN", request_id=request_id)
    reason = ""
    metadata: dict[str, str] = {}
    violations: list[Violation] = []
    retry_after_s = None
    for detail in _details(error):
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry_info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad_request):
            violations += (Violation(item.field, item.description) for item in bad_request.field_violations)
        elif detail.Unpack(retry_info):
            retry_after_s = retry_info.retry_delay.ToTimedelta().total_seconds()
    details = error.details() or ""
    code = error.code()
    if code is grpc.StatusCode.INTERNAL and not reason and _LOST_BY_PROXY.search(details):
        text = "the connection to the server was lost during the answer"
        return Failure(grpc.StatusCode.UNAVAILABLE, text, SERVER_LOST, request_id=request_id)
    named = reason or LOCAL_REASONS.get(code, code.name)
    return Failure(
        code, details, named, metadata, tuple(violations), retry_after_s, request_id, is_from_server=bool(reason)
    )


def _details(error: Any) -> tuple[Any, ...]:
    try:
        status: status_pb2.Status | None = rpc_status.from_call(error)
    except (ValueError, DecodeError):
        # Details that contradict the status, for example because a proxy changed it, are ignored.
        return ()
    return tuple(status.details) if status is not None else ()
