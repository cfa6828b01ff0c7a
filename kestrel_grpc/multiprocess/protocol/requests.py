"""Sends requests from a front end to an engine core: a struct for each skill, with the fields of its request.

Images are sent on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
from typing import Any, Union, get_type_hints

import msgspec

from kestrel_runtime.api.images import RemoteImage
from kestrel_runtime.api.requests import (
    REQUEST_TYPES,
    Chat,
    ChatMessage,
    Request,
    RequestOptions,
    Role,
)
from kestrel_runtime.api.sampling_params import SamplingParams

_MAX_REPEATED = 256


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


_SETTINGS = ("sampling", "options")
"""Fields that are equal in most requests, encoded on their own: the values of equal bytes are decoded once."""
_decoded_settings = lru_cache(_MAX_REPEATED)(msgspec.msgpack.Decoder(tuple[SamplingParams, RequestOptions]).decode)


def _wire_type(name: str, hint: Any) -> Any:
    if name == "image":
        return ImageSummary | None
    return tuple[_WireTurn, ...] if name == "messages" else hint


_REQUEST_FIELDS: Mapping[type[Request], tuple[str, ...]] = MappingProxyType(
    {kind: tuple(item.name for item in fields(kind) if item.name not in _SETTINGS) for kind in REQUEST_TYPES}
)
_WIRE_REQUESTS: Mapping[type[Request], type[msgspec.Struct]] = MappingProxyType(
    {
        kind: msgspec.defstruct(
            f"Wire{kind.__name__}",
            [("settings", msgspec.Raw), *((name, _wire_type(name, get_type_hints(kind)[name])) for name in names)],
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
    names = _REQUEST_FIELDS[type(request)]
    values: dict[str, Any] = {name: getattr(request, name) for name in names}
    values["settings"] = msgspec.Raw(_encoder.encode((request.sampling, request.options)))
    if "image" in values:
        values["image"] = next(summaries, None)
    if isinstance(request, Chat):
        values["messages"] = tuple(
            _WireTurn(message.role, message.text, tuple(islice(summaries, len(message.images))))
            for message in request.messages
        )
    return _encoder.encode(_WIRE_REQUESTS[type(request)](**values))


def decode_request(data: bytes, new_image: Callable[[ImageSummary], RemoteImage]) -> Request:
    """Decodes a request. It is not checked again: the other process has checked it."""
    wire = _request_decoder.decode(data)
    kind = _REQUEST_KINDS[type(wire)]
    values = msgspec.structs.asdict(wire)
    values["sampling"], values["options"] = _decoded_settings(bytes(values.pop("settings")))
    if values.get("image") is not None:
        values["image"] = new_image(wire.image)
    if "messages" in values:
        values["messages"] = tuple(
            ChatMessage(turn.role, turn.text, tuple(map(new_image, turn.images))) for turn in wire.messages
        )
    return kind(**values, checks=False)
