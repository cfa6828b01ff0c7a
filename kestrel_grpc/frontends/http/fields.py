"""Defines the fields that bodies of REST and of OpenAI's API share: images, sampling, constraints."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, cast

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from kestrel_grpc.frontends.http.bodies import Body, Problems, Text, TextOr, Unusable
from kestrel_grpc.frontends.http.json_body import LongText, WrittenFloat
from kestrel_grpc.images.data_urls import (
    DataTooLarge,
    DataUnreadable,
    decode_base64,
    decode_data_url,
    is_data_url,
)
from kestrel_grpc.images.stored_images import ImageHandle, ImageReference, ImageUri
from kestrel_runtime.api.constraints import MAX_CHOICES, MAX_SCHEMA_BYTES, MAX_SCHEMA_NODES, Constraint
from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.api.sampling_params import MAX_STOPS, RANGES, SamplingParams

EXAMPLE_IMAGE = "data:image/png;base64,iVBORw0KGgo="
PLACEHOLDER = b"?"
"""The bytes that stand for an image that the request only names, or that cannot be read."""
_ADDRESSES = ("http://", "https://")
_MAX_TOKEN_ID_DIGITS = 10


# Images


def _image_text(value: Any) -> str | LongText:
    if not isinstance(value, str | LongText):
        raise Unusable("must be a text with an image")
    return value


def _image_text_or_file(value: Any) -> str | LongText | bytes:
    return value if isinstance(value, bytes) else _image_text(value)


ImageText = Annotated[str | LongText, PlainValidator(_image_text), WithJsonSchema({"type": "string"})]
ImageTextOrFile = Annotated[
    str | LongText | bytes, PlainValidator(_image_text_or_file), WithJsonSchema({"type": "string"})
]
"""A text as `ImageText`, or the file itself, which forms have."""


class GivenImage(NamedTuple):
    """Holds the image of a body: its bytes `data`, or `reference` and a placeholder, or neither."""

    data: bytes | None
    reference: ImageReference | None = None


def read_image(value: str | LongText | bytes, path: str, max_bytes: int, problems: Problems) -> GivenImage:
    """Reads the image in the field at `path`: base64, a `data:` URI, an address, the handle of a stored image, or
    the file itself.

    Fetches nothing.
    """
    if isinstance(value, str) and (reference := _reference(value)) is not None:
        return GivenImage(PLACEHOLDER, reference)
    try:
        return GivenImage(_decoded(value, max_bytes))
    except ImageError as error:
        problems.add_image_error(error, path)
        return GivenImage(PLACEHOLDER)


def _reference(value: str) -> ImageReference | None:
    # No address has half of a surrogate pair.
    if value[:8].lower().startswith(_ADDRESSES) and _is_utf8(value):
        return ImageUri(value)
    return ImageHandle.parse(value)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decoded(value: str | LongText | bytes, max_bytes: int) -> bytes:
    if isinstance(value, bytes):
        if len(value) > max_bytes:
            raise ImageError(f"is larger than {max_bytes} bytes", too_large=True)
        return value
    try:
        text = value.ascii_bytes() if isinstance(value, LongText) else value.encode("ascii")
    except ValueError:
        raise ImageError("is neither base64 nor a data URL") from None
    try:
        if is_data_url(text):
            return decode_data_url(text, max_bytes, needs_base64=True)
        return decode_base64(text, max_bytes)
    except DataUnreadable as error:
        raise ImageError(str(error)) from None
    except DataTooLarge:
        raise ImageError(f"is larger than {max_bytes} bytes", too_large=True) from None


# Sampling


def _with_token_ids(given: Any) -> Any:
    """Converts names to token ids. Names that are no ids stay texts, which pydantic refuses."""
    if not isinstance(given, dict):
        return given
    return {
        int(name)
        if name.isascii() and name.isdecimal() and len(name) <= _MAX_TOKEN_ID_DIGITS
        else name[:_MAX_TOKEN_ID_DIGITS]: bias
        for name, bias in given.items()
    }


def setting(name: str, description: str) -> Any:
    """Returns a field for the setting of `SamplingParams` of this name, with its range, which `SamplingParams`
    checks."""
    least, most = RANGES[name]
    return Field(
        None,
        description=f"{description} From {least:g} to {most:g}.",
        json_schema_extra={"minimum": least, "maximum": most},
    )


class Sampling(Body):
    """Sets how tokens are sampled; absent values are the skill's."""

    temperature: float | None = setting("temperature", "0 is greedy; the default is the skill's.")
    top_p: float | None = Field(None, description="Share of probability that tokens are sampled from.")
    max_tokens: int | None = setting("max_tokens", "Most tokens to generate.")
    seed: int | None = Field(None, description="Makes the answer repeatable.")
    stop: TextOr[Annotated[list[Text], Field(max_length=MAX_STOPS)]] | None = Field(
        None,
        description=f"Strings that end the text, at most {MAX_STOPS}; or a single one.",
        examples=[["\n\n"]],
    )
    include_stop: bool = Field(
        False, description="Whether the text ends behind the stop string instead of before it."
    )
    top_k: int | None = setting("top_k", "How many of the most likely tokens are sampled from.")
    min_p: float | None = setting(
        "min_p", "Least probability of a token, as a share of that of the most likely one."
    )
    repetition_penalty: float | None = setting(
        "repetition_penalty", "Divides logits of tokens in the prompt or the text."
    )
    presence_penalty: float | None = setting("presence_penalty", "Is subtracted from logits of tokens in the text.")
    frequency_penalty: float | None = setting(
        "frequency_penalty", "Is subtracted each time that the text has the token."
    )
    logit_bias: Annotated[dict[int, float], BeforeValidator(_with_token_ids)] | None = Field(
        None, description="By the ids of tokens, what is added to their logits; -100 to 100."
    )
    n: int | None = setting("n", "How many samples to draw; 1 in a stream of the REST API.")

    def params(self, **others: Any) -> SamplingParams:
        """Returns the settings for the engine; `others` replace those of the same name."""
        given = self.__dict__
        settings = {name: given[name] for name in _SETTINGS}
        stop, biases = self.stop, self.logit_bias
        settings["stop"] = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
        settings["logit_bias"] = () if biases is None else tuple(sorted(biases.items()))
        return SamplingParams(**settings | others)


_SETTINGS = tuple(Sampling.model_fields)


# Constraints


class ConstraintBody(Body):
    """Constrains the form of the answer, by one of its fields."""

    choices: list[Text] | None = Field(
        None,
        description=f"At most {MAX_CHOICES} texts, one of which is it.",
        max_length=MAX_CHOICES,
        examples=[["yes", "no"]],
    )
    regex: Text | None = Field(None, description="A regular expression that the whole answer matches.")
    json_schema: dict[str, Any] | None = Field(
        None, description="A JSON schema; the answer is JSON that is valid under it."
    )

    def value(self) -> Constraint:
        """Returns the constraint for the engine."""
        return new_constraint(self.choices, self.regex, self.json_schema)


def new_constraint(
    choices: list[str] | None = None, regex: str | None = None, json_schema: Mapping[str, Any] | None = None
) -> Constraint:
    """Returns the constraint for the engine, which checks that exactly one of the three is given."""
    return Constraint(tuple(choices or ()), regex, None if json_schema is None else _written(json_schema))


_TOO_DEEP = "[" * 999


def _written(schema: Mapping[str, Any]) -> str:
    if not _has_written_floats(schema):
        return schema_text(schema)
    numbers = _Numbers()
    try:
        marked = numbers.marked(schema)
    except RecursionError:
        return _TOO_DEEP
    return numbers.put_back(schema_text(marked))


def _has_written_floats(schema: Mapping[str, Any]) -> bool:
    left: list[Any] = [schema]
    while left:
        value = left.pop()
        if isinstance(value, WrittenFloat):
            return True
        if isinstance(value, dict):
            left += cast("dict[str, Any]", value).values()
        elif isinstance(value, list):
            left += cast("list[Any]", value)
    return False


def schema_text(schema: Any) -> str:
    """Returns the JSON of a schema, or a text that is refused in place of one that is too long or too deep."""
    try:
        return json.dumps(schema, ensure_ascii=False, default=lambda _: " " * MAX_SCHEMA_BYTES)
    except RecursionError:
        return _TOO_DEEP


class _Numbers:
    """Keeps numbers as the caller wrote them; `json` writes doubles only."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)  # no text of the body can equal a name that its author cannot guess
        self._texts: list[str] = []
        self._num_left = MAX_SCHEMA_NODES

    def marked(self, value: Any) -> Any:
        """Returns the value with a text in place of each number that no double is exactly, unless it is too large
        for a schema."""
        self._num_left -= 1
        if self._num_left < 0:
            return value
        if isinstance(value, Mapping):
            return {name: self.marked(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.marked(item) for item in value]
        if not isinstance(value, WrittenFloat):
            return value
        self._texts.append(value.text)
        return f"{self._mark}-{len(self._texts) - 1}"

    def put_back(self, text: str) -> str:
        """Returns the JSON of a marked value with its numbers."""
        if not self._texts:
            return text
        return re.sub(f'"{self._mark}-([0-9]+)"', lambda found: self._texts[int(found[1])], text)
