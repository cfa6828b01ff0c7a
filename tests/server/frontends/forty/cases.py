"""The forty requests, in no frontend's words, and what must come of each."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.errors import (
    ContextLengthExceeded,
    ImageError,
    InternalError,
    QueueTimeout,
    RequestRefused,
)
from kestrel_runtime.api.requests import (
    BoxRef,
    Caption,
    Detect,
    Embed,
    Gaze,
    Point,
    PointRef,
    Query,
    Request,
    SamplingParams,
    Segment,
)
from tests.fakes import HOLD, SKILLS, FakeEngine, answers, fails

IMAGE = b"an encoded image"
MAX_IMAGE_BYTES = 2**20
BOX = (0.125, 0.25, 0.5, 0.75)
REASONING = ("A bird.", [(2, 6, [(0.5, 0.25)])])
POINTS = [(0.5, 0.25), (0.75, 0.5)]


@dataclass(frozen=True)
class Ask:
    """One request. `image` may be an address, a handle or the bytes of a file."""

    skill: str = "query"
    text: str = "What is it?"
    """The question, the name of the object, or the length of the caption; of a gaze and an embedding, nothing."""
    image: bytes | str | None = IMAGE
    reasoning: bool = False
    refs: tuple[tuple[float, ...], ...] = ()
    """Points and boxes; of a gaze, the eye alone."""
    max_objects: int | None = None
    min_score: float | None = None
    objects: tuple[str, ...] = ()
    """Several names of objects in place of the text."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    model: str = "fake"
    is_streamed: bool = False
    token: str | None = "alice"
    timeout_s: float | None = None

    def request(self) -> Request:
        """What must reach the engine, apart from its options."""
        refs = tuple(PointRef(*ref) if len(ref) == 2 else BoxRef(*ref) for ref in self.refs)
        shared: Any = {"image": self.image, "sampling": SamplingParams(**self.sampling)}
        if self.skill == "query":
            return Query(self.text, reasoning=self.reasoning, spatial_refs=refs, **shared)
        if self.skill == "caption":
            return Caption(length=self.text, **shared)
        if self.skill == "gaze":
            return Gaze(eye=PointRef(*self.refs[0]), **shared)
        if self.skill == "embed":
            assert isinstance(self.image, bytes)
            return Embed(self.image, normalize=True)
        shared |= {"max_objects": self.max_objects, "spatial_refs": refs}
        if self.skill == "segment":
            return Segment(self.text, **shared)
        kind = Point if self.skill == "point" else Detect
        return kind(self.text, objects=self.objects, min_score=self.min_score, **shared)


@dataclass(frozen=True)
class Case:
    """A request, and how it must end: with an `answer`, or for a `reason` that names `fields`."""

    name: str
    ask: Ask
    answer: Any = None
    reason: str = "OK"
    fields: tuple[str, ...] = ()
    """Of the engine's requests; each frontend has names of its own."""
    engine: Callable[[], FakeEngine] = FakeEngine
    status: EngineStatus = EngineStatus.SERVING
    is_cancelled: bool = False
    num_before: int = 0
    """How many calls of the same kind come before."""


def holding(request: Request) -> Iterable[object]:
    """A script that has begun and does not end."""
    return [*answers(request)[:2], HOLD]


def waiting(request: Request) -> Iterable[object]:
    """A script that does not begin."""
    return [HOLD]


def without_segment() -> FakeEngine:
    return FakeEngine(skills=SKILLS.keys() - {"segment"})


def full() -> FakeEngine:
    return FakeEngine(max_queued_requests=0)


def failing(error: Callable[..., BaseException], *args: Any) -> Callable[[], FakeEngine]:
    """Each call fails with an exception of its own: frontends write their names of the fields into it."""
    return lambda: FakeEngine(fails(error(*args)))


_ANSWER = {"answer": "a kestrel"}
_INVALID = "INVALID_REQUEST"
_ALL = {"temperature": 0.5, "top_p": 0.25, "max_tokens": 7, "seed": 9}

CASES = (
    Case("a question", Ask(), _ANSWER),
    Case("a question about nothing", Ask(text="\u4ec0\u4e48\u9e1f? \U0001f426", image=None), _ANSWER),
    Case("a question that is reasoned about", Ask(reasoning=True), {**_ANSWER, "reasoning": REASONING}),
    Case(
        "a streamed question that is reasoned about",
        Ask(is_streamed=True, reasoning=True),
        {**_ANSWER, "reasoning": REASONING},
    ),
    Case("a question with all settings", Ask(sampling=_ALL), _ANSWER),
    Case("a question about a place", Ask(refs=((0.5, 0.25), (0.125, 0.25, 0.375, 0.5))), _ANSWER),
    Case("a large image", Ask(image=bytes(range(256)) * 4000), _ANSWER),
    Case("a short caption", Ask("caption", "short"), {"caption": "a short kestrel"}),
    Case("a streamed caption", Ask("caption", "long", is_streamed=True), {"caption": "a long kestrel"}),
    Case("points", Ask("point", "bird", max_objects=3, refs=((0.5, 0.5),)), {"points": POINTS}),
    Case("boxes", Ask("detect", "bird", max_objects=3, min_score=0.5, refs=(BOX,)), {"boxes": [BOX]}),
    Case(
        "boxes of several objects",
        Ask("detect", "", objects=("bird", "branch"), max_objects=3, min_score=0.5),
        {"groups": [("bird", [BOX]), ("branch", [BOX])]},
    ),
    Case("a gaze", Ask("gaze", "", refs=((0.5, 0.25),)), {"points": [(0.25, 0.75)]}),
    Case("an outline", Ask("segment", "bird", refs=((0.5, 0.5),)), {"path": "M 0 0 L 1 1 z", "box": BOX}),
    Case("an embedding", Ask("embed", ""), {"mean": [0.25, -0.5, 1.0]}),
    Case("an empty question", Ask(text=""), reason=_INVALID, fields=("question",)),
    Case("a question that is too long", Ask(text="a" * 70_000), reason=_INVALID, fields=("question",)),
    Case("no image where one is needed", Ask("caption", "short", image=b""), reason=_INVALID, fields=("image",)),
    Case(
        "a temperature, and an eye outside of the image",
        Ask("gaze", "", refs=((0.5, 2.0),), sampling={"temperature": -1.0}),
        reason=_INVALID,
        fields=("eye.y", "sampling.temperature"),
    ),
    Case(
        "too few objects, and a score that is none",
        Ask("point", "bird", max_objects=0, min_score=1.5),
        reason=_INVALID,
        fields=("max_objects", "min_score"),
    ),
    Case(
        "several violations",
        Ask(text=" ", sampling={"temperature": 1000.0, "top_p": 0.0, "max_tokens": 0}),
        reason=_INVALID,
        fields=("question", "sampling.temperature", "sampling.top_p", "sampling.max_tokens"),
    ),
    Case(
        "a place outside of the image",
        Ask(refs=((0.5, 2.0), (0.125, 0.25, 0.375, 0.5))),
        reason=_INVALID,
        fields=("spatial_refs[0].point.y",),
    ),
    Case("an unknown model", Ask(model="gull"), reason="MODEL_NOT_FOUND"),
    Case(
        "an address", Ask(image="https://example.com/a.png"), reason="IMAGE_URI_NOT_ALLOWED", fields=("image.uri",)
    ),
    Case("an image that is not stored", Ask(image=f"sha256:{'0' * 64}"), reason="IMAGE_NOT_FOUND"),
    Case(
        "an oversized image",
        Ask(image=bytes(MAX_IMAGE_BYTES + 1)),
        reason="IMAGE_TOO_LARGE",
        fields=("image",),
        engine=lambda: FakeEngine(max_image_bytes=MAX_IMAGE_BYTES),
    ),
    Case(
        "an image that is none",
        Ask(),
        reason="IMAGE_DECODE_FAILED",
        fields=("image",),
        engine=failing(ImageError, "cannot be decoded"),
    ),
    Case(
        "a prompt beyond the context",
        Ask(is_streamed=True),
        reason="CONTEXT_LENGTH_EXCEEDED",
        fields=("question",),
        engine=failing(ContextLengthExceeded, "question", 5000, 4096),
    ),
    Case("a skill that the model lacks", Ask("segment", "x"), reason="SKILL_UNSUPPORTED", engine=without_segment),
    Case("no token", Ask(token=None), reason="TOKEN_INVALID"),
    Case("a wrong token", Ask(token="mallory", is_streamed=True), reason="TOKEN_INVALID"),
    Case("a token without the scope", Ask(token="operator"), reason="SCOPE_REQUIRED"),
    Case("a token that called too often", Ask(token="limited"), reason="RATE_LIMITED", num_before=1),
    Case("a full queue", Ask(is_streamed=True), reason="QUEUE_FULL", engine=full),
    Case("too long in the queue", Ask(), reason="QUEUE_TIMEOUT", engine=failing(QueueTimeout, 1.5)),
    Case("a server that drains", Ask(), reason="DRAINING", status=EngineStatus.DRAINING),
    Case("a deadline", Ask(timeout_s=0.1), reason="DEADLINE_EXCEEDED", engine=lambda: FakeEngine(waiting)),
    Case("a cancellation", Ask(is_streamed=True), is_cancelled=True, engine=lambda: FakeEngine(holding)),
    Case("a request that broke the engine", Ask(), reason="REQUEST_REFUSED", engine=failing(RequestRefused, "x")),
    Case("a bug", Ask(), reason="INTERNAL", engine=failing(InternalError, ValueError("a secret"))),
)
