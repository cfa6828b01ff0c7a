"""Turns the messages of a chat into one question about at most one image.

The models answer one question and know no turns. One message of a user is the question as it is. Anything longer is
written out, blocks separated by empty lines:

    <system and developer messages, in their order>

    User: <text>

    Assistant: <text>

    User: <text>

    Assistant:
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kestrel_grpc.frontends.http.fields import Field, Kind, read
from kestrel_grpc.frontends.http.json_body import LongText
from kestrel_grpc.frontends.openai.fields import MANY_IMAGES, NOT_SUPPORTED
from kestrel_runtime.api.errors import Violation

MAX_MESSAGES = 256
MAX_PARTS = 256
"""Of the content of one message."""
_INSTRUCTIONS = ("system", "developer")
_SPEAKERS: Mapping[str, str] = MappingProxyType({"user": "User", "assistant": "Assistant"})
_ROLES = (*_INSTRUCTIONS, *_SPEAKERS)
_MESSAGE = (
    Field("role", Kind.TEXT, "Who says it.", is_required=True, choices=_ROLES),
    Field("content", Kind.TEXT_OR_LIST, "A text, or a list of parts.", is_required=True),
    Field("name", Kind.TEXT, "Without effect."),
)
# What an answer of this server may hold besides, so that it can be sent back as it came.
_OF_ANSWERS = ("refusal", "reasoning", "reasoning_details", "annotations", "audio", "function_call", "tool_calls")
_TEXT_PART = (
    Field("type", Kind.TEXT, "`text`.", is_required=True),
    Field("text", Kind.TEXT, "The text.", is_required=True),
)
_IMAGE_PART = (
    Field("type", Kind.TEXT, "`image_url`.", is_required=True),
    Field(
        "image_url",
        Kind.OBJECT,
        "The image.",
        is_required=True,
        fields=(
            Field("url", Kind.IMAGE, "A data URL.", is_required=True),
            Field("detail", Kind.TEXT, "Without effect: every image has the detail that the model takes."),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The question, and the image as it stands in the request; None where there is none."""

    question: str
    image: str | LongText | None
    image_path: str = ""
    """The field that holds the image."""


def read_conversation(messages: list[Any], violations: list[Violation]) -> Conversation:
    """The conversation as one question. Adds problems to `violations`; the result is then meaningless."""
    if not 0 < len(messages) <= MAX_MESSAGES:
        violations.append(Violation("messages", f"must be 1 to {MAX_MESSAGES} messages"))
        return Conversation("?", None)
    reader = _Reader(violations)
    turns = [reader.message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if turns[-1][0] != "user":
        violations.append(Violation(f"messages[{len(messages) - 1}].role", "must be user in the last message"))
    return Conversation(_written_out(turns), reader.image, reader.image_path)


def _written_out(turns: list[tuple[str, str]]) -> str:
    if len(turns) == 1:
        return turns[0][1]
    blocks = [text for role, text in turns if role in _INSTRUCTIONS]
    blocks += [f"{_SPEAKERS[role]}: {text}" for role, text in turns if role in _SPEAKERS]
    return "\n\n".join((*blocks, "Assistant:"))


class _Reader:
    """Reads messages one after the other and keeps the one image that they may hold."""

    def __init__(self, violations: list[Violation]) -> None:
        self.image: str | LongText | None = None
        self.image_path = ""
        self._violations = violations

    def message(self, message: Any, path: str) -> tuple[str, str]:
        """The role and the text of a message."""
        if not isinstance(message, dict):
            self._refuse(path, "must be an object")
            return "user", ""
        role = message.get("role")
        if role == "assistant":
            for name in ("tool_calls", "function_call", "audio"):
                if message.get(name):
                    self._refuse(f"{path}.{name}", NOT_SUPPORTED)
            message = {name: value for name, value in message.items() if name not in _OF_ANSWERS}
        values = read(_MESSAGE, message, self._violations, f"{path}.")
        content = values.get("content", "")
        if isinstance(content, str):
            return values.get("role", "user"), content
        if len(content) > MAX_PARTS:
            self._refuse(f"{path}.content", f"must be at most {MAX_PARTS} parts")
            content = []
        texts = [self._part(part, role, f"{path}.content[{index}]") for index, part in enumerate(content)]
        return values.get("role", "user"), "\n".join(text for text in texts if text is not None)

    def _part(self, part: Any, role: Any, path: str) -> str | None:
        """The text of a part; None for an image."""
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            return read(_TEXT_PART, part, self._violations, f"{path}.").get("text", "")
        if kind != "image_url":
            self._refuse(f"{path}.type", "must be text or image_url")
            return None
        if role != "user":
            self._refuse(path, "images are taken from messages of the user only")
        image = read(_IMAGE_PART, part, self._violations, f"{path}.").get("image_url", {}).get("url")
        if self.image is not None:
            self._refuse(path, MANY_IMAGES)
        elif image is not None:
            self.image, self.image_path = image, f"{path}.image_url.url"
        return None

    def _refuse(self, path: str, description: str) -> None:
        self._violations.append(Violation(path, description))
