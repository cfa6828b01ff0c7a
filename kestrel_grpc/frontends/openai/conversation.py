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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from kestrel_grpc.frontends.http.bodies import Body, Problems, Text, TextOr
from kestrel_grpc.frontends.http.fields import EXAMPLE_IMAGE, ImageText
from kestrel_grpc.frontends.http.json_body import LongText

MAX_MESSAGES = 256
MAX_PARTS = 256
"""The most parts of the content of one message."""
NOT_SUPPORTED = "is not supported"
MANY_IMAGES = "several images in one conversation are not supported"
_INSTRUCTIONS = ("system", "developer")
_SPEAKERS: Mapping[str, str] = MappingProxyType({"user": "User", "assistant": "Assistant"})
# Answers of this server may hold these fields, and clients send answers back unchanged.
_ONLY_OF_ANSWERS = (
    "refusal", "reasoning", "reasoning_content", "reasoning_details", "annotations", "audio", "function_call",
    "tool_calls", "provider_specific_fields",
)  # fmt: skip
_EMPTY_IN_ANSWERS = ("tool_calls", "function_call", "audio")
_OF_ANSWER: Any = Field(None, description="Without effect, and only in messages of the assistant.")
_OF_CACHES: Any = Field(None, description="Without effect: the caches find equal prompts by themselves.")


class ImageUrl(Body):
    """An image in a message."""

    url: ImageText = Field(
        description="An image file as a data URL; an address on one of the hosts of `--image-hosts`; or the "
        "`image_id` of a stored image.",
        examples=[EXAMPLE_IMAGE],
    )
    detail: Text | None = Field(
        None, description="Without effect: every image has the detail that the model takes."
    )
    format: Text | None = Field(None, description="Without effect: the file says what it is.")


class Part(Body):
    """A text or an image."""

    type: Literal["text", "image_url"] = Field(description="What it is.", examples=["text"])
    text: Text | None = Field(None, description="The text.")
    image_url: ImageUrl | None = Field(None, description="The image.")
    cache_control: Any = _OF_CACHES
    prompt_cache_breakpoint: Any = _OF_CACHES


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"] = Field(description="Who says it.")
    content: TextOr[Annotated[list[Part], Field(max_length=MAX_PARTS)]] = Field(
        description="A text, or a list of parts."
    )
    name: Text | None = Field(None, description="Without effect.")
    cache_control: Any = _OF_CACHES
    refusal: Any = _OF_ANSWER
    reasoning: Any = _OF_ANSWER
    reasoning_content: Any = _OF_ANSWER
    reasoning_details: Any = _OF_ANSWER
    annotations: Any = _OF_ANSWER
    audio: Any = _OF_ANSWER
    function_call: Any = _OF_ANSWER
    tool_calls: Any = _OF_ANSWER
    provider_specific_fields: Any = _OF_ANSWER


@dataclass(frozen=True, slots=True)
class Conversation:
    """Holds the question, and the image as the request has it; None if there is no image."""

    question: str
    image: str | LongText | None = None
    image_path: str = ""
    """The path of the field that holds the image."""


def read_conversation(messages: Sequence[Message], problems: Problems) -> Conversation:
    """Returns the conversation as one question."""
    reader = _Reader(problems)
    turns = [(message.role, reader.text(message, f"messages[{index}]")) for index, message in enumerate(messages)]
    if turns[-1][0] != "user":
        problems.add(f"messages[{len(messages) - 1}].role", "must be user in the last message")
    return Conversation(_written_out(turns), reader.image, reader.image_path)


def _written_out(turns: Sequence[tuple[str, str]]) -> str:
    if len(turns) == 1:
        return turns[0][1]
    blocks = [text for role, text in turns if role in _INSTRUCTIONS]
    blocks += [f"{_SPEAKERS[role]}: {text}" for role, text in turns if role in _SPEAKERS]
    return "\n\n".join((*blocks, "Assistant:"))


class _Reader:
    """Reads messages one after the other and keeps the one image that they may hold."""

    def __init__(self, problems: Problems) -> None:
        self.image: str | LongText | None = None
        self.image_path = ""
        self._problems = problems

    def text(self, message: Message, path: str) -> str:
        """Returns the text of a message."""
        is_answer = message.role == "assistant"
        for name in _ONLY_OF_ANSWERS:
            if not is_answer and name in message.model_fields_set:
                self._problems.add(f"{path}.{name}", "is not a field of this request")
            elif name in _EMPTY_IN_ANSWERS and getattr(message, name):
                self._problems.add(f"{path}.{name}", NOT_SUPPORTED)
        if isinstance(message.content, str):
            return message.content
        texts = [
            self._part(part, message.role, f"{path}.content[{index}]") for index, part in enumerate(message.content)
        ]
        return "\n".join(text for text in texts if text is not None)

    def _part(self, part: Part, role: str, path: str) -> str | None:
        """Returns the text of a part; None if it is an image."""
        wanted, other = ("text", "image_url") if part.type == "text" else ("image_url", "text")
        if getattr(part, other) is not None:
            self._problems.add(f"{path}.{other}", f"is not a field of a part of type {part.type}")
        if getattr(part, wanted) is None:
            self._problems.add(f"{path}.{wanted}", "is required")
        if part.type == "text" or part.image_url is None:
            return part.text
        if role != "user":
            self._problems.add(path, "images are taken from messages of the user only")
        if self.image is not None:
            self._problems.add(path, MANY_IMAGES)
        else:
            self.image, self.image_path = part.image_url.url, f"{path}.image_url.url"
        return None
