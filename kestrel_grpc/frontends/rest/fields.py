"""The fields that REST requests share, and their names in the engine's requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from kestrel_grpc.frontends.http import sampling
from kestrel_grpc.frontends.http.fields import Field, Kind

MOONDREAM, KESTREL = "moondream", "kestrel"
FORMATS = (MOONDREAM, KESTREL)

IMAGE = (
    "An image file in base64, as a data URL or plain; an address on one of the hosts of `--image-hosts`; "
    "or the `image_id` of a stored image."
)
IMAGE_URL = Field("image_url", Kind.IMAGE, IMAGE, is_required=True)
STREAM = Field("stream", Kind.BOOLEAN, "Whether the answer comes as server-sent events.")
OBJECT = Field("object", Kind.TEXT, "What to look for.", is_required=True)
SPATIAL_REFS = Field(
    "spatial_refs",
    Kind.LIST,
    "Places to talk about: points `[x, y]` and boxes `[x_min, y_min, x_max, y_max]`, from 0 to 1.",
    item={"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
)
# One list for all routes, since Moondream's client has one type of settings for all its methods.
SETTINGS = Field(
    "settings",
    Kind.OBJECT,
    "How tokens are sampled.",
    fields=(
        Field("temperature", Kind.NUMBER, "0 is greedy; the default is the skill's."),
        Field("top_p", Kind.NUMBER, "Share of probability that tokens are sampled from."),
        Field("max_tokens", Kind.INTEGER, "Most tokens to generate."),
        Field("max_objects", Kind.INTEGER, "Most objects to find, for points and boxes."),
        Field("seed", Kind.INTEGER, "Makes the answer repeatable."),
        *sampling.FIELDS,
        Field(
            "logprobs",
            Kind.INTEGER,
            "Tells how likely each token was, and so many of the likeliest ones; 0 to 20.",
        ),
    ),
)
COMMON = (
    Field("model", Kind.TEXT, "The model's name, or `model/adapter`; the one that is served by default."),
    Field(
        "priority",
        Kind.TEXT,
        "Which requests of a token go first: `interactive`, then `normal` (the default), then `batch`.",
        choices=("interactive", "normal", "batch"),
    ),
    Field("max_queue_seconds", Kind.NUMBER, "The longest that the request may wait before it starts."),
    Field(
        "cache",
        Kind.TEXT,
        "`use` (the default); `refresh`: computes anew what is cached; `bypass`: neither uses the caches nor adds "
        "to them.",
        choices=("use", "refresh", "bypass"),
    ),
    Field(
        "format",
        Kind.TEXT,
        "`moondream` (the default): points as objects, metrics in `metrics`, in milliseconds. `kestrel`: points as "
        "pairs, metrics beside the answer, in seconds.",
        choices=FORMATS,
    ),
)

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "image": "image_url",
        "image.uri": "image_url",
        "max_objects": "settings.max_objects",
        "options.model": "model",
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


def field_name(field: str) -> str:
    """The name here of a field of the engine's requests."""
    if field.startswith("sampling."):
        return f"settings.{field.removeprefix('sampling.')}"
    found = re.fullmatch(r"(spatial_refs\[\d+\])\.(.+)", field)
    if found is not None:
        return found[1] + _SIDES.get(found[2], "")
    return _NAMES.get(field, field)
