"""What is sent arrives with every field."""

from dataclasses import fields, replace
from typing import Any

import pytest

from kestrel_grpc.access.limits import RateLimited
from kestrel_grpc.images.stored_images import ImageHandle, ImageNotFound, ImageQuotaExceeded, ImageStoreFull
from kestrel_grpc.multiprocess.protocol.errors import SupervisorUnavailable, decode_error, encode_error
from kestrel_grpc.multiprocess.protocol.messages import CODEC, Events, EventsOf
from kestrel_grpc.multiprocess.protocol.requests import ImageSummary, decode_request, encode_request
from kestrel_runtime.api import errors
from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AnswerOutsideSchema,
    ConstraintFailed,
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
from kestrel_runtime.api.events import (
    Box,
    CaptionOutput,
    DetectOutput,
    EmbedOutput,
    Event,
    Finished,
    FinishReason,
    FoundObject,
    Grounding,
    Location,
    OutlineBox,
    PatchEmbeddings,
    PointOutput,
    QueryOutput,
    Reasoning,
    SegmentMask,
    SegmentOutput,
    Started,
    TextChannel,
    TextDelta,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from kestrel_runtime.api.images import DecodedPixels, RemoteImage
from kestrel_runtime.api.requests import (
    REQUEST_TYPES,
    BoxRef,
    CachePolicy,
    Chat,
    ChatMessage,
    Embed,
    PointRef,
    Priority,
    Query,
    Request,
    RequestOptions,
    Role,
    SamplingParams,
    fields_without_images,
)

SAMPLING = SamplingParams(
    0.5, 0.9, 17, 2**62 + 1, ("stop", "\n"), True, 40, 0.1, 1.1, 0.5, -0.5, ((3, -1.5),), 2, 3
)
OPTIONS = RequestOptions("model", 1.5, Priority.BATCH, CachePolicy.REFRESH, "adapter@7", Priority.INTERACTIVE)
LOGPROBS = (TokenLogprob(7, "ä", b"\xc3\xa4", -0.5, (TopLogprob(8, "\ufffd", b"\xc3", -1.25),)),)
USAGE = Usage(731, 729, 5, 16)
TIMING = Timing(0.1, 0.2, 0.3, 0.6, 0.4)
OUTPUTS = (
    QueryOutput("yes", Reasoning("since", (Grounding(0, 3, (Location(0.25, 0.5),)),), LOGPROBS), LOGPROBS),
    QueryOutput("no", None),
    CaptionOutput("a cat", LOGPROBS),
    PointOutput((Location(0.5, 0.75),), (0.125,)),
    DetectOutput((Box(0.0, 0.25, 0.5, 1.0),)),
    SegmentOutput((SegmentMask("M 0 0 Z", Box(0.0, 0.0, 1.0, 1.0), is_partial=True),)),
    EmbedOutput((0.25, -1.5), 729),
)


class Known(RemoteImage):
    def __init__(self, summary: ImageSummary) -> None:
        self.summary = summary

    def fetch(self, check_wanted: Any) -> DecodedPixels:
        raise NotImplementedError


def full_query() -> Query:
    refs = (PointRef(0.5, 0.25), BoxRef(0.0, 0.25, 0.5, 1.0))
    constraint = Constraint(json_schema='{"type": "string"}')
    return Query("what?", b"image", True, refs, SAMPLING, OPTIONS, constraint)


@pytest.mark.parametrize("kind", REQUEST_TYPES)
def test_requests_of_every_skill_arrive_with_every_field(kind: type[Request]) -> None:
    sampling = SAMPLING if kind.skill in ("query", "caption", "chat") else SamplingParams(0.5, 0.9, 17, 5)
    options = replace(OPTIONS, adapter="") if kind is Embed else OPTIONS
    request = replace(kind.example(b"image", sampling), options=options)
    summary = ImageSummary(b"d" * 32, 5, 640, 480)
    found = decode_request(encode_request(request, [summary]), Known)
    (image,) = found.images
    assert isinstance(image, Known)
    assert image.summary == summary
    assert {name: getattr(found, name) for name in fields_without_images(kind)} == {
        name: getattr(request, name) for name in fields_without_images(kind)
    }


def test_a_query_with_all_its_fields_arrives_whole() -> None:
    request = full_query()
    found = decode_request(encode_request(request, ()), Known)
    assert found.with_images((b"image",)) == request
    assert all(getattr(request, item.name) != item.default for item in fields(Query)), "nothing has its default"


def test_a_conversation_with_all_its_fields_arrives_whole() -> None:
    said = ((Role.SYSTEM, "Be brief."), (Role.USER, "What?"), (Role.ASSISTANT, " A bird."), (Role.USER, "\u00e4?"))
    images = ((), (b"one", b"two"), (), (b"three",))
    messages_ = tuple(ChatMessage(*turn, seen) for turn, seen in zip(said, images, strict=True))
    constraint = Constraint(json_schema='{"type": "string"}')
    request = Chat(messages_, True, SAMPLING, OPTIONS, constraint)
    summaries = [ImageSummary(bytes([number]) * 32, number, 640, 480) for number in range(3)]
    found = decode_request(encode_request(request, summaries), Known)
    assert [image.summary for image in found.images if isinstance(image, Known)] == summaries
    assert found.with_images((b"one", b"two", b"three")) == request
    assert all(getattr(request, item.name) != item.default for item in fields(Chat)), "nothing has its default"


@pytest.mark.parametrize("output", OUTPUTS)
def test_answers_arrive_as_they_were(output: Any) -> None:
    finished = Finished(output, FinishReason.STOP_SEQUENCE, USAGE, TIMING, "stop", (640, 481))
    delta = TextDelta("ä", TextChannel.REASONING, 3, 2, LOGPROBS)
    box = Box(0.0, 0.25, 0.5, 1.0)
    found = (FoundObject(box), FoundObject(Location(0.25, 0.75), 0.5), FoundObject(box, 0.25))
    patches = PatchEmbeddings(7, 2, bytes(range(256)))
    events: list[Event] = [Started(USAGE), delta, OutlineBox(box), *found, patches, finished]
    sent = CODEC.encode([Events([EventsOf(2**40, events)])])
    (message,) = CODEC.decode(sent)
    assert isinstance(message, Events)
    (item,) = message.of_requests
    assert item.id == 2**40
    assert (item.events, item.error) == (events, None)
    assert repr(item.events) == repr(events)  # with the scores, which comparisons leave out


def all_errors() -> list[KestrelError]:
    return [
        InvalidRequest((Violation("a", "is wrong"), Violation("b.c", "too"))),
        ImageError("cannot be decoded"),
        ImageError("too large", too_large=True),
        ContextLengthExceeded("question", 2049, 2048),
        ContextLengthExceeded("messages", 2049, 2048, (741, 1308)),
        ModelNotFound("other", "; did you mean this?"),
        AdapterNotFound("a@1", "; there is none"),
        AdapterInvalid("a", ("rank", "shape")),
        SkillUnsupported("gaze", "nano"),
        Overloaded(64.0, 1.5, QueueBound.TOKENS, is_tenant_share=True),
        Overloaded(2.0, 9.0, QueueBound.WAIT),
        RequestRefused("query-12 has failed before"),
        ConstraintFailed(),
        NumbersOverflowed(),
        NumbersOverflowed("a@1"),
        AnswerOutsideSchema("/id"),
        QueueTimeout(1.25),
        DeadlineExceeded("the deadline passed"),
        EngineUnavailable("the engine is draining"),
        InternalError(ValueError("secret")),
    ]


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: type(error).__name__)
def test_errors_arrive_with_what_they_say(error: KestrelError) -> None:
    sent = CODEC.encode([Events([EventsOf(1, [], encode_error(error))])])
    (message,) = CODEC.decode(sent)
    assert isinstance(message, Events)
    (item,) = message.of_requests
    assert item.error is not None
    found = decode_error(item.error)
    assert (item.events, type(found), str(found)) == ([], type(error), str(error))
    known = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    assert {name: value for name, value in vars(found).items() if not name.startswith("_")} == known
    assert b"secret" not in sent


def test_every_error_that_a_request_can_meet_is_sent() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KestrelError)}
    met_at_start = {errors.KestrelError, errors.CheckpointError}
    assert {type(error) for error in all_errors()} == kinds - met_at_start


@pytest.mark.parametrize(
    "error",
    [
        RateLimited("alice", "at most 2 requests at a time", 1.5),
        ImageNotFound(ImageHandle("ab" * 32)),
        ImageQuotaExceeded(7),
        ImageStoreFull(2**40),
        SupervisorUnavailable("frontend-1 is gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_shared_state_arrive_with_what_they_say(error: Exception) -> None:
    found = decode_error(encode_error(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def test_an_error_of_an_unknown_kind_arrives_as_its_base() -> None:
    class Odd(ImageError):
        pass

    class Other(KestrelError):
        pass

    assert type(decode_error(encode_error(Odd("odd")))) is ImageError
    assert type(decode_error(encode_error(Other()))) is InternalError
