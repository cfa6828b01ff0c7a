"""Builds request messages from Python values, for both clients. The senders add the images.

Arguments of a wrong type and labels that do not exist raise `InvalidRequest`, which names the argument and shows no
more than the beginning of its value. Rules that the server knows better, such as ranges, are left to it.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypedDict, TypeVar, get_args

from kestrel_client.errors import errors_of, invalid_argument
from kestrel_client.images import ImageInput, StoredImage, digest_of
from kestrel_client.results import Box, Point
from kestrel_client.sending import Retries
from kestrel_client.v1 import generation_pb2, image_service_pb2, media_pb2, vision_service_pb2

Length = Literal["short", "normal", "long"]
"""The length of a caption."""

CachePolicy = Literal["use", "refresh", "bypass"]
"""The use of the server's caches by a request: it uses and fills them, replaces what they have, or neither."""

Priority = Literal["interactive", "normal", "batch"]
"""The order in which a request starts, compared with others that wait: before them, as usual, or after them."""

EmbeddingType = Literal["float16", "float32"]
"""The format of the embeddings of patches."""

SpatialRef = Point | Box
"""A part of the image that a request speaks about."""

Role = Literal["system", "user", "assistant"]
"""Says who speaks in a message of a conversation."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of a conversation.

    Args:
        role: "system" for instructions, which precede all other messages; "user"; or "assistant" for an answer of
            an earlier turn.
        text: What is said.
        images: What the message shows, each in any form of `ImageInput`; in messages of the user only.
    """

    role: Role
    text: str
    images: Sequence[ImageInput] = ()


AnyQuery = TypeVar("AnyQuery", vision_service_pb2.QueryRequest, vision_service_pb2.CompleteQueryRequest)
AnyChat = TypeVar("AnyChat", vision_service_pb2.ChatRequest, vision_service_pb2.CompleteChatRequest)
AnyCaption = TypeVar("AnyCaption", vision_service_pb2.CaptionRequest, vision_service_pb2.CompleteCaptionRequest)
AnyPoint = TypeVar("AnyPoint", vision_service_pb2.PointRequest, vision_service_pb2.StreamPointRequest)
AnyDetect = TypeVar("AnyDetect", vision_service_pb2.DetectRequest, vision_service_pb2.StreamDetectRequest)
AnySegment = TypeVar("AnySegment", vision_service_pb2.SegmentRequest, vision_service_pb2.StreamSegmentRequest)

AnyEmbed = TypeVar("AnyEmbed", vision_service_pb2.EmbedImageRequest, vision_service_pb2.StreamEmbedImageRequest)


class CallOptions(TypedDict, total=False):
    """The keyword arguments of every skill. None or absent means the default of the server, or of the client.

    Attributes:
        temperature: Sampling temperature; 0 always takes the most likely token.
        top_p: Sample from the most likely tokens whose probabilities add up to this.
        max_tokens: Maximum number of tokens to generate.
        seed: Seed of the sampling, for the same tokens every time.
        stop: Strings, or a single one: the text ends before the first that comes. For answers and captions.
        include_stop: Whether that string is part of the text.
        top_k: Sample from so many of the most likely tokens. This and all up to `n` is for answers and captions.
        min_p: Sample from tokens with at least this share of the largest probability.
        repetition_penalty: Divides logits of tokens that are in the prompt or the text; 0.1 to 10.
        presence_penalty: Is subtracted from logits of tokens that are in the text; -2 to 2.
        frequency_penalty: Is subtracted each time that the text has the token; -2 to 2.
        logit_bias: By the ids of tokens, what is added to their logits; -100 to 100.
        logprobs: Returns how likely each token was, and so many of the most likely ones; 0 to 20.
        n: How many samples to draw, 1 to 16, in `complete_query`, `complete_caption` and `complete_chat`.
        choices: Texts, one of which is the answer. This and the next two exclude each other, and are for queries
            and conversations.
        regex: A regular expression that the whole answer matches.
        json_schema: A JSON schema, a dictionary or a text: the answer is JSON that is valid under it.
        model: A name from `list_models()`.
        adapter: An adapter of the model, as `name` or `name@step`.
        priority: "interactive", "normal" or "batch": whether to start before or after others of the token.
        cache: What the request does with the server's caches: "use", "refresh" (compute anew and replace)
            or "bypass".
        max_queue_s: The longest wait for a start, in seconds.
        timeout_s: The longest time for the whole call, in seconds.
        max_retry_s: For how long a call is sent again that the server refuses for now, in seconds.
        request_id: Names the request in the server's log, in its result and in its errors: at most 128 letters,
            digits, dots, hyphens and underscores. The client makes one where there is none.
    """

    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    seed: int | None
    stop: Sequence[str] | None
    include_stop: bool | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    n: int | None
    choices: Sequence[str] | None
    regex: str | None
    json_schema: Mapping[str, Any] | str | None
    model: str | None
    adapter: str | None
    priority: Priority | None
    cache: CachePolicy | None
    max_queue_s: float | None
    timeout_s: float | None
    max_retry_s: float | None
    request_id: str | None


ROUTE_KEY = "x-kestrel-route"
IMAGE_DIGEST_KEY = "x-image-sha256"
IMAGE_IS_STORED_KEY = "x-image-stored"

_CONSTRAINT = ("choices", "regex", "json_schema")
_HANDLING = ("model", "priority", "cache", "max_queue_s", "timeout_s", "max_retry_s", "request_id")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_MAX_SHOWN = 40


def query(
    kind: type[AnyQuery],
    question: str,
    reasoning: bool | None,
    spatial_refs: Sequence[SpatialRef],
    options: CallOptions,
) -> AnyQuery:
    """Returns a question, as a message of `kind`."""
    message = kind(
        question=_text("question", question),
        spatial_refs=_spatial_refs(spatial_refs),
        constraint=_constraint(options),
        **_shared(options, unused=()),
    )
    _put(message, "reasoning", reasoning)
    return message


def chat(
    kind: type[AnyChat], messages: Sequence[ChatMessage], reasoning: bool | None, options: CallOptions
) -> AnyChat:
    """Returns a conversation without its images, as a message of `kind`."""
    message = kind(constraint=_constraint(options), **_shared(options, unused=()))
    for index, turn in enumerate(_chat_messages(messages)):
        added = message.messages.add(role=_label(f"messages[{index}].role", turn.role, Role, "CHAT_ROLE"))
        for _ in turn.images:
            added.parts.add(image=media_pb2.Image())
        added.parts.add(text=_text(f"messages[{index}].text", turn.text))
    _put(message, "reasoning", reasoning)
    return message


def chat_images(messages: Sequence[ChatMessage]) -> list[ImageInput]:
    """Returns the images of a conversation in their order."""
    return [image for turn in _chat_messages(messages) for image in turn.images]


def _chat_messages(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    # Read twice, which an iterator cannot be.
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise invalid_argument("messages", "are messages in a list")
    for index, turn in enumerate(messages):
        if not isinstance(turn, ChatMessage):
            raise invalid_argument("messages", f"are of ChatMessage, not {_shown(turn)}")
        if isinstance(turn.images, str | bytes) or not isinstance(turn.images, Sequence):
            raise invalid_argument(f"messages[{index}].images", "are images in a list")
    return messages


def caption(kind: type[AnyCaption], length: Length | None, options: CallOptions) -> AnyCaption:
    """Returns a caption request, as a message of `kind`."""
    return kind(length=_label("length", length, Length, "CAPTION_LENGTH"), **_shared(options))


def point(
    kind: type[AnyPoint],
    object: str | Sequence[str],
    max_objects: int | None,
    spatial_refs: Sequence[SpatialRef],
    options: CallOptions,
    min_score: float | None = None,
) -> AnyPoint:
    """Returns the request to point at objects, as a message of `kind`."""
    message = kind(**_objects(object), spatial_refs=_spatial_refs(spatial_refs), **_shared(options))
    _put(message, "max_objects", max_objects)
    _put(message, "min_score", min_score)
    return message


def detect(
    kind: type[AnyDetect],
    object: str | Sequence[str],
    max_objects: int | None,
    spatial_refs: Sequence[SpatialRef],
    options: CallOptions,
    min_score: float | None = None,
) -> AnyDetect:
    """Returns the request for boxes around objects, as a message of `kind`."""
    message = kind(**_objects(object), spatial_refs=_spatial_refs(spatial_refs), **_shared(options))
    _put(message, "max_objects", max_objects)
    _put(message, "min_score", min_score)
    return message


def detect_frames(
    object: str | Sequence[str],
    max_objects: int | None,
    spatial_refs: Sequence[SpatialRef],
    every_frame: bool,
    track: bool,
    options: CallOptions,
    min_score: float | None = None,
) -> vision_service_pb2.DetectFramesRequest:
    """Returns the first message of a stream of frames with boxes around objects."""
    request = detect(vision_service_pb2.DetectRequest, object, max_objects, spatial_refs, options, min_score)
    settings = vision_service_pb2.DetectFramesSettings(request=request)
    _put(settings, "every_frame", every_frame)
    _put(settings, "track", track)
    return vision_service_pb2.DetectFramesRequest(settings=settings)


def point_frames(
    object: str | Sequence[str],
    max_objects: int | None,
    spatial_refs: Sequence[SpatialRef],
    every_frame: bool,
    options: CallOptions,
    min_score: float | None = None,
) -> vision_service_pb2.PointFramesRequest:
    """Returns the first message of a stream of frames to point at objects."""
    request = point(vision_service_pb2.PointRequest, object, max_objects, spatial_refs, options, min_score)
    settings = vision_service_pb2.PointFramesSettings(request=request)
    _put(settings, "every_frame", every_frame)
    return vision_service_pb2.PointFramesRequest(settings=settings)


def _objects(object: str | Sequence[str]) -> dict[str, Any]:
    """Returns the field for one object, or that for several."""
    if isinstance(object, str):
        return {"object": _text("object", object)}
    if not isinstance(object, Sequence) or not object or not all(isinstance(name, str) for name in object):
        raise invalid_argument("object", f"is a text, or texts in a list, not {_shown(object)}")
    return {"objects": [_text(f"object[{index}]", name) for index, name in enumerate(object)]}


def segment(
    kind: type[AnySegment], object: str, spatial_refs: Sequence[SpatialRef], options: CallOptions
) -> AnySegment:
    """Returns the request for the outline of an object."""
    return kind(object=_text("object", object), spatial_refs=_spatial_refs(spatial_refs), **_shared(options))


def gaze(eye: Point, options: CallOptions) -> vision_service_pb2.GazeRequest:
    """Returns the request to follow a look."""
    if not isinstance(eye, Point):
        raise invalid_argument("eye", f"is a Point, not {_shown(eye)}")
    return vision_service_pb2.GazeRequest(eye=media_pb2.NormalizedPoint(x=eye.x, y=eye.y), **_shared(options))


def embed_mean(
    normalize: bool, dtype: EmbeddingType | None, options: CallOptions
) -> vision_service_pb2.EmbedImageRequest:
    """Returns the request for the mean of an image's embeddings, which has no `dtype` of its own."""
    _label("dtype", dtype, EmbeddingType, "EMBEDDING_TYPE")
    return _embed(vision_service_pb2.EmbedImageRequest, normalize, options)


def _embed(kind: type[AnyEmbed], normalize: bool, options: CallOptions, **own: Any) -> AnyEmbed:
    for name, value in options.items():
        if name in CallOptions.__annotations__ and name not in _HANDLING and value is not None:
            raise invalid_argument(name, "has no meaning for embeddings")
    message = kind(options=_handling(options), **own)
    _put(message, "normalize", normalize)
    return message


def embed_patches(
    normalize: bool, dtype: EmbeddingType | None, options: CallOptions
) -> vision_service_pb2.StreamEmbedImageRequest:
    """Returns the request for embeddings of an image's patches."""
    label = _label("dtype", dtype, EmbeddingType, "EMBEDDING_TYPE")
    return _embed(vision_service_pb2.StreamEmbedImageRequest, normalize, options, type=label)


def put_image(data: bytes, ttl_s: float | None, pin: bool) -> image_service_pb2.PutImageRequest:
    """Returns the request to store an image."""
    return image_service_pb2.PutImageRequest(data=data, ttl=_duration("ttl_s", ttl_s), pin=pin)


def image_id(image: str | StoredImage) -> str:
    """Returns the name of a stored image."""
    return image.image_id if isinstance(image, StoredImage) else _text("image", image)


def retries(options: CallOptions, timeout_s: float, max_retry_s: float) -> Retries:
    """Returns the attempts of a call that begins now.

    The numbers are the client's, for options that are left out.
    """
    asked_s, asked_retry_s = options.get("timeout_s"), options.get("max_retry_s")
    return Retries(
        timeout_s if asked_s is None else _seconds("timeout_s", asked_s),
        max_retry_s if asked_retry_s is None else _seconds("max_retry_s", asked_retry_s),
        options.get("max_queue_s"),
    )


def request_id(options: CallOptions) -> str:
    """Returns the id that the call is sent with: the caller's, or a new one."""
    given = options.get("request_id")
    if given is None:
        return new_request_id()
    with errors_of(new_request_id()):
        if not _REQUEST_ID.fullmatch(_text("request_id", given)):
            rule = "is at most 128 letters, digits, dots, hyphens and underscores"
            raise invalid_argument("request_id", f"{rule}, not {_shown(given)}")
    return given


def new_request_id() -> str:
    """Returns an id that no other request has."""
    return secrets.token_hex(16)


def metadata(
    request_id: str,
    token: str | None,
    image_name: str | None = None,
    *,
    is_stored: bool = False,
    is_chat: bool = False,
) -> tuple[tuple[str, str], ...]:
    """Returns the metadata that is sent with the message.

    A balancer sends calls about one image to one server by the digest in `image_name`, and those of a conversation
    by that of its first image; `is_stored` says that the message has the name of a stored image in place of the
    image, so that no other server can answer.
    """
    pairs = [("x-request-id", request_id)]
    if token is not None:
        pairs.append(("authorization", f"Bearer {token}"))
    digest = None if image_name is None else digest_of(image_name)
    if digest is not None:
        pairs.append((ROUTE_KEY if is_chat else IMAGE_DIGEST_KEY, digest))
        if is_stored:
            pairs.append((IMAGE_IS_STORED_KEY, "1"))
    return tuple(pairs)


def _shared(options: CallOptions, unused: Sequence[str] = _CONSTRAINT) -> dict[str, Any]:
    """Returns the fields `sampling` and `options`, which all requests share.

    Options that are `unused` must be absent.
    """
    handling = _handling(options)
    for name in unused:
        if options.get(name) is not None:
            raise invalid_argument(name, "is for queries and conversations")
    sampling = generation_pb2.SamplingParams()
    for name in sampling.DESCRIPTOR.fields_by_name:
        if name not in ("stop", "logit_bias"):  # these two are lists
            _put(sampling, name, options.get(name))
    sampling.stop.extend(_strings("stop", options.get("stop")))
    for token_id, bias in (options.get("logit_bias") or {}).items():
        added = sampling.logit_bias.add()
        _put(added, "token_id", token_id)
        _put(added, "bias", bias)
    return {"sampling": sampling, "options": handling}


def _handling(options: CallOptions) -> generation_pb2.RequestOptions:
    """Returns the field `options`. Raises TypeError for an option that does not exist."""
    unknown = options.keys() - CallOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unexpected keyword argument: {', '.join(map(_with_suggestion, sorted(unknown)))}")
    handling = generation_pb2.RequestOptions(
        priority=_label("priority", options.get("priority"), Priority, "PRIORITY"),
        cache=_label("cache", options.get("cache"), CachePolicy, "CACHE_POLICY"),
        max_queue_duration=_duration("max_queue_s", options.get("max_queue_s")),
    )
    _put(handling, "model", options.get("model"))
    _put(handling, "adapter", options.get("adapter"))
    return handling


def _constraint(options: CallOptions) -> generation_pb2.Constraint | None:
    """Returns the constraint of a query's answer; None where the answer may be any text."""
    names = [name for name in _CONSTRAINT if options.get(name) is not None]
    if not names:
        return None
    if len(names) > 1:
        raise invalid_argument(names[1], f"cannot be combined with {names[0]}")
    if (choices := options.get("choices")) is not None:
        if isinstance(choices, str) or not all(isinstance(choice, str) for choice in choices):
            raise invalid_argument("choices", "are texts in a list")
        values = [_text(f"choices[{index}]", choice) for index, choice in enumerate(choices)]
        return generation_pb2.Constraint(choices=generation_pb2.Choices(values=values))
    if (regex := options.get("regex")) is not None:
        return generation_pb2.Constraint(regex=_text("regex", regex))
    return generation_pb2.Constraint(json_schema=_schema_text(options.get("json_schema")))


def _schema_text(schema: Mapping[str, Any] | str | None) -> str:
    if isinstance(schema, str):
        return _text("json_schema", schema)
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise invalid_argument("json_schema", "is a JSON schema, a text or a dictionary") from None


def _with_suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, CallOptions.__annotations__, n=1)
    return f"{name} (did you mean {close[0]}?)" if close else name


def _put(message: Any, name: str, value: Any) -> None:
    """Sets a field, unless the value is None."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError):
        raise invalid_argument(name, f"cannot be {_shown(value)}") from None


def _strings(name: str, given: Sequence[str] | None) -> list[str]:
    """Returns a list of strings, of which a single one may be given without a list."""
    return [_text(name, each) for each in ([given] if isinstance(given, str) else given or ())]


def _label(name: str, value: str | None, labels: Any, prefix: str) -> str:
    """Returns the name of an enum's value on the wire."""
    if value is None:
        return f"{prefix}_UNSPECIFIED"
    if value not in get_args(labels):
        raise invalid_argument(name, f"is one of {', '.join(get_args(labels))}, not {_shown(value)}")
    return f"{prefix}_{value.upper()}"


def _text(name: str, value: str) -> str:
    # Without this, a message with an argument in the wrong place would fail with an error that shows it whole.
    if not isinstance(value, str):
        raise invalid_argument(name, f"is a text, not {_shown(value)}")
    try:
        value.encode()
    except (
        UnicodeEncodeError
    ) as error:  # half of a surrogate pair, such as a byte of a file's name that is no UTF-8
        raise invalid_argument(
            name, f"cannot be sent as UTF-8: {_shown(value[error.start])} is no character"
        ) from None
    return value


def _seconds(name: str, value: float) -> float:
    is_number = isinstance(value, int | float)
    if not is_number or not math.isfinite(value):
        raise invalid_argument(name, f"is a number of seconds, not {_shown(value)}")
    return value


def _duration(name: str, value: float | None) -> timedelta | None:
    if value is None:
        return None
    try:
        return timedelta(seconds=_seconds(name, value))
    except OverflowError:
        raise invalid_argument(name, f"is too long: {_shown(value)} seconds") from None


def _spatial_refs(refs: Sequence[SpatialRef]) -> list[media_pb2.SpatialRef]:
    return [_spatial_ref(ref) for ref in refs]


def _spatial_ref(ref: SpatialRef) -> media_pb2.SpatialRef:
    if isinstance(ref, Point):
        return media_pb2.SpatialRef(point=media_pb2.NormalizedPoint(x=ref.x, y=ref.y))
    if not isinstance(ref, Box):
        raise invalid_argument("spatial_refs", f"are of Point and Box, not {_shown(ref)}")
    box = media_pb2.NormalizedBox(x_min=ref.x_min, y_min=ref.y_min, x_max=ref.x_max, y_max=ref.y_max)
    return media_pb2.SpatialRef(box=box)


def _shown(value: object) -> str:
    """Returns the form of a value in an error: short texts and numbers as they are, other values as their type."""
    if isinstance(value, str | int | float):
        shown = repr(value)
        return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"
    return f"a value of type {type(value).__name__}"
