"""From a status on the wire to an exception."""

import pickle
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from kestrel_client import (
    AdapterExists,
    AdapterFolderUnwritable,
    AdapterInvalid,
    AdapterNotFound,
    Cancelled,
    Client,
    DeadlineExceeded,
    ImageNotFound,
    InvalidRequest,
    KestrelClientError,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    RequestRefused,
    ServerError,
    SkillUnsupported,
    StreamIdle,
    Unauthenticated,
    Unavailable,
    Violation,
)
from kestrel_client.errors import Failure, from_rpc_error
from kestrel_grpc.calls import errors as server_errors
from tests.client import canned
from tests.client.canned import CannedVision


def _refusal(client: Client, vision: CannedVision, *statuses: status_pb2.Status) -> KestrelClientError:
    vision.failures = list(statuses)
    with pytest.raises(KestrelClientError) as caught:
        client.point(b"picture", "kite")
    return caught.value


# Where the client knows better what to do.
MESSAGES = {"TOKEN_INVALID": "the server asks for a token; give token, --token or KESTREL_GRPC_TOKEN"}


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (code_pb2.INVALID_ARGUMENT, "INVALID_REQUEST", InvalidRequest),
        (code_pb2.INVALID_ARGUMENT, "IMAGE_DECODE_FAILED", InvalidRequest),
        (code_pb2.INVALID_ARGUMENT, "IMAGE_TOO_LARGE", InvalidRequest),
        (code_pb2.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED", InvalidRequest),
        (code_pb2.NOT_FOUND, "MODEL_NOT_FOUND", ModelNotFound),
        (code_pb2.NOT_FOUND, "OTHER_NOT_FOUND", ServerError),
        (code_pb2.FAILED_PRECONDITION, "SKILL_UNSUPPORTED", SkillUnsupported),
        (code_pb2.FAILED_PRECONDITION, "REQUEST_REFUSED", RequestRefused),
        (code_pb2.FAILED_PRECONDITION, "OTHER", ServerError),
        (code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL", Overloaded),
        (code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", DeadlineExceeded),
        (code_pb2.CANCELLED, "", Cancelled),
        (code_pb2.ABORTED, "STREAM_IDLE", StreamIdle),
        (code_pb2.ABORTED, "", ServerError),
        (code_pb2.INTERNAL, "INTERNAL", ServerError),
        (code_pb2.UNIMPLEMENTED, "", ServerError),
        (code_pb2.UNAUTHENTICATED, "TOKEN_INVALID", Unauthenticated),
        (code_pb2.PERMISSION_DENIED, "SCOPE_REQUIRED", PermissionDenied),
        (code_pb2.RESOURCE_EXHAUSTED, "RATE_LIMITED", Overloaded),
    ],
)
def test_each_documented_status_is_its_own_error(
    client: Client, vision: CannedVision, code: int, reason: str, kind: type[KestrelClientError]
):
    details = [canned.error_info(reason, model="tiny")] if reason else []
    error = _refusal(client, vision, canned.status(code, "why", *details))
    assert type(error) is kind
    assert error.message == str(error) == MESSAGES.get(reason, "why")
    assert error.reason == (reason or grpc.StatusCode.__members__[code_pb2.Code.Name(code)].name)
    assert error.metadata == ({"model": "tiny"} if reason else {})


KINDS_BY_REASON = {
    "INVALID_REQUEST": InvalidRequest,
    "IMAGE_DECODE_FAILED": InvalidRequest,
    "IMAGE_TOO_LARGE": InvalidRequest,
    "IMAGE_URI_NOT_ALLOWED": InvalidRequest,
    "IMAGE_FETCH_FAILED": InvalidRequest,
    "IMAGE_SIZE_MISMATCH": InvalidRequest,
    "IMAGE_DIGEST_MISMATCH": InvalidRequest,
    "IMAGE_NOT_FOUND": ImageNotFound,
    "IMAGE_QUOTA_EXCEEDED": Overloaded,
    "IMAGE_STORE_FULL": Overloaded,
    "ADAPTER_DISK_FULL": Overloaded,
    "ADAPTER_EXISTS": AdapterExists,
    "ADAPTER_FOLDER_UNWRITABLE": AdapterFolderUnwritable,
    "ADAPTER_TOO_LARGE": InvalidRequest,
    "REQUEST_CANCELLED": Cancelled,
    "CONTEXT_LENGTH_EXCEEDED": InvalidRequest,
    "CONSTRAINT_FAILED": ServerError,
    "NUMBERS_OVERFLOWED": ServerError,
    "ANSWER_OUTSIDE_SCHEMA": ServerError,
    "MODEL_NOT_FOUND": ModelNotFound,
    "ADAPTER_NOT_FOUND": AdapterNotFound,
    "ADAPTER_INVALID": AdapterInvalid,
    "SKILL_UNSUPPORTED": SkillUnsupported,
    "REQUEST_REFUSED": RequestRefused,
    "QUEUE_FULL": Overloaded,
    "RATE_LIMITED": Overloaded,
    "TOO_MANY_CALLS": Overloaded,
    "QUEUE_TIMEOUT": Unavailable,
    "ENGINE_UNAVAILABLE": Unavailable,
    "DRAINING": Unavailable,
    "RECOVERING": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "MESSAGE_TIMEOUT": DeadlineExceeded,
    "TOKEN_INVALID": Unauthenticated,
    "SCOPE_REQUIRED": PermissionDenied,
    "STREAM_IDLE": StreamIdle,
    "STREAM_EXPIRED": Unavailable,
    "SERVICE_UNKNOWN": ServerError,
    # Of HTTP, which this client does not speak.
    "SOURCE_NOT_ALLOWED": PermissionDenied,
    "MESSAGE_TOO_LARGE": InvalidRequest,
    "MEDIA_TYPE_UNSUPPORTED": InvalidRequest,
    "METHOD_NOT_ALLOWED": ServerError,
    "METHOD_UNKNOWN": ServerError,
    # Of the Triton protocol, likewise.
    "STREAM_EVICTED": Unavailable,
    "RESOURCE_EXISTS": ServerError,
    "RESOURCE_MISSING": ServerError,
    "UNSUPPORTED": ServerError,
    "INTERNAL": ServerError,
}


def _statuses_of_the_server() -> Iterator[tuple[grpc.StatusCode, str]]:
    """Code and reason of every row of the server's table."""
    for row in (*server_errors.ERRORS, server_errors.INTERNAL):
        yield grpc.StatusCode[row.code.name], row.reason


def test_every_reason_of_the_server_has_an_error_here():
    assert KINDS_BY_REASON.keys() == {reason for _, reason in _statuses_of_the_server()}


@pytest.mark.parametrize(("code", "reason"), sorted(set(_statuses_of_the_server()), key=str))
def test_each_reason_of_the_server_becomes_its_error(code: grpc.StatusCode, reason: str):
    rich = canned.status(code.value[0], "why", canned.error_info(reason))
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", rich.SerializeToString()))
    error = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, "why"))
    assert (type(error), error.reason) == (KINDS_BY_REASON[reason], reason)


def test_an_invalid_request_lists_every_violation(client: Client, vision: CannedVision):
    bad_request = error_details_pb2.BadRequest()
    bad_request.field_violations.add(field="object", description="must not be empty")
    bad_request.field_violations.add(field="sampling.top_p", description="must be above 0 and at most 1")
    info = canned.error_info("INVALID_REQUEST")
    error = _refusal(client, vision, canned.status(code_pb2.INVALID_ARGUMENT, "bad", info, bad_request))
    assert isinstance(error, InvalidRequest)
    assert error.violations == (
        Violation("object", "must not be empty"),
        Violation("sampling.top_p", "must be above 0 and at most 1"),
    )
    assert str(error) == "object: must not be empty; sampling.top_p: must be above 0 and at most 1"


def test_an_overloaded_server_says_when_to_try_again(client: Client, vision: CannedVision):
    error = _refusal(client, vision, canned.queue_full(retry_after_s=3600))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 3600.0


def test_an_unavailable_server_is_asked_four_times(address: str, vision: CannedVision):
    retry_info = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=500_000_000))
    draining = canned.status(code_pb2.UNAVAILABLE, "draining", canned.error_info("DRAINING"), retry_info)
    with Client(address, max_retry_s=0) as client:
        error = _refusal(client, vision, *[draining] * 4)
    assert isinstance(error, Unavailable)
    assert (error.reason, error.retry_after_s) == ("DRAINING", 0.5)
    assert len(vision.requests) == 4


def test_a_message_over_the_servers_limit_is_invalid_rather_than_overload(client: Client):
    with pytest.raises(InvalidRequest, match="larger than max") as caught:
        client.point(bytes(9 * 1024 * 1024), "kite")
    assert caught.value.reason == "MESSAGE_TOO_LARGE"


def test_details_that_contradict_the_status_are_ignored():
    rich = canned.status(code_pb2.NOT_FOUND, "other", canned.error_info("MODEL_NOT_FOUND"))
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", rich.SerializeToString()))
    call = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), trailers, "why")
    error = from_rpc_error(call)
    assert type(error) is ServerError
    assert error.reason == "INTERNAL"


def test_details_that_are_not_a_status_are_ignored():
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    call = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, "why")
    assert type(from_rpc_error(call)) is Unavailable


@pytest.mark.parametrize("code", [0, 2])
def test_a_stream_that_a_proxy_resets_has_lost_its_server(code: int):
    text = f"Stream removed (RST_STREAM (Received RST_STREAM with error code {code}))"
    call = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), text)
    error = from_rpc_error(call, "mine")
    assert type(error) is Unavailable
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SERVER_LOST")
    assert (error.request_id, error.retry_after_s) == ("mine", None)


def test_an_error_survives_the_way_between_processes():
    failure = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", retry_after_s=2.0)
    error = pickle.loads(pickle.dumps(Overloaded(failure)))
    assert (error.code, error.retry_after_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 2.0)
