"""Defines the requests: one frozen value per skill, checked when it is made.

Each constructor raises `InvalidRequest` with every violation at once. Defaults follow the published ones of the
models' own engine.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from enum import Enum, IntEnum, auto
from typing import ClassVar, Protocol, Self, get_args

from msgspec import Struct

from kestrel_runtime.api.adapters import AdapterName
from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.errors import InvalidRequest, Violation
from kestrel_runtime.api.images import Image, RawImage
from kestrel_runtime.api.sampling_params import SamplingParams

CAPTION_LENGTHS = ("short", "normal", "long")
MASK_FORMATS = ("svg", "polygon", "rle", "png")
EMBEDDING_TYPES = ("float16", "float32")
MAX_OBJECTS = 1_000
MAX_OBJECT_NAMES = 64
"""The most names of objects in one request."""
MAX_TEXT_BYTES = 65_536
"""The most bytes of a question or an object's name, in UTF-8: more than the contexts of the models hold.

A text that exceeds a model's context is only known once it is tokenised, which takes time in proportion to its
length.
"""
MAX_SPATIAL_REFS = 256
MAX_CHAT_MESSAGES = 256
MAX_CHAT_IMAGES = 16


class PointRef(Struct, frozen=True, array_like=True, tag=True):
    """A place in the image to ask about; `x` and `y` are in [0, 1] from the top left corner."""

    x: float
    y: float


class BoxRef(Struct, frozen=True, array_like=True, tag=True):
    """A region of the image to ask about; every side is in [0, 1] from the top left corner."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float


SpatialRef = PointRef | BoxRef


class Priority(IntEnum):
    """The urgency of a request among the waiting requests of its tenant; the lowest value starts first."""

    INTERACTIVE = 0
    """A person is waiting for the answer."""
    NORMAL = 1
    BATCH = 2
    """Other requests go first, those of other tenants included: a program waits for the answer, not a person."""


class CachePolicy(Enum):
    """Says how a request uses the caches of prompts and image embeddings."""

    USE = auto()
    """The request uses cached data, and the data that it computes is cached."""
    REFRESH = auto()
    """The request computes everything again, and replaces the cached data."""
    BYPASS = auto()
    """The request neither uses the caches nor adds to them."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options that all skills share."""

    model: str = ""
    """The name of the model; "" takes the served one."""
    max_queue_s: float | None = None
    """The longest wait before the request starts, in seconds; None for no bound."""
    priority: Priority = Priority.NORMAL
    cache: CachePolicy = CachePolicy.USE
    adapter: str = ""
    """The name of an adapter; "" for none."""
    max_priority: Priority = Priority.NORMAL
    """The highest priority that the request may have between tenants. Callers cannot choose it."""
    is_transient: bool = False
    """True if nothing of the request takes the place of what is cached of others, as for a frame of a camera, which
    is hardly asked about again. Callers cannot choose it."""

    @property
    def standing(self) -> Priority:
        """The priority of the request compared with requests of other tenants."""
        return max(self.priority, self.max_priority)

    def violations(self) -> Iterator[Violation]:
        """Yields every violation of the contract, with paths that begin with `options`."""
        if self.max_queue_s is not None and not (self.max_queue_s > 0.0 and math.isfinite(self.max_queue_s)):
            yield Violation("options.max_queue_duration", "must be positive")
        if self.adapter and AdapterName.parse(self.adapter) is None:
            yield Violation("options.adapter", "must be the name of an adapter, such as name or name@step")


@dataclass(frozen=True, slots=True)
class _Checked(ABC):
    """Checks a request when it is made and raises all violations together, as `InvalidRequest`."""

    checks: InitVar[bool] = field(default=True, kw_only=True)
    """False for the values of a request that was checked in another process."""

    def __post_init__(self, checks: bool) -> None:
        violations = tuple(self.violations()) if checks else ()
        if violations:
            raise InvalidRequest(violations)

    @classmethod
    @abstractmethod
    def example(cls, image: bytes, sampling: SamplingParams) -> Self:
        """Returns a small request, which an engine runs before it serves callers."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The text of the request, for logs and for estimates of the prompt's length."""

    @property
    @abstractmethod
    def images(self) -> tuple[Image, ...]:
        """The images of the request, in the order of the prompt."""

    @abstractmethod
    def with_images(self, images: tuple[Image, ...]) -> Self:
        """Returns the request with other images in place of its own, one for each."""

    @abstractmethod
    def violations(self) -> Iterator[Violation]:
        """Yields every violation of the request's contract."""


class _HasImage(Protocol):
    @property
    def image(self) -> Image | None: ...


@dataclass(frozen=True, slots=True)
class _AboutOneImage(_Checked):
    """A request with a field `image`."""

    @property
    def images(self: _HasImage) -> tuple[Image, ...]:
        return () if self.image is None else (self.image,)

    def with_images(self, images: tuple[Image, ...]) -> Self:
        (image,) = images or (None,)
        return replace(self, image=image)


@dataclass(frozen=True, slots=True)
class Query(_AboutOneImage):
    """A question, with or without an image; `image` is an encoded file's bytes, or pixels.

    `constraint` defines the form of the answer; the reasoning before it is free.
    """

    question: str
    """The question, of at most `MAX_TEXT_BYTES`."""
    image: Image | None = None
    """An encoded file's bytes, or pixels; None for a question about no image."""
    reasoning: bool = False
    """True if the model writes its reasoning before the answer."""
    spatial_refs: tuple[SpatialRef, ...] = ()
    """Places in the image that the question refers to, at most `MAX_SPATIAL_REFS`."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    options: RequestOptions = field(default_factory=RequestOptions)
    constraint: Constraint | None = None
    """The form of the answer; None for any text. The reasoning is not constrained."""
    skill: ClassVar[str] = "query"
    objects: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def example(cls, image: bytes, sampling: SamplingParams) -> Self:
        return cls("hello", image, sampling=sampling)

    @property
    def text(self) -> str:
        return self.question

    def violations(self) -> Iterator[Violation]:
        yield from _text("question", self.question)
        if self.image is not None:
            yield from _image(self.image)
        elif self.spatial_refs:
            yield Violation("spatial_refs", "need an image")
        yield from _spatial_refs(self.spatial_refs)
        yield from self.sampling.violations()
        yield from self.options.violations()
        if self.constraint is not None:
            yield from self.constraint.violations()


class Role(Enum):
    """Says who speaks in a message of a conversation."""

    SYSTEM = "system"
    """The one who has set the conversation up. Such messages precede all others."""
    USER = "user"
    ASSISTANT = "assistant"
    """The model, in an earlier turn."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of a conversation. Only `text` of the last message must not be empty."""

    role: Role
    text: str
    images: tuple[Image, ...] = ()
    """Encoded files' bytes, or pixels, which precede the text. Only messages of the user have images."""


@dataclass(frozen=True, slots=True)
class Chat(_Checked):
    """A conversation whose last message, of the user, the model answers.

    All messages together have at most `MAX_CHAT_IMAGES` images. `constraint` defines the form of the answer; the
    reasoning before it is free.
    """

    messages: tuple[ChatMessage, ...]
    reasoning: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    options: RequestOptions = field(default_factory=RequestOptions)
    constraint: Constraint | None = None
    skill: ClassVar[str] = "chat"
    objects: ClassVar[tuple[str, ...]] = ()
    spatial_refs: ClassVar[tuple[SpatialRef, ...]] = ()

    @classmethod
    def example(cls, image: bytes, sampling: SamplingParams) -> Self:
        return cls((ChatMessage(Role.USER, "hello", (image,)),), sampling=sampling)

    @property
    def text(self) -> str:
        return "\n\n".join(message.text for message in self.messages)

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(image for message in self.messages for image in message.images)

    @property
    def turns(self) -> tuple[tuple[Role, str, int], ...]:
        """The role, the text and the number of images of each message: the messages without their images."""
        return tuple((message.role, message.text, len(message.images)) for message in self.messages)

    def with_images(self, images: tuple[Image, ...]) -> Self:
        others = iter(images)
        messages = tuple(
            replace(message, images=tuple(next(others) for _ in message.images)) for message in self.messages
        )
        return replace(self, messages=messages)

    def violations(self) -> Iterator[Violation]:
        yield from _messages(self.messages)
        yield from self.sampling.violations()
        yield from self.options.violations()
        if self.constraint is not None:
            yield from self.constraint.violations()


@dataclass(frozen=True, slots=True)
class Caption(_AboutOneImage):
    """A request for a description of an image; `length` is one of `CAPTION_LENGTHS`."""

    image: Image
    length: str = "normal"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    options: RequestOptions = field(default_factory=RequestOptions)
    skill: ClassVar[str] = "caption"
    objects: ClassVar[tuple[str, ...]] = ()
    constraint: ClassVar[None] = None
    spatial_refs: ClassVar[tuple[SpatialRef, ...]] = ()

    @classmethod
    def example(cls, image: bytes, sampling: SamplingParams) -> Self:
        return cls(image, sampling=sampling)

    @property
    def text(self) -> str:
        return self.length

    def violations(self) -> Iterator[Violation]:
        yield from _image(self.image)
        if self.length not in CAPTION_LENGTHS:
            yield Violation("length", f"must be one of {', '.join(CAPTION_LENGTHS)}")
        yield from self.sampling.violations()
        yield from self.options.violations()


@dataclass(frozen=True, slots=True)
class _ObjectRequest(_AboutOneImage):
    """The fields that point, detect and segment share; `object` names what to look for."""

    object: str
    """The name of the objects to look for, of at most `MAX_TEXT_BYTES`."""
    image: Image
    max_objects: int | None = None
    """The most objects that are found, up to `MAX_OBJECTS`; None takes the default of 150."""
    spatial_refs: tuple[SpatialRef, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    options: RequestOptions = field(default_factory=RequestOptions)
    constraint: ClassVar[None] = None

    @classmethod
    def example(cls, image: bytes, sampling: SamplingParams) -> Self:
        return cls("thing", image, max_objects=1, sampling=sampling)

    @property
    def text(self) -> str:
        return self.object

    def _object_violations(self) -> Iterator[Violation]:
        yield from _text("object", self.object)

    def violations(self) -> Iterator[Violation]:
        yield from self._object_violations()
        yield from _image(self.image)
        if self.max_objects is not None and not 1 <= self.max_objects <= MAX_OBJECTS:
            yield Violation("max_objects", f"must be from 1 to {MAX_OBJECTS}")
        yield from _spatial_refs(self.spatial_refs)
        yield from self.sampling.violations(is_text=False)
        yield from self.options.violations()


@dataclass(frozen=True, slots=True)
class _ObjectsRequest(_ObjectRequest):
    """A request about objects of one kind, or of several kinds in `objects`, each of which has its own answer."""

    objects: tuple[str, ...] = ()
    """The names of several objects, at most `MAX_OBJECT_NAMES`, in place of `object`, which is then empty."""
    min_score: float | None = None
    """The least score, from 0 to 1, of objects in the answer; None for all. Others count towards `max_objects`."""

    @property
    def text(self) -> str:
        return "\n".join(self.objects) or self.object

    def _object_violations(self) -> Iterator[Violation]:
        if not self.objects:
            yield from _text("object", self.object)
            return
        if self.object:
            yield Violation("object", "must be empty if there are objects")
        if len(self.objects) > MAX_OBJECT_NAMES:
            yield Violation("objects", f"must be at most {MAX_OBJECT_NAMES}")
        for index, name in enumerate(self.objects[:MAX_OBJECT_NAMES]):
            yield from _text(f"objects[{index}]", name)

    def violations(self) -> Iterator[Violation]:
        yield from _ObjectRequest.violations(self)
        if self.min_score is not None and not 0.0 <= self.min_score <= 1.0:  # also catches NaN
            yield Violation("min_score", "must be from 0 to 1")


@dataclass(frozen=True, slots=True)
class Point(_ObjectsRequest):
    """A request for the place of each object of a kind; `max_objects` None takes the default of 150."""

    skill: ClassVar[str] = "point"


@dataclass(frozen=True, slots=True)
class Detect(_ObjectsRequest):
    """A request for a box around each object of a kind; `max_objects` None takes the default of 150."""

    skill: ClassVar[str] = "detect"


@dataclass(frozen=True, slots=True)
class Segment(_ObjectRequest):
    """A request for the outline of one object of a kind. `max_objects` does not apply to it."""

    mask_format: str = "svg"
    """The form of the outline that the caller wants in addition to its path, one of `MASK_FORMATS`."""
    skill: ClassVar[str] = "segment"
    objects: ClassVar[tuple[str, ...]] = ()

    def violations(self) -> Iterator[Violation]:
        yield from _ObjectRequest.violations(self)
        if self.mask_format not in MASK_FORMATS:
            yield Violation("mask_format", f"must be one of {', '.join(MASK_FORMATS)}")


@dataclass(frozen=True, slots=True)
class Gaze(_AboutOneImage):
    """A request for the point that a person looks at; `eye` is the position of an eye or the middle of both."""

    image: Image
    eye: PointRef
    sampling: SamplingParams = field(default_factory=SamplingParams)
    options: RequestOptions = field(default_factory=RequestOptions)
    skill: ClassVar[str] = "gaze"
    objects: ClassVar[tuple[str, ...]] = ()
    constraint: ClassVar[None] = None

    @classmethod
    def example(cls, image: bytes, sampling: SamplingParams) -> Self:
        return cls(image, PointRef(0.5, 0.5), sampling=sampling)

    @property
    def text(self) -> str:
        return self.skill

    @property
    def spatial_refs(self) -> tuple[SpatialRef, ...]:
        return (self.eye,)

    def violations(self) -> Iterator[Violation]:
        yield from _image(self.image)
        for name in ("x", "y"):
            if not 0.0 <= getattr(self.eye, name) <= 1.0:
                yield Violation(f"eye.{name}", "must be from 0 to 1")
        yield from self.sampling.violations(is_text=False)
        yield from self.options.violations()


@dataclass(frozen=True, slots=True)
class Embed(_AboutOneImage):
    """A request for the embeddings of an image: what the vision encoder computes for each of its patches, and their
    mean. Nothing is sampled."""

    image: Image
    patches: bool = False
    """True for the embeddings of all patches in addition to their mean."""
    normalize: bool = False
    """True to scale the mean, and each patch, to the length 1."""
    dtype: str = "float16"
    """The format of the patches, one of `EMBEDDING_TYPES`. The mean has float32."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    options: RequestOptions = field(default_factory=RequestOptions)
    skill: ClassVar[str] = "embed"
    objects: ClassVar[tuple[str, ...]] = ()
    constraint: ClassVar[None] = None
    spatial_refs: ClassVar[tuple[SpatialRef, ...]] = ()

    @classmethod
    def example(cls, image: bytes, sampling: SamplingParams) -> Self:
        return cls(image, patches=True)

    @property
    def text(self) -> str:
        return self.skill

    def violations(self) -> Iterator[Violation]:
        yield from _image(self.image)
        if self.dtype not in EMBEDDING_TYPES:
            yield Violation("dtype", f"must be one of {', '.join(EMBEDDING_TYPES)}")
        yield from self.sampling.violations(is_text=False)
        yield from self.options.violations()
        if self.options.adapter:
            yield Violation("options.adapter", "must be empty: adapters do not change the vision encoder")


Request = Query | Caption | Point | Detect | Segment | Gaze | Chat | Embed
REQUEST_TYPES: tuple[type[Request], ...] = get_args(Request)


def parts_of(request: Request) -> Sequence[Request]:
    """Returns the requests that are answered one by one: one for each of several objects, or for each sample."""
    if request.objects and isinstance(request, Point | Detect):
        return [replace(request, object=name, objects=()) for name in request.objects]
    samples = request.sampling.samples()
    return [request] if len(samples) == 1 else [replace(request, sampling=sampling) for sampling in samples]


def fields_without_images(kind: type[Request]) -> tuple[str, ...]:
    """Returns the names of the fields of a kind of request without its images: `turns` replaces `messages`."""
    names = (item.name for item in fields(kind) if item.name != "image")
    return tuple("turns" if name == "messages" else name for name in names)


def image_paths(request: Request) -> list[str]:
    """Returns the path of each image of a request, in the order of `images`."""
    if not isinstance(request, Chat):
        return ["image"] * len(request.images)
    return [
        f"messages[{index}].images[{place}]"
        for index, message in enumerate(request.messages)
        for place in range(len(message.images))
    ]


def locate(error: InvalidRequest, request: Request, place: int) -> None:
    """Gives an error about an `image` the path of the image at this place among the images of a request."""
    path = image_paths(request)[place]
    error.rename(lambda field: f"{path}{field.removeprefix('image')}" if field.startswith("image") else field)


def _messages(messages: tuple[ChatMessage, ...]) -> Iterator[Violation]:
    if not 1 <= len(messages) <= MAX_CHAT_MESSAGES:
        yield too_many_messages()
        return
    is_led = True  # until somebody speaks to the model
    for index, message in enumerate(messages):
        if message.role is not Role.SYSTEM:
            is_led = False
        elif not is_led:
            yield Violation(f"messages[{index}].role", "must precede all messages of other roles")
    last = len(messages) - 1
    if messages[last].role is not Role.USER:
        yield Violation(f"messages[{last}].role", "must be user in the last message")
    elif not messages[last].text.strip():
        yield Violation(f"messages[{last}].content", "must not be empty")
    if _is_too_long("".join(message.text for message in messages)):
        yield Violation("messages", f"must be at most {MAX_TEXT_BYTES} bytes long together")
    num_images = sum(len(message.images) for message in messages)
    if num_images > MAX_CHAT_IMAGES:
        yield Violation("messages", f"must have at most {MAX_CHAT_IMAGES} images, and have {num_images}")
        return
    for index, message in enumerate(messages):
        if message.images and message.role is not Role.USER:
            yield Violation(f"messages[{index}].images", "belong to messages of the user only")
        for place, image in enumerate(message.images):
            for found in _image(image):
                path = found.field.removeprefix("image")
                yield Violation(f"messages[{index}].images[{place}]{path}", found.description)


def _is_too_long(text: str) -> bool:
    # A character takes four bytes at most.
    return 4 * len(text) > MAX_TEXT_BYTES and len(text.encode(errors="replace")) > MAX_TEXT_BYTES


def _text(name: str, value: str) -> Iterator[Violation]:
    if _is_too_long(value):
        yield Violation(name, f"must be at most {MAX_TEXT_BYTES} bytes long")
    elif not value.strip():
        yield Violation(name, "must not be empty")


def _image(value: Image) -> Iterator[Violation]:
    if isinstance(value, RawImage):
        yield from value.violations()
    elif not value:
        yield Violation("image", "must not be empty")


def too_many_messages() -> Violation:
    """Returns the violation of a conversation without messages, or with more than `MAX_CHAT_MESSAGES`."""
    return Violation("messages", f"must be from 1 to {MAX_CHAT_MESSAGES}")


def too_many_spatial_refs() -> Violation:
    """Returns the violation of a request with more than `MAX_SPATIAL_REFS` references."""
    return Violation("spatial_refs", f"must be at most {MAX_SPATIAL_REFS}")


def _spatial_refs(refs: tuple[SpatialRef, ...]) -> Iterator[Violation]:
    if len(refs) > MAX_SPATIAL_REFS:
        yield too_many_spatial_refs()
        return
    for index, ref in enumerate(refs):
        path = f"spatial_refs[{index}]"
        if isinstance(ref, PointRef):
            sides = {"point.x": ref.x, "point.y": ref.y}
        else:
            sides = {
                "box.x_min": ref.x_min,
                "box.y_min": ref.y_min,
                "box.x_max": ref.x_max,
                "box.y_max": ref.y_max,
            }
            if ref.x_min > ref.x_max:
                yield Violation(f"{path}.box.x_max", "must not be below x_min")
            if ref.y_min > ref.y_max:
                yield Violation(f"{path}.box.y_max", "must not be below y_min")
        for name, value in sides.items():
            if not 0.0 <= value <= 1.0:
                yield Violation(f"{path}.{name}", "must be from 0 to 1")
