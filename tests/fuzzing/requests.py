"""Messages with anything in their fields, and bytes that are hardly any. `parse` is what must hold for each."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st

from kestrel_client.v1 import image_service_pb2, vision_service_pb2
from kestrel_grpc.calls.errors import CallFailure, describe
from kestrel_grpc.frontends.grpc import image_service
from kestrel_grpc.frontends.grpc.frame_streams import request_about_frames
from kestrel_grpc.frontends.grpc.parsing import chunk_of, framed, parsed
from kestrel_grpc.frontends.grpc.status import trailing_metadata
from kestrel_grpc.frontends.grpc.vision_service import BINDINGS
from kestrel_grpc.images.image_uris import allowed_target, parse_hosts
from kestrel_grpc.images.stored_images import ImageHandle, ImageUri
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import InvalidRequest, Overloaded
from kestrel_runtime.api.requests import Detect, Point, Request, parts_of
from kestrel_runtime.constraints.compiler import ConstraintCompiler, new_vocabulary
from kestrel_runtime.engine.preprocessing import Preprocessor
from kestrel_runtime.engine.recent import Matchers
from kestrel_runtime.memory.host_limits import available_processors
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.sequence import SequenceClock
from tests.fuzzing.images import damaged, images
from tests.runtime.preprocessors import new_preprocessor

# As the table of errors promises them for input that is no good.
REASONS = frozenset(
    (
        "INVALID_REQUEST",
        "IMAGE_DECODE_FAILED",
        "IMAGE_TOO_LARGE",
        "IMAGE_URI_NOT_ALLOWED",
        "CONTEXT_LENGTH_EXCEEDED",
    )
)
# What gRPC carries at most in the headers of a call, with a margin for headers of other origin.
_MAX_TRAILER_BYTES = 8_192
_HOSTS = parse_hosts("example.com,.example.org")
_MAX_CONTEXT = 256
_MAX_PIXELS = 250_000
_MAX_IMAGE_BYTES = 2**20
_SERVICES: Any = (
    vision_service_pb2.DESCRIPTOR.services_by_name["VisionService"],
    image_service_pb2.DESCRIPTOR.services_by_name["ImageService"],
)
_METHODS: Any = {method.name: method for service in _SERVICES for method in service.methods}


def _part_of_upload(message: Any) -> object:
    if message.WhichOneof("part") == "header":
        return image_service.upload_header(message, _MAX_IMAGE_BYTES)
    return chunk_of(message)


def _part_of_frames(rpc: str) -> Callable[[Any], object]:
    """Takes the settings of a stream of frames, or one of its frames, as far as the engine's queue."""
    (binding,) = (item for item in BINDINGS if item.rpc == rpc)
    about = Detect("car", b"?") if rpc == "Detect" else Point("", b"?", objects=("car", "dog"))

    def take(message: Any) -> None:
        if message.WhichOneof("part") != "frame":
            request_about_frames(message, binding)
            return
        asked = framed(about, message.frame.image)
        for reference in asked.references:
            if isinstance(reference, ImageUri):
                allowed_target(reference.uri, _HOSTS)
        prepare(asked.request)

    return take


PARSERS: Mapping[str, Callable[[Any], object]] = MappingProxyType(
    {
        **{binding.rpc: binding.parse for binding in BINDINGS},
        "DetectFrames": _part_of_frames("Detect"),
        "PointFrames": _part_of_frames("Point"),
        "UploadImage": _part_of_upload,
        "PutImage": image_service.put_image,
        "GetImage": lambda message: ImageHandle.require(message.image_id),
        "DeleteImage": lambda message: ImageHandle.require(message.image_id),
    }
)


def methods() -> list[str]:
    """Every RPC that takes an image, or names one."""
    return sorted(_METHODS)


def paths() -> list[str]:
    """Their paths in HTTP/2."""
    return [f"/{method.containing_service.full_name}/{name}" for name, method in sorted(_METHODS.items())]


def parse(method: str, data: bytes) -> str:
    """Take a request as far as the engine's queue, or to the status that its caller is told; returns which."""
    try:
        message: Any = message_type(method).FromString(data)
    except DecodeError:
        return "no message"
    try:
        request = PARSERS[method](message)
        if not isinstance(request, Request):
            return "understood"
        for reference in parsed(lambda _: request, message).references:
            if isinstance(reference, ImageUri):
                allowed_target(reference.uri, _HOSTS)
        prepare(request)
    except InvalidRequest as error:
        return told(error)
    except Overloaded as error:  # a constraint that a busy machine does not compile in time
        return told(error, more_reasons=frozenset({"QUEUE_FULL"}))
    return "prepared"


def prepare(request: Request) -> None:
    """Take a request as far as the engine's queue. Raises `InvalidRequest`."""
    for part in parts_of(request):
        _preprocessor().prepare(part, SequenceClock(submitted=0.0))


def told(
    error: Exception,
    translate_failure: Callable[[CallFailure], CallFailure] = lambda failure: failure,
    more_reasons: frozenset[str] = frozenset(),
) -> str:
    """The reason that a caller is told for an error, in its frontend's words; checks that the status is small."""
    assert not isinstance(error, InvalidRequest) or error.violations
    failure = translate_failure(describe(error))
    assert failure.reason in REASONS | more_reasons, failure.reason
    trailers = (*trailing_metadata(failure, "a-request"), ("grpc-message", quote(failure.message)))
    assert sum(len(key) + len(value) for key, value in trailers) < _MAX_TRAILER_BYTES
    return failure.reason


def message_type(method: str) -> type[Message]:
    """The request of an RPC."""
    return _METHODS[method].input_type._concrete_class


def requests(method: str) -> st.SearchStrategy[bytes]:
    """What may arrive as the request of an RPC."""
    well_formed = _messages(message_type(method)).map(lambda message: message.SerializeToString())
    return st.one_of(well_formed, damaged(well_formed), st.binary(max_size=200))


def _messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of a kind with any of their fields set to anything that the field can carry."""
    descriptor: Any = kind.DESCRIPTOR
    values = {field.name: _values(field) for field in descriptor.fields}
    return st.fixed_dictionaries({}, optional=values).map(lambda fields: kind(**fields))


def _values(field: Any) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        value = st.deferred(lambda: _messages(field.message_type._concrete_class))
    else:
        value = _SCALARS[field.type]
    return st.lists(value, max_size=30) if field.is_repeated else value


_TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(max_size=600),
    st.sampled_from(
        ("What is this?", "", " ", "\x00", "<|endoftext|>", "e\u0301" * 9, "\u202e", "\U0001f985" * 30)
    ),
    st.sampled_from(("https://example.com/a.png", "http://[::1", "data:;base64,AAAA", "https://a:b@example.org/")),
)
_SCALARS: Mapping[int, st.SearchStrategy[Any]] = MappingProxyType(
    {
        FieldDescriptor.TYPE_STRING: _TEXTS,
        FieldDescriptor.TYPE_BYTES: images,
        FieldDescriptor.TYPE_BOOL: st.booleans(),
        FieldDescriptor.TYPE_FLOAT: st.one_of(st.floats(0, 1, width=32), st.floats(width=32)),
        FieldDescriptor.TYPE_ENUM: st.one_of(st.integers(0, 4), st.integers(-(2**31), 2**31 - 1)),
        FieldDescriptor.TYPE_INT32: st.one_of(st.integers(-2, 200), st.integers(-(2**31), 2**31 - 1)),
        FieldDescriptor.TYPE_INT64: st.one_of(st.integers(-2, 200), st.integers(-(2**63), 2**63 - 1)),
    }
)


@lru_cache
def _preprocessor() -> Preprocessor:
    loaded = LoadedModel.load(EngineConfig())
    vocabulary = partial(new_vocabulary, loaded.tokenizer, loaded.model.config.vocab_size)
    return new_preprocessor(
        loaded,
        matchers=Matchers(ConstraintCompiler(vocabulary, available_processors())),
        max_context=_MAX_CONTEXT + loaded.model.config.vision.num_image_tokens,
        max_image_pixels=_MAX_PIXELS,
    )
