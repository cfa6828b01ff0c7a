"""Defines the routes of the REST API: the body of each, and the request of the engine that it becomes."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from kestrel_grpc.frontends.http.answers import ParsedRequest
from kestrel_grpc.frontends.http.bodies import Body, Problems, Text, Unusable, read
from kestrel_grpc.frontends.http.fields import (
    EXAMPLE_IMAGE,
    ConstraintBody,
    ImageText,
    ImageTextOrFile,
    Sampling,
    read_image,
    setting,
)
from kestrel_grpc.frontends.http.forms import IMAGE_URL, Form
from kestrel_grpc.frontends.http.json_body import LongText, parse_json
from kestrel_runtime.api.requests import (
    MAX_CHAT_IMAGES,
    MAX_CHAT_MESSAGES,
    MAX_OBJECT_NAMES,
    MAX_SPATIAL_REFS,
    BoxRef,
    CachePolicy,
    Caption,
    Chat,
    ChatMessage,
    Detect,
    Embed,
    Gaze,
    Point,
    PointRef,
    Priority,
    Query,
    Request,
    RequestOptions,
    Role,
    Segment,
    SpatialRef,
)

Format = Literal["moondream", "kestrel"]

_IMAGE = (
    "An image file in base64, as a data URL or plain; an address on one of the hosts of `--image-hosts`; "
    "or the `image_id` of a stored image."
)


# The fields that several routes have


class Settings(Sampling):
    """Sets how tokens are sampled, and how many objects are found.

    One kind for all routes, since Moondream's client has one type of settings for all its methods.
    """

    logprobs: int | None = setting(
        "logprobs", "Adds the logprob of each token and of this many of the likeliest tokens."
    )
    max_objects: int | None = Field(None, description="Most objects to find, for points and boxes.")


_NO_SETTINGS = Settings.model_validate({})


class SkillBody(Body):
    """Holds the fields of all routes."""

    settings: Settings = Field(_NO_SETTINGS, description="How tokens are sampled.")
    model: Text = Field("", description="The model's name, or `model/adapter`; the one that is served by default.")
    priority: Literal["interactive", "normal", "batch"] = Field(
        "normal",
        description="Which requests of a token go first: `interactive`, then `normal` (the default), then `batch`.",
    )
    max_queue_seconds: float | None = Field(
        None, description="The longest that the request may wait before it starts."
    )
    cache: Literal["use", "refresh", "bypass"] = Field(
        "use",
        description="`use` (the default); `refresh`: computes anew what is cached; `bypass`: neither uses the "
        "caches nor adds to them.",
    )
    format: Format = Field(
        "moondream",
        description="`moondream` (the default): points as objects, metrics in `metrics`, in milliseconds. "
        "`kestrel`: points as pairs, metrics next to the answer, in seconds.",
    )

    @abstractmethod
    def request(self, images: Sequence[bytes], **shared: Any) -> Request:
        """Returns the request for the engine. Raises `InvalidRequest`.

        `images` are those of `pictures`, `shared` is the result of the method `shared`.
        """

    def pictures(self, image_name: str) -> list[tuple[str | LongText | bytes, str]]:
        """Returns each image as the body has it, with its path. `image_name` is the name of a body's one image."""
        url = vars(self)["image_url"]
        return [] if url is None else [(url, image_name)]

    def shared(self) -> dict[str, Any]:
        """Returns the arguments that the requests of all skills take."""
        options = RequestOptions(
            model=self.model,
            max_queue_s=self.max_queue_seconds,
            priority=Priority[self.priority.upper()],
            cache=CachePolicy[self.cache.upper()],
        )
        return {"sampling": self.settings.params(logprobs=self.settings.logprobs), "options": options}


_SpatialRef = Annotated[
    SpatialRef,
    PlainValidator(lambda value: _spatial_ref(value)),
    WithJsonSchema({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4}),
]
_Eye = Annotated[
    PointRef,
    PlainValidator(lambda value: _eye(value)),
    WithJsonSchema({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}),
]


def _spatial_ref(value: Any) -> SpatialRef:
    if not _is_list_of_numbers(value, (2, 4)):
        raise Unusable("must be a list of two or four numbers")
    return PointRef(*value) if len(value) == 2 else BoxRef(*value)


def _eye(value: Any) -> PointRef:
    if not _is_list_of_numbers(value, (2,)):
        raise Unusable("must be a list of two numbers")
    return PointRef(*value)


def _is_list_of_numbers(value: Any, lengths: tuple[int, ...]) -> bool:
    return isinstance(value, list) and len(value) in lengths and all(type(side) in (int, float) for side in value)


class _ImageBody(SkillBody):
    image_url: ImageTextOrFile = Field(description=_IMAGE, examples=[EXAMPLE_IMAGE])


class _StreamBody(SkillBody):
    stream: bool = Field(False, description="Whether the answer comes as server-sent events.")


class _PlacesBody(SkillBody):
    spatial_refs: list[_SpatialRef] | None = Field(
        None,
        description="Places to talk about: points `[x, y]` and boxes `[x_min, y_min, x_max, y_max]`, from 0 to 1.",
        max_length=MAX_SPATIAL_REFS,
        examples=[[[0.5, 0.5]]],
    )

    def shared(self) -> dict[str, Any]:
        return {**super().shared(), "spatial_refs": tuple(self.spatial_refs or ())}


class _ObjectBody(_ImageBody, _PlacesBody):
    object: Text = Field(description="What to look for.", examples=["bird"])


# The routes


class QueryBody(_StreamBody, _PlacesBody):
    """Answers a question, about an image or about nothing."""

    question: Text = Field(description="The question.", examples=["What is in this image?"])
    image_url: ImageTextOrFile | None = Field(None, description=f"{_IMAGE} None: a question about no image.")
    reasoning: bool = Field(False, description="Whether the model reasons before it answers.")
    constraint: ConstraintBody | None = Field(
        None, description="What the answer must look like; one of its fields."
    )

    def request(self, images: Sequence[bytes], **shared: Any) -> Query:
        constraint = None if self.constraint is None else self.constraint.value()
        image = images[0] if images else None
        return Query(self.question, image, reasoning=self.reasoning, constraint=constraint, **shared)


class CaptionBody(_ImageBody, _StreamBody):
    """Describes an image."""

    length: Literal["short", "normal", "long"] = Field(
        "normal", description="How long the description is; `normal` by default."
    )

    def request(self, images: Sequence[bytes], **shared: Any) -> Caption:
        return Caption(images[0], length=self.length, **shared)


class _ObjectsBody(_ImageBody, _PlacesBody, _StreamBody):
    """Has one object to look for, or several."""

    object: Text = Field(
        "", description="What to look for; required unless there are `objects`.", examples=["bird"]
    )
    objects: list[Text] | None = Field(
        None,
        description=f"Several things to look for in place of `object`, 1 to {MAX_OBJECT_NAMES}: the answer has a "
        "group for each in `groups`, and limits count each as a request.",
        max_length=MAX_OBJECT_NAMES,
        examples=[["bird", "branch"]],
    )
    min_score: float | None = Field(
        None, description="The least score of objects in the answer, from 0 to 1; none leaves out no object."
    )

    @property
    def wanted(self) -> dict[str, Any]:
        """The objects to look for and their least score, as fields of the engine's requests."""
        return {"object": self.object, "objects": tuple(self.objects or ()), "min_score": self.min_score}


class PointBody(_ObjectsBody):
    """Finds the places of objects."""

    def request(self, images: Sequence[bytes], **shared: Any) -> Point:
        return Point(image=images[0], max_objects=self.settings.max_objects, **self.wanted, **shared)


class DetectBody(_ObjectsBody):
    """Finds boxes around objects."""

    def request(self, images: Sequence[bytes], **shared: Any) -> Detect:
        return Detect(image=images[0], max_objects=self.settings.max_objects, **self.wanted, **shared)


class SegmentBody(_ObjectBody, _StreamBody):
    """Finds the outline of an object."""

    mask_format: Literal["svg", "polygon", "rle", "png"] = Field(
        "svg",
        description="What the answer has in addition to `path`: `polygons`, `rle` (COCO's run-length encoding) or "
        "`png` (base64); nothing by default.",
    )

    def request(self, images: Sequence[bytes], **shared: Any) -> Segment:
        return Segment(self.object, images[0], mask_format=self.mask_format, **shared)


class GazeBody(_ImageBody):
    """Finds the place that somebody in the image looks at."""

    eye: _Eye = Field(
        description="An eye of the one who looks, or the middle of both eyes: `[x, y]`, from 0 to 1.",
        examples=[[0.5, 0.5]],
    )

    def request(self, images: Sequence[bytes], **shared: Any) -> Gaze:
        return Gaze(images[0], self.eye, **shared)


class EmbedBody(_ImageBody, _StreamBody):
    """Embeds an image: the mean of its patches' vectors; a stream has the patches before it."""

    normalize: bool = Field(False, description="Whether each vector is scaled to the length 1.")
    dtype: Literal["float16", "float32"] = Field(
        "float16", description="The format of the patches of a stream, which are base64 of little-endian numbers."
    )

    def request(self, images: Sequence[bytes], **shared: Any) -> Embed:
        return Embed(images[0], patches=self.stream, normalize=self.normalize, dtype=self.dtype, **shared)


class Turn(Body):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"] = Field(description="Who says it.")
    content: Text = Field("", description="What is said. Only the last message needs a text.")
    image_urls: list[ImageText] | None = Field(
        None,
        description="The images that precede the text, in messages of the user: "
        f"at most {MAX_CHAT_IMAGES} in all messages together.",
        max_length=MAX_CHAT_IMAGES,
        examples=[[EXAMPLE_IMAGE]],
    )


class ChatBody(_StreamBody):
    """Answers the last message of a conversation about any number of images."""

    messages: list[Turn] = Field(
        description="The conversation. Messages of the system precede all others; the last one is of the user.",
        min_length=1,
        max_length=MAX_CHAT_MESSAGES,
        examples=[[{"role": "user", "content": "What is in this image?"}]],
    )
    reasoning: bool = Field(False, description="Whether the model reasons before it answers.")
    constraint: ConstraintBody | None = Field(
        None, description="What the answer must look like; one of its fields."
    )

    def pictures(self, image_name: str) -> list[tuple[str | LongText | bytes, str]]:
        return [
            (url, f"messages[{index}].image_urls[{place}]")
            for index, turn in enumerate(self.messages)
            for place, url in enumerate(turn.image_urls or ())
        ]

    def request(self, images: Sequence[bytes], **shared: Any) -> Chat:
        constraint = None if self.constraint is None else self.constraint.value()
        rest = iter(images)
        messages = tuple(
            ChatMessage(Role(turn.role), turn.content, tuple(islice(rest, len(turn.image_urls or ()))))
            for turn in self.messages
        )
        return Chat(messages, reasoning=self.reasoning, constraint=constraint, **shared)


ROUTES: Mapping[str, type[SkillBody]] = MappingProxyType(
    {
        "query": QueryBody,
        "caption": CaptionBody,
        "point": PointBody,
        "detect": DetectBody,
        "segment": SegmentBody,
        "gaze": GazeBody,
        "chat": ChatBody,
        "embed": EmbedBody,
    }
)
"""The body of `POST /v1/<skill>`, by skill."""


# From bytes to the request of the engine


def parse_request(
    body_type: type[SkillBody], max_image_bytes: int, data: bytes, form: Form | None = None
) -> ParsedRequest:
    """Reads the body of a skill, which is JSON or a `form`. Raises `InvalidRequest` with every mistake, or an
    `ImageError`.

    `max_image_bytes` is the largest encoded image.
    """
    problems, image_name = Problems(), IMAGE_URL
    if form is None:
        document = parse_json(data, problems.add)
    else:
        document, image_name = form.document(body_type, data, problems)
    body = read(body_type, document, problems)
    is_streamed = isinstance(body, _StreamBody) and body.stream
    if is_streamed and (body.settings.n or 1) > 1:
        problems.add("settings.n", "must be 1 in a stream")
    images = [read_image(value, path, max_image_bytes, problems) for value, path in body.pictures(image_name)]
    # A single stop string is no list.
    name = partial(field_name, image_name=image_name, has_stops=not isinstance(body.settings.stop, str))
    files = [image.data or b"" for image in images]
    request = problems.checked(name, lambda: body.request(files, **body.shared()))
    references = tuple(image.reference for image in images)
    return ParsedRequest(request, references, is_streamed, body.format, name)


_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "max_objects": "settings.max_objects",
        "options.model": "model",
        "options.adapter": "model",
        "eye.x": "eye[0]",
        "eye.y": "eye[1]",
        "options.priority": "priority",
        "options.cache": "cache",
        "options.max_queue_duration": "max_queue_seconds",
    }
)
_SIDES: Mapping[str, str] = MappingProxyType(
    {
        "point.x": "[0]",
        "point.y": "[1]",
        "box.x_min": "[0]",
        "box.y_min": "[1]",
        "box.x_max": "[2]",
        "box.y_max": "[3]",
    }
)


def field_name(field: str, *, image_name: str = IMAGE_URL, has_stops: bool = True) -> str:
    """Returns the name in the body of a field of the engine's requests.

    `image_name` is the name of the image there. `has_stops` is True if `stop` is a list.
    """
    if field in ("image", "image.uri"):
        return image_name
    if field == "sampling.stop[0]" and not has_stops:
        return "settings.stop"
    if field.startswith("sampling."):
        return f"settings.{field.removeprefix('sampling.')}"
    found = re.match(r"(messages\[\d+\])\.images((?:\[\d+\])?)", field)
    if found is not None:
        return f"{found[1]}.image_urls{found[2]}"
    found = re.fullmatch(r"(spatial_refs\[\d+\])\.(.+)", field)
    if found is not None:
        return found[1] + _SIDES.get(found[2], "")
    return _NAMES.get(field, field)
