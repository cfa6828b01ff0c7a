"""Every line of the table, over the wire."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import kestrel_runtime.api
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc import access, images
from kestrel_grpc import calls as wire_package
from kestrel_grpc.calls import errors
from kestrel_grpc.calls.errors import ERRORS, INTERNAL, MAX_VIOLATIONS, describe
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.errors import (
    CheckpointError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    ImageError,
    InternalError,
    InvalidRequest,
    KestrelError,
    ModelNotFound,
    NumbersOverflowed,
    Overloaded,
    QueueBound,
    QueueTimeout,
    RequestRefused,
    SkillUnsupported,
    Violation,
)
from tests.fakes import FakeEngine, fails
from tests.server.serving import details_of, reason_of, serving

Code = grpc.StatusCode
SECRET = "the password is swordfish"


async def failure(engine: FakeEngine, *, streaming: bool = False, **fields: Any) -> grpc.aio.AioRpcError:
    """How a query ends that an engine refuses."""
    fields = {"question": "?", **fields}
    async with serving(engine) as rig:
        if streaming:
            answer = rig.vision.Query(wire.QueryRequest(**fields)).read()
        else:
            answer = rig.vision.CompleteQuery(wire.CompleteQueryRequest(**fields))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer
    return caught.value


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("error", "code", "reason", "details"),
    [
        (InvalidRequest((Violation("question", "x"),)), Code.INVALID_ARGUMENT, "INVALID_REQUEST", {"BadRequest"}),
        (ImageError("no image"), Code.INVALID_ARGUMENT, "IMAGE_DECODE_FAILED", {"BadRequest"}),
        (ImageError("big", too_large=True), Code.INVALID_ARGUMENT, "IMAGE_TOO_LARGE", {"BadRequest"}),
        (
            ContextLengthExceeded("question", 5000, 2048),
            Code.INVALID_ARGUMENT,
            "CONTEXT_LENGTH_EXCEEDED",
            {"BadRequest"},
        ),
        (ModelNotFound("gull"), Code.NOT_FOUND, "MODEL_NOT_FOUND", {"ResourceInfo"}),
        (
            SkillUnsupported("segment", "fake"),
            Code.FAILED_PRECONDITION,
            "SKILL_UNSUPPORTED",
            {"PreconditionFailure"},
        ),
        (Overloaded(7, 0.25), Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", {"RetryInfo", "QuotaFailure"}),
        (
            Overloaded(9.0, 30.0, QueueBound.WAIT),
            Code.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
            {"RetryInfo", "QuotaFailure"},
        ),
        (RequestRefused(SECRET), Code.FAILED_PRECONDITION, "REQUEST_REFUSED", {"PreconditionFailure"}),
        (NumbersOverflowed(), Code.FAILED_PRECONDITION, "NUMBERS_OVERFLOWED", {"PreconditionFailure"}),
        (NumbersOverflowed("a"), Code.FAILED_PRECONDITION, "NUMBERS_OVERFLOWED", {"PreconditionFailure"}),
        (QueueTimeout(1.5), Code.UNAVAILABLE, "QUEUE_TIMEOUT", {"RetryInfo"}),
        (DeadlineExceeded("late"), Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", set()),
        (EngineUnavailable("gone"), Code.UNAVAILABLE, "ENGINE_UNAVAILABLE", {"RetryInfo"}),
        (InternalError(RuntimeError(SECRET)), Code.INTERNAL, "INTERNAL", set()),
        (CheckpointError(SECRET), Code.INTERNAL, "INTERNAL", set()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, KestrelError) else "",
)
async def test_each_error_has_its_status_its_reason_and_its_details(
    error: KestrelError, code: Code, reason: str, details: set[str], streaming: bool
):
    status = await failure(FakeEngine(fails(error)), streaming=streaming)
    assert status.code() is code
    assert reason_of(status) == reason
    assert set(details_of(status)) == {"ErrorInfo"} | details
    assert SECRET not in str(status)


async def test_every_error_names_the_request():
    status = await failure(FakeEngine(fails(DeadlineExceeded("late"))))
    info: Any = details_of(status)["ErrorInfo"]
    trailers = dict(status.trailing_metadata() or ())
    assert info.metadata["requestId"] == trailers["x-request-id"] != ""


async def test_bad_request_lists_every_violation_up_to_twenty():
    violations = tuple(Violation(f"spatial_refs[{index}].point.x", "must be from 0 to 1") for index in range(100))
    status = await failure(FakeEngine(fails(InvalidRequest(violations))))
    bad: Any = details_of(status)["BadRequest"]
    *shown, rest = bad.field_violations
    assert [item.field for item in shown] == [item.field for item in violations[:MAX_VIOLATIONS]]
    assert shown[0].description == "must be from 0 to 1"
    assert (rest.field, rest.description) == ("", "and 80 more")
    assert (status.details() or "").endswith("and 80 more")


async def test_full_queue_says_when_to_come_back():
    status = await failure(FakeEngine(max_queued_requests=0))
    retry: Any = details_of(status)["RetryInfo"]
    quota: Any = details_of(status)["QuotaFailure"]
    assert retry.retry_delay.ToMilliseconds() == 250
    assert quota.violations[0].subject == "queue"


async def test_queue_timeout_asks_retrying_clients_to_wait():
    status = await failure(FakeEngine(fails(QueueTimeout(1.5))))
    assert dict(status.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "1000"


async def test_context_overflow_tells_the_numbers():
    status = await failure(FakeEngine(fails(ContextLengthExceeded("question", 5000, 2048))))
    info: Any = details_of(status)["ErrorInfo"]
    assert (info.metadata["promptTokenCount"], info.metadata["maxContextTokenCount"]) == ("5000", "2048")


async def test_a_conversation_that_does_not_fit_has_the_tokens_of_each_message():
    counts = tuple(range(100, 356))
    status = await failure(FakeEngine(fails(ContextLengthExceeded("messages", 58_240, 2048, counts))))
    info: Any = details_of(status)["ErrorInfo"]
    assert info.metadata["messageTokenCounts"] == ",".join(map(str, counts))
    bad: Any = details_of(status)["BadRequest"]
    (violation,) = bad.field_violations
    assert violation.description == (
        "the prompt takes 58240 tokens and must stay below 2048; the largest are messages[248] takes 348, "
        "messages[249] takes 349, messages[250] takes 350, messages[251] takes 351, messages[252] takes 352, "
        "messages[253] takes 353, messages[254] takes 354, messages[255] takes 355"
    )


async def test_unknown_model_is_named_though_not_at_any_length():
    status = await failure(FakeEngine(), options={"model": "gull" * 100_000})
    assert reason_of(status) == "MODEL_NOT_FOUND"
    resource: Any = details_of(status)["ResourceInfo"]
    assert resource.resource_type == "model"
    assert resource.resource_name.startswith("gullgull")
    assert len(resource.resource_name) < 200


async def test_unsupported_skill_is_named():
    status = await failure(FakeEngine(skills=("caption",)))
    failed: Any = details_of(status)["PreconditionFailure"]
    assert failed.violations[0].subject == "query"


@pytest.mark.one_process("the test tells the engine, not the server's side of it")
@pytest.mark.parametrize("engine_status", [EngineStatus.DRAINING, EngineStatus.RECOVERING])
async def test_unavailability_that_passes_says_why(engine_status: EngineStatus):
    engine = FakeEngine()
    engine.become(engine_status)
    status = await failure(engine)
    assert (status.code(), reason_of(status)) == (Code.UNAVAILABLE, engine_status.name)
    assert "RetryInfo" in details_of(status)


def test_error_of_an_unknown_kind_is_internal_and_says_nothing():
    failure = describe(ZeroDivisionError(SECRET))
    assert (failure.code, failure.reason, failure.message) == (errors.Code.INTERNAL, "INTERNAL", "internal error")
    assert SECRET not in str(failure)


def kinds_of_errors() -> Iterator[type[Exception]]:
    """Every class of errors that the packages around the table define, and that a call can raise."""
    for package in (kestrel_runtime.api, access, images, wire_package):
        for item in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for kind in vars(importlib.import_module(item.name)).values():
                if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == item.name:
                    yield kind


# Roots that are never raised themselves, bugs, and what is raised before a server starts.
WITHOUT_ROW = {
    "CallFailed",  # it brings its failure
    # Whoever decodes a text turns them into a violation of its field.
    "DataTooLarge",
    "DataUnreadable",
    "KestrelError",
    "AccessRefused",
    "InternalError",
    "CheckpointError",
    "TokenFileError",
    "CertificateError",
    "RemoteImagesUnavailable",
}


def test_every_error_that_a_call_can_raise_has_a_row():
    without = {kind.__name__ for kind in kinds_of_errors()} - {row.error.__name__ for row in ERRORS}
    # Private errors do not leave their module.
    assert {name for name in without if not name.startswith("_")} == WITHOUT_ROW


def test_every_reason_stands_in_one_row():
    reasons = [row.reason for row in (*ERRORS, INTERNAL)]
    assert len(reasons) == len(set(reasons))


def test_the_last_row_of_each_error_always_applies():
    last = {row.error: row for row in ERRORS}
    assert all(row.applies(None, None) for row in last.values())


# The codes of HTTP that a gRPC code can stand for, as AIP-193 has it, and the more exact ones that we have.
HTTP_STATUSES = {
    "CANCELLED": {499},
    "INVALID_ARGUMENT": {400, 413, 415},
    "DEADLINE_EXCEEDED": {504, 408},
    "NOT_FOUND": {404},
    "ALREADY_EXISTS": {409},
    "PERMISSION_DENIED": {403},
    "RESOURCE_EXHAUSTED": {429, 413},
    "FAILED_PRECONDITION": {400, 422},
    "ABORTED": {409},
    "UNIMPLEMENTED": {404, 405, 501},
    "INTERNAL": {500},
    "UNAVAILABLE": {503},
    "UNAUTHENTICATED": {401},
}


@pytest.mark.parametrize("row", [*ERRORS, INTERNAL], ids=lambda row: row.reason)
def test_each_row_has_the_code_of_grpc_and_a_status_of_http_that_agree(row: errors.ErrorRow):
    assert Code[row.code.name].value[0] == row.code.value
    assert row.http_status in HTTP_STATUSES[row.code.name]
