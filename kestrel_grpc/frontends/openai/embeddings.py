"""Answers `/v1/embeddings`: the embeddings of pictures, which stand where OpenAI's API has texts.

OpenAI's API embeds no pictures, so that other servers have forms of their own; the common ones are read.
"""

from __future__ import annotations

import asyncio
import struct
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.submission import Submission
from kestrel_grpc.frontends.http.bodies import Body, Problems, Text, Unusable, read
from kestrel_grpc.frontends.http.fields import EXAMPLE_IMAGE, PLACEHOLDER, read_image
from kestrel_grpc.frontends.http.json_body import LongText, parse_json
from kestrel_grpc.frontends.http.output_json import large_json, to_json
from kestrel_grpc.frontends.openai.requests import Only
from kestrel_grpc.images.stored_images import ImageReference
from kestrel_runtime.api.errors import InvalidRequest
from kestrel_runtime.api.events import EmbedOutput, Finished
from kestrel_runtime.api.requests import Embed, RequestOptions

MAX_INPUTS = 16
"""The most pictures of one request."""
_NO_PICTURE = (
    'must be a picture: its base64, data URL, address or image_id, or an object such as {"image": …}; '
    "texts have no embeddings"
)
_LEAST_CHARACTERS = 16
"""The fewest characters of a text that may hold a picture: no base64 of one and no `image_id` has fewer."""
_KINDS = ("image", "image_url", "input_image")


def _picture(given: Any) -> str | LongText | None:
    """Returns the text that holds or names a picture, in one of the forms that clients send; None if none does."""
    if isinstance(given, dict) and given.keys() == {"content"} and isinstance(given["content"], list):
        given = given["content"][0] if len(given["content"]) == 1 else None
    if isinstance(given, dict):
        kind = given.get("type")
        names = [name for name in given if name != "type"]
        is_known = len(names) == 1 and names[0] in _KINDS and (kind is None or kind in _KINDS)
        given = given[names[0]] if is_known else None
    if isinstance(given, dict) and given.keys() == {"url"}:
        given = given["url"]
    return given if isinstance(given, str | LongText) and given else None


def _is_sentence(text: str) -> bool:
    """Returns True if a text is what OpenAI's API embeds, so that its author does not expect an image's error."""
    return " " in text or (len(text) < _LEAST_CHARACTERS and ":" not in text)


def _pictures(given: Any) -> list[str | LongText | None]:
    pictures = given if isinstance(given, list) else [given]
    if not 1 <= len(pictures) <= MAX_INPUTS:
        raise Unusable(f"must be from 1 to {MAX_INPUTS} pictures")
    return [_picture(item) for item in pictures]


class EmbeddingBody(Body):
    """Embeds pictures."""

    model: Text = Field(description="The model's name, as `/v1/models` has it.", examples=["moondream3-preview"])
    input: Annotated[
        list[str | LongText | None],
        PlainValidator(_pictures),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "array"}]}),
    ] = Field(
        description=f"A picture, or up to {MAX_INPUTS} in a list: base64, a data URL, an address on one of the "
        'hosts of `--image-hosts` or the `image_id` of a stored image; alone, as `{"image": …}`, or as a part '
        "`image_url`.",
        examples=[EXAMPLE_IMAGE],
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="The form of a vector: a list, or base64 of little-endian numbers of 4 bytes."
    )
    normalize: bool = Field(
        True, description="Whether vectors are scaled to the length 1, as OpenAI's are; true by default."
    )
    user: Text | None = Field(None, description="Without effect.")
    input_type: Text | None = Field(None, description="Without effect: all pictures are embedded alike.")
    modality: Annotated[None, Only("image")] = None
    dimensions: Annotated[None, Only()] = None


@dataclass(frozen=True, slots=True)
class ParsedEmbeddings:
    """Holds the requests of a body, one for each picture, with their names and what they refer to."""

    requests: tuple[Embed, ...]
    references: tuple[ImageReference | None, ...]
    is_base64: bool
    is_list: bool
    """True if the pictures are a list, so that each has a place."""

    def field_name(self, place: int, field: str) -> str:
        """Returns the name in the body of a field of the request at this place."""
        return _field_name(place if self.is_list else None, field)


def _field_name(place: int | None, field: str) -> str:
    if not field.startswith("image"):
        return "model" if field.startswith("options.") else field
    return "input" if place is None else f"input[{place}]"


def parse_embeddings(max_image_bytes: int, data: bytes) -> ParsedEmbeddings:
    """Reads a request of `/v1/embeddings`. Raises `InvalidRequest` with every mistake, or `ImageError`.

    `max_image_bytes` is the largest encoded image.
    """
    problems = Problems()
    document = parse_json(data, problems.add)
    body = read(EmbeddingBody, document, problems)
    is_list = isinstance(document.get("input"), list)
    options, requests, references = RequestOptions(model=body.model), [], []
    for place, text in enumerate(body.input):
        name = partial(_field_name, place if is_list else None)
        if text is None or (isinstance(text, str) and _is_sentence(text)):
            problems.add(name("image"), _NO_PICTURE)
            continue
        image = read_image(text, name("image"), max_image_bytes, problems)
        references.append(image.reference)
        try:
            requests.append(Embed(image.data or PLACEHOLDER, normalize=body.normalize, options=options))
        except InvalidRequest as error:
            for violation in error.violations:
                problems.add(name(violation.field), violation.description)
    problems.require_none()
    return ParsedEmbeddings(tuple(requests), tuple(references), body.encoding_format == "base64", is_list)


def serving_embeddings(
    submission: Submission, model: str
) -> Callable[[ParsedEmbeddings, CallContext], Awaitable[bytes]]:
    """Makes the `serve` of the operation. Answers name `model`."""

    async def serve(parsed: ParsedEmbeddings, call: CallContext) -> bytes:
        answers = await submission.answers_of(parsed.requests, parsed.references, parsed.field_name, call)
        render = partial(_rendered, answers, model, is_base64=parsed.is_base64)
        # A vector is written within two milliseconds.
        return render(to_json) if len(answers) == 1 else await asyncio.to_thread(render, large_json)

    return serve


def _rendered(answers: Sequence[Finished], model: str, encode: Callable[[Any], bytes], *, is_base64: bool) -> bytes:
    num_tokens = sum(answer.usage.num_input_tokens for answer in answers)
    return encode(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": place, "embedding": _vector(answer, is_base64=is_base64)}
                for place, answer in enumerate(answers)
            ],
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _vector(answer: Finished, *, is_base64: bool) -> Any:
    assert isinstance(answer.output, EmbedOutput), f"the engine answered with {type(answer.output)}"
    mean = answer.output.mean
    return b64encode(struct.pack(f"<{len(mean)}f", *mean)).decode() if is_base64 else mean
