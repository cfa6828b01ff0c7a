"""Defines the messages between front ends and engine cores, in MessagePack.

Each message is a struct of msgspec, distinguished by its tag. Types of `api` are sent as they are; if they have
unions that MessagePack cannot distinguish, a struct with the same fields stands for them. Messages have no
versions, since both processes run the same build: `Hello` and `Welcome` compare builds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Union, get_type_hints

import msgspec

from kestrel_runtime.api.adapters import AdapterInfo
from kestrel_runtime.api.engine import ClearedCache, EngineInfo, EngineStatus, Load
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
    CaptionOutput,
    DetectOutput,
    Event,
    Finished,
    FinishReason,
    OutlineBox,
    Output,
    PointOutput,
    QueryOutput,
    SegmentOutput,
    Started,
    TextDelta,
    Timing,
    Usage,
)
from kestrel_runtime.api.images import RemoteImage
from kestrel_runtime.api.requests import (
    REQUEST_TYPES,
    BoxRef,
    Chat,
    ChatMessage,
    PointRef,
    Request,
    RequestOptions,
    Role,
)
from kestrel_runtime.api.sampling_params import SamplingParams

_MAX_REPEATED = 256
_PACKAGES = ("kestrel_client", "kestrel_grpc", "kestrel_ops", "kestrel_runtime")


class Message(msgspec.Struct, array_like=True, tag=True):
    """The base of messages: an array that begins with the name of its class."""


class ImageSummary(msgspec.Struct, array_like=True):
    """The facts about an image by which a core looks for it in its caches and plans its memory."""

    digest: bytes
    num_bytes: int
    """The size of the file, or of the pixels that the caller sent in its place."""
    width_px: int
    height_px: int
    """The sizes in the header, before the image is turned upright."""


class _WireTurn(msgspec.Struct, array_like=True):
    """A message of a conversation, with summaries of its images."""

    role: Role
    text: str
    images: tuple[ImageSummary, ...]


# Requests: a struct for each skill, with the fields of its request. Images are sent on their own.


_REPEATED: Mapping[str, Callable[[bytes], Any]] = MappingProxyType(
    {
        "sampling": lru_cache(_MAX_REPEATED)(msgspec.msgpack.Decoder(SamplingParams).decode),
        "options": lru_cache(_MAX_REPEATED)(msgspec.msgpack.Decoder(RequestOptions).decode),
    }
)
"""Fields that are equal in most requests, each encoded on its own: the values of equal bytes are decoded once."""


def _wire_type(name: str, hint: Any) -> Any:
    if name == "image":
        return ImageSummary | None
    if name == "messages":
        return tuple[_WireTurn, ...]
    if name in _REPEATED:
        return msgspec.Raw
    return tuple[tuple[float, ...], ...] if name == "spatial_refs" else hint


_REQUEST_FIELDS: Mapping[type[Request], tuple[str, ...]] = MappingProxyType(
    {kind: tuple(item.name for item in fields(kind)) for kind in REQUEST_TYPES}
)
_WIRE_REQUESTS: Mapping[type[Request], type[msgspec.Struct]] = MappingProxyType(
    {
        kind: msgspec.defstruct(
            f"Wire{kind.__name__}",
            [(name, _wire_type(name, get_type_hints(kind)[name])) for name in names],
            frozen=True,
            array_like=True,
            tag=kind.skill,
        )
        for kind, names in _REQUEST_FIELDS.items()
    }
)
_REQUEST_KINDS: Mapping[type[msgspec.Struct], type[Request]] = MappingProxyType(
    {wire: kind for kind, wire in _WIRE_REQUESTS.items()}
)
_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Union[tuple(_REQUEST_KINDS)]  # noqa: UP007  # pyrefly: ignore[invalid-annotation] for msgspec
)


def encode_request(request: Request, images: Sequence[ImageSummary]) -> bytes:
    """Encodes a request, with a summary in place of each of its images; without `images` they are left out."""
    summaries = iter(images)
    values = {name: getattr(request, name) for name in _REQUEST_FIELDS[type(request)]}
    for name in _REPEATED:
        values[name] = msgspec.Raw(_encoder.encode(values[name]))
    if "image" in values:
        values["image"] = next(summaries, None)
    if isinstance(request, Chat):
        values["messages"] = tuple(
            _WireTurn(message.role, message.text, tuple(islice(summaries, len(message.images))))
            for message in request.messages
        )
    if "spatial_refs" in values:
        values["spatial_refs"] = tuple(
            (ref.x, ref.y) if isinstance(ref, PointRef) else (ref.x_min, ref.y_min, ref.x_max, ref.y_max)
            for ref in request.spatial_refs
        )
    return _encoder.encode(_WIRE_REQUESTS[type(request)](**values))


def decode_request(data: bytes, new_image: Callable[[ImageSummary], RemoteImage]) -> Request:
    """Decodes a request. It is not checked again: the other process has checked it."""
    wire = _request_decoder.decode(data)
    kind = _REQUEST_KINDS[type(wire)]
    request = object.__new__(kind)
    for name in _REQUEST_FIELDS[kind]:
        value: Any = getattr(wire, name)
        if name in _REPEATED:
            value = _REPEATED[name](bytes(value))
        elif name == "image" and value is not None:
            value = new_image(value)
        elif name == "messages":
            value = tuple(
                ChatMessage(turn.role, turn.text, tuple(map(new_image, turn.images))) for turn in wire.messages
            )
        elif name == "spatial_refs":
            value = tuple(PointRef(*ref) if len(ref) == 2 else BoxRef(*ref) for ref in wire.spatial_refs)
        object.__setattr__(request, name, value)
    return request


# Events


class _Query(Message):
    output: QueryOutput


class _Caption(Message):
    output: CaptionOutput


class _Point(Message):
    output: PointOutput


class _Detect(Message):
    output: DetectOutput


class _Segment(Message):
    output: SegmentOutput


_WireOutput = _Query | _Caption | _Point | _Detect | _Segment
_WIRE_OUTPUTS: Mapping[type[Output], Callable[[Any], _WireOutput]] = MappingProxyType(
    {
        QueryOutput: _Query,
        CaptionOutput: _Caption,
        PointOutput: _Point,
        DetectOutput: _Detect,
        SegmentOutput: _Segment,
    }
)


class _Started(Message):
    usage: Usage


class _Delta(Message):
    delta: TextDelta


class _Box(Message):
    box: OutlineBox


class _Finished(Message):
    output: _WireOutput
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    stop_sequence: str | None
    image_size_px: tuple[int, int] | None


class _Error(Message):
    """An error of the engine. Values are the arguments of its constructor; see `_ERRORS`."""

    name: str
    values: tuple[Any, ...]


_WireEvent = _Started | _Delta | _Box | _Finished


def _to_wire(event: Event) -> _WireEvent:
    if isinstance(event, TextDelta):
        return _Delta(event)
    if isinstance(event, Started):
        return _Started(event.usage)
    if isinstance(event, OutlineBox):
        return _Box(event)
    assert not event.alternatives, "an engine answers with one sample"
    output = _WIRE_OUTPUTS[type(event.output)](event.output)
    return _Finished(
        output, event.finish_reason, event.usage, event.timing, event.stop_sequence, event.image_size_px
    )


def _from_wire(event: _WireEvent) -> Event:
    if isinstance(event, _Delta):
        return event.delta
    if isinstance(event, _Started):
        return Started(event.usage)
    if isinstance(event, _Box):
        return event.box
    return Finished(
        event.output.output,
        event.finish_reason,
        event.usage,
        event.timing,
        event.stop_sequence,
        event.image_size_px,
    )


# Errors


class CoreFault(Exception):
    """Stands for an exception inside an engine core, whose log has the details."""


class _Kind(NamedTuple):
    values_of: Callable[[Any], tuple[Any, ...]]
    make: Callable[..., KestrelError]


def _violations(pairs: Sequence[Sequence[str]]) -> tuple[Violation, ...]:
    return tuple(Violation(*pair) for pair in pairs)


_ERRORS: Mapping[type[KestrelError], _Kind] = MappingProxyType(
    {
        InvalidRequest: _Kind(
            lambda error: (tuple((item.field, item.description) for item in error.violations),),
            lambda pairs: InvalidRequest(_violations(pairs)),
        ),
        ImageError: _Kind(
            lambda error: (error.violations[0].description, error.too_large, error.violations[0].field),
            lambda description, too_large, field: ImageError(description, too_large=too_large, field=field),
        ),
        ContextLengthExceeded: _Kind(
            lambda error: (error.violations[0].field, error.num_prompt_tokens, error.max_context_tokens),
            ContextLengthExceeded,
        ),
        ModelNotFound: _Kind(lambda error: (error.model, error.hint), ModelNotFound),
        AdapterNotFound: _Kind(lambda error: (error.name, error.hint), AdapterNotFound),
        AdapterInvalid: _Kind(
            lambda error: (error.name, error.problems), lambda name, problems: AdapterInvalid(name, tuple(problems))
        ),
        SkillUnsupported: _Kind(lambda error: (error.skill, error.model), SkillUnsupported),
        Overloaded: _Kind(
            lambda error: (error.limit, error.retry_after_s, error.bound.value, error.is_tenant_share),
            lambda limit, retry_after_s, bound, is_share: Overloaded(
                limit, retry_after_s, QueueBound(bound), is_tenant_share=is_share
            ),
        ),
        NumbersOverflowed: _Kind(lambda error: (error.adapter,), NumbersOverflowed),
        AnswerOutsideSchema: _Kind(lambda error: (error.place,), AnswerOutsideSchema),
        QueueTimeout: _Kind(lambda error: (error.waited_s,), QueueTimeout),
        InternalError: _Kind(lambda error: (), lambda: InternalError(CoreFault())),
        **{
            kind: _Kind(lambda error: (str(error),), kind)
            for kind in (RequestRefused, ConstraintFailed, DeadlineExceeded, EngineUnavailable)
        },
    }
)
_ERROR_KINDS: Mapping[str, _Kind] = MappingProxyType({kind.__name__: entry for kind, entry in _ERRORS.items()})


def encode_error(error: KestrelError) -> _Error:
    """Encodes an error; a subclass that is not in `_ERRORS` is encoded as its base."""
    kind = next(kind for kind in type(error).__mro__ if kind in _ERRORS or kind is KestrelError)
    if kind is KestrelError:
        return _Error(InternalError.__name__, ())
    return _Error(kind.__name__, _ERRORS[kind].values_of(error))


def decode_error(error: _Error) -> KestrelError:
    """Returns the error that was encoded."""
    return _ERROR_KINDS[error.name].make(*error.values)


# From a front end to a core


class Hello(Message):
    """Introduces a front end: its first message."""

    identity: str
    build: str


class Submit(Message):
    """Submits a request, with an id for each sample. `deadline` is a moment of the system's monotonic clock."""

    ids: tuple[int, ...]
    request: bytes
    deadline: float | None
    tenant: str
    namespace: str


class OnlyEnd(Message):
    """Notes that callers wait for the end of these requests alone: earlier events need not be sent."""

    ids: tuple[int, ...]


class Cancel(Message):
    """Cancels these requests."""

    ids: tuple[int, ...]


class Pixels(Message):
    """Answers `NeedPixels`, with a file of the pixels as in `DecodedPixels`, or with an error."""

    number: int
    width_px: int
    height_px: int
    error: _Error | None = None


class Isolate(Message):
    """Asks to run each of these requests alone: they were in flight when the process of a core ended."""

    fingerprints: tuple[str, ...]


class Quarantine(Message):
    """Asks to refuse these requests, which have ended processes of cores."""

    fingerprints: tuple[str, ...]


class Expect(Message):
    """Asks for a place in the queue for a request whose image is still being fetched."""

    number: int
    request: bytes
    deadline: float | None
    tenant: str


class Release(Message):
    """Gives back the place of the `Expect` of this number."""

    number: int


class ClearCache(Message):
    """Asks to remove what is cached for a namespace, or for all."""

    number: int
    namespace: str | None


class ForgetImage(Message):
    """Asks to remove what is cached for one image of a namespace."""

    number: int
    digest: bytes
    namespace: str


class AdapterNames(Message):
    """Asks for the names of adapters."""

    number: int


class LoadAdapter(Message):
    """Asks to read an adapter again."""

    number: int
    name: str


class UnloadAdapter(Message):
    """Asks to free the slot of an adapter."""

    number: int
    name: str


Operation = Expect | ClearCache | ForgetImage | AdapterNames | LoadAdapter | UnloadAdapter
"""Messages that are answered with an `Answer` of the same number."""
ToCore = Hello | Submit | OnlyEnd | Cancel | Pixels | Isolate | Quarantine | Release | Operation


# From a core to its front ends


class Welcome(Message):
    """Answers `Hello`."""

    build: str
    info: EngineInfo
    process_id: int


class CoreState(Message):
    """Reports the state of a core, when it changes and several times a second."""

    status: EngineStatus
    load: Load
    adapters: tuple[AdapterInfo, ...]


class EventsOf(msgspec.Struct, array_like=True):
    """The next events of one request; an error is the last."""

    id: int
    events: tuple[_WireEvent, ...]
    error: _Error | None = None


class Events(Message):
    """Delivers the events of one turn of the engine."""

    of_requests: tuple[EventsOf, ...]


class CompletedAlone(Message):
    """Reports that an isolated request completed."""

    fingerprint: str


class NeedPixels(Message):
    """Asks for the decoded image of the request that one of whose ids is `id`."""

    number: int
    id: int


class Answer(Message):
    """Answers the operation of this number."""

    number: int
    error: _Error | None = None
    cleared: ClearedCache | None = None
    names: tuple[str, ...] = ()
    adapter: AdapterInfo | None = None


FromCore = Welcome | CoreState | Events | NeedPixels | CompletedAlone | Answer

_to_core_decoder = msgspec.msgpack.Decoder(list[ToCore])
_from_core_decoder = msgspec.msgpack.Decoder(FromCore)


def encode(message: FromCore) -> bytes:
    """Encodes a message of a core."""
    return _encoder.encode(message)


def encode_to_core(sent: Sequence[ToCore]) -> bytes:
    """Encodes messages of a front end that are sent together."""
    return _encoder.encode(sent)


def decode_to_core(data: bytes | memoryview) -> list[ToCore]:
    """Decodes messages of a front end. Raises `msgspec.ValidationError` if the builds differ."""
    return _to_core_decoder.decode(data)


def decode_from_core(data: bytes | memoryview) -> FromCore:
    """Decodes a message of a core. Raises `msgspec.ValidationError` if the builds differ."""
    return _from_core_decoder.decode(data)


def events_of(id: int, events: Sequence[Event], error: KestrelError | None = None) -> EventsOf:
    """Encodes events of a request."""
    return EventsOf(id, tuple(map(_to_wire, events)), None if error is None else encode_error(error))


def events_in(item: EventsOf) -> tuple[list[Event], KestrelError | None]:
    """Decodes events of a request."""
    return list(map(_from_wire, item.events)), None if item.error is None else decode_error(item.error)


@cache
def build_id() -> str:
    """Returns a digest of the code of the server's packages, as it was on the disk at the first call."""
    digest = hashlib.sha256()
    for name in _PACKAGES:
        spec = find_spec(name)
        for folder in () if spec is None else spec.submodule_search_locations or ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{name}/{path.relative_to(folder)}".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
