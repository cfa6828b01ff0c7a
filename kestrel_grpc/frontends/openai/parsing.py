"""Converts OpenAI's requests to queries of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kestrel_grpc.frontends.http.constraints import read_openai_constraint
from kestrel_grpc.frontends.http.endpoint import renamed
from kestrel_grpc.frontends.http.fields import Field, read
from kestrel_grpc.frontends.http.images import PLACEHOLDER, GivenImage, read_image
from kestrel_grpc.frontends.http.json_body import LongText, parse_json
from kestrel_grpc.frontends.http.sampling import read_sampling
from kestrel_grpc.frontends.openai import fields
from kestrel_grpc.frontends.openai.conversation import Conversation, read_conversation
from kestrel_grpc.images.stored_images import ImageReference
from kestrel_runtime.api.errors import ImageError, InvalidRequest, Violation
from kestrel_runtime.api.requests import Query, RequestOptions, SamplingParams


@dataclass(frozen=True, slots=True)
class ParsedQuery:
    """`image` names the image where `query.image` is a placeholder."""

    query: Query
    image: ImageReference | None
    is_streamed: bool
    includes_usage: bool


class QueryParser:
    """`max_image_bytes` is the largest encoded image."""

    def __init__(self, max_image_bytes: int) -> None:
        self._max_image_bytes = max_image_bytes

    def chat(self, body: bytes) -> ParsedQuery:
        """A request of `/v1/chat/completions`. Raises `InvalidRequest` with all violations, or an `ImageError`."""
        violations: list[Violation] = []
        values = _values(body, fields.CHAT, fields.CHAT_DEFAULTS, violations)
        conversation = Conversation("?", None)
        if "messages" in values:
            conversation = read_conversation(values["messages"], violations)
        max_tokens = values.get("max_completion_tokens", values.get("max_tokens"))
        num_top = values.get("top_logprobs")
        if num_top is not None and not values.get("logprobs"):
            violations.append(Violation("top_logprobs", "needs logprobs"))
        lengths = {"max_tokens": max_tokens, "logprobs": (num_top or 0) if values.get("logprobs") else None}
        return self._parsed(values, conversation, lengths, violations, fields.chat_name)

    def completion(self, body: bytes) -> ParsedQuery:
        """A request of `/v1/completions`. Raises `InvalidRequest` with all violations."""
        violations: list[Violation] = []
        values = _values(body, fields.COMPLETIONS, fields.COMPLETIONS_DEFAULTS, violations)
        conversation = Conversation(values.get("prompt", "?"), None)
        lengths = {"max_tokens": values.get("max_tokens"), "logprobs": values.get("logprobs")}
        return self._parsed(values, conversation, lengths, violations, fields.completions_name)

    def _parsed(
        self,
        values: Mapping[str, Any],
        conversation: Conversation,
        lengths: Mapping[str, int | None],
        violations: list[Violation],
        name: Callable[[str, str], str],
    ) -> ParsedQuery:
        sampling = read_sampling(values, violations)
        constraint = read_openai_constraint(values, violations)
        named = next((field for field in fields.CONSTRAINTS if values.get(field)), fields.CONSTRAINTS[0])
        image, image_error = self._image(conversation)
        query = None
        try:
            query = Query(
                question=conversation.question,
                image=None if image is None else image.data,
                reasoning=values.get("reasoning", False),
                sampling=SamplingParams(
                    temperature=values.get("temperature"),
                    top_p=values.get("top_p"),
                    seed=values.get("seed"),
                    **lengths,
                    **sampling,
                ),
                options=RequestOptions(model=values.get("model", "")),
                constraint=constraint,
            )
        except InvalidRequest as error:
            violations += renamed(error.violations, lambda field: name(field, named))
        if image_error is not None:
            image_error.violations = renamed(image_error.violations, lambda _: conversation.image_path)
            violations += image_error.violations
        if image_error is not None and len(violations) == 1:
            raise image_error
        if violations or query is None:
            raise InvalidRequest(tuple(violations))
        options = values.get("stream_options", {})
        return ParsedQuery(
            query,
            None if image is None else image.reference,
            values.get("stream", False),
            options.get("include_usage", False),
        )

    def _image(self, conversation: Conversation) -> tuple[GivenImage | None, ImageError | None]:
        given: str | LongText | None = conversation.image
        if given is None:
            return None, None
        try:
            return read_image(given, self._max_image_bytes), None
        except ImageError as error:
            return GivenImage(PLACEHOLDER), error


def _values(
    body: bytes, known: tuple[Field, ...], defaults: Mapping[str, tuple[Any, ...]], violations: list[Violation]
) -> dict[str, Any]:
    document = parse_json(body)
    for name, allowed in defaults.items():
        # `1 == True` in Python.
        if name in document and not any(
            value == document[name] and isinstance(value, bool) is isinstance(document[name], bool)
            for value in allowed
        ):
            violations.append(Violation(name, fields.NOT_SUPPORTED))
    rest = {name: value for name, value in document.items() if name not in defaults}
    return read(known, rest, violations)
