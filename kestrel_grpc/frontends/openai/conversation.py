"""Reads the messages of OpenAI's API as a conversation, with the images in it.

One message of a user alone, with one image at most, is a question, a `Query` of the engine. Anything longer is a
`Chat`, which has neither tools nor developers: a developer's message is one of the system, the result of a tool is
a text of the user, `Result of NAME: TEXT`, and calls of the assistant are their JSON, each on a line of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from kestrel_grpc.frontends.http.bodies import Body, Problems, Text, TextOr
from kestrel_grpc.frontends.http.fields import EXAMPLE_IMAGE, GivenImage, ImageText, read_image
from kestrel_grpc.frontends.http.json_body import LongText
from kestrel_runtime.api.requests import MAX_CHAT_IMAGES, MAX_CHAT_MESSAGES, Chat, ChatMessage, Query, Role

MAX_MESSAGES = MAX_CHAT_MESSAGES
MAX_PARTS = 256
"""The most parts of the content of one message."""
MAX_CALLS = 128
"""The most calls in one message of the assistant."""
NOT_SUPPORTED = "is not supported"
_ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "system": Role.SYSTEM,
        "developer": Role.SYSTEM,
        "user": Role.USER,
        "assistant": Role.ASSISTANT,
        "tool": Role.USER,
    }
)
# Answers of this server may hold these fields, and clients send answers back unchanged.
_ONLY_OF_ANSWERS = (
    "refusal", "reasoning", "reasoning_content", "reasoning_details", "annotations", "audio", "function_call",
    "tool_calls", "provider_specific_fields",
)  # fmt: skip
_EMPTY_IN_ANSWERS = ("function_call", "audio")
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
    """A text or an image, or what the assistant has refused."""

    type: Literal["text", "image_url", "refusal"] = Field(description="What it is.", examples=["text"])
    text: Text | None = Field(None, description="The text.")
    image_url: ImageUrl | None = Field(None, description="The image.")
    refusal: Text | None = _OF_ANSWER
    cache_control: Any = _OF_CACHES
    prompt_cache_breakpoint: Any = _OF_CACHES


class CalledFunction(Body):
    """The function of a `ToolCall`."""

    name: Text = Field(description="The name of the function.", examples=["find"])
    arguments: Text = Field(description="The arguments, as JSON.", examples=["{}"])


class ToolCall(Body):
    """A call that the assistant has made in an earlier turn."""

    id: Text = Field(description="What the message with the result names as `tool_call_id`.", examples=["call_1"])
    type: Literal["function"] = Field(description="What it is.", examples=["function"])
    function: CalledFunction = Field(description="What was called.", examples=[{"name": "find", "arguments": "{}"}])
    index: int | None = Field(None, description="Without effect.")


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="Who says it.")
    content: TextOr[Annotated[list[Part], Field(max_length=MAX_PARTS)]] | None = Field(
        None, description="A text, or a list of parts. Only a message of the assistant with calls needs none."
    )
    tool_calls: list[ToolCall] | None = Field(
        None,
        description=f"The assistant's calls of tools, at most {MAX_CALLS}.",
        max_length=MAX_CALLS,
        examples=[[{"id": "call_1", "type": "function", "function": {"name": "find", "arguments": "{}"}}]],
    )
    tool_call_id: Text | None = Field(None, description="Required of a message of a tool: the `id` of its call.")
    name: Text | None = Field(None, description="Without effect.")
    cache_control: Any = _OF_CACHES
    refusal: Any = _OF_ANSWER
    reasoning: Any = _OF_ANSWER
    reasoning_content: Any = _OF_ANSWER
    reasoning_details: Any = _OF_ANSWER
    annotations: Any = _OF_ANSWER
    audio: Any = _OF_ANSWER
    function_call: Any = _OF_ANSWER
    provider_specific_fields: Any = _OF_ANSWER


class Picture(NamedTuple):
    """Holds an image as the body has it."""

    url: str | LongText
    path: str
    """The path of the field that holds it."""
    message: int
    """The index of its message in the conversation."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Holds the messages without their images, and the images in their order."""

    messages: tuple[ChatMessage, ...]
    pictures: tuple[Picture, ...] = ()

    def images(self, max_bytes: int, problems: Problems) -> list[GivenImage]:
        """Reads the images, of at most `max_bytes` each. Fetches nothing."""
        return [read_image(picture.url, picture.path, max_bytes, problems) for picture in self.pictures]

    def request(self, images: Sequence[bytes], **shared: Any) -> Query | Chat:
        """Returns the request of the engine. Raises `InvalidRequest`. `shared` are the arguments of both kinds."""
        if len(self.messages) == 1 and self.messages[0].role is Role.USER and len(images) < 2:
            return Query(self.messages[0].text, images[0] if images else None, **shared)
        seen: dict[int, list[bytes]] = {}
        for picture, image in zip(self.pictures, images, strict=True):
            seen.setdefault(picture.message, []).append(image)
        messages = (
            replace(message, images=tuple(seen.get(index, ()))) for index, message in enumerate(self.messages)
        )
        return Chat(tuple(messages), **shared)

    def image_path(self, field: str) -> str | None:
        """Returns the path in the body of a field of the engine's requests if it is about an image, else None."""
        if field.partition(".")[0] == "image" and self.pictures:
            return self.pictures[0].path
        found = _IMAGE_FIELD.match(field)
        if found is None:
            return None
        paths = [picture.path for picture in self.pictures if picture.message == int(found[1])]
        return paths[int(found[2])]


_IMAGE_FIELD = re.compile(r"messages\[(\d+)\]\.images\[(\d+)\]")


def read_conversation(messages: Sequence[Message], problems: Problems) -> Conversation:
    """Returns the messages of a chat as a conversation."""
    reader = ConversationReader(problems)
    for index, message in enumerate(messages):
        _read_message(message, f"messages[{index}]", reader, problems)
    return reader.conversation()


class ConversationReader:
    """Collects turns one after the other, the names of calls, and the images that turns hold."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._messages: list[ChatMessage] = []
        self._called: dict[str, str] = {}  # names of functions by ids of calls
        self._pictures: list[Picture] = []

    def say(self, role: str, text: str) -> None:
        """Adds what somebody says. `role` is a role of OpenAI's API."""
        self._messages.append(ChatMessage(_ROLES[role], text))

    def call(self, id: str, name: str, arguments: str) -> str:
        """Notes a call of the assistant; returns its text."""
        self._called[id] = name
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'

    def result(self, id: str | None, text: str, path: str) -> None:
        """Adds the result of a call. `path` is that of the field with the id."""
        if id is None:
            self._problems.add(path, "is required")
        elif id not in self._called:
            self._problems.add(path, "is not the id of an earlier call")
        else:
            text = f"Result of {self._called[id]}: {text}"
        self.say("tool", text)

    def picture(self, url: str | LongText, role: str, part_path: str, path: str) -> None:
        """Notes an image. `path` is that of the field with it, within the part at `part_path`."""
        if role != "user":
            self._problems.add(part_path, "images are taken from messages of the user only")
        elif len(self._pictures) == MAX_CHAT_IMAGES:
            self._problems.add(part_path, f"all messages together have at most {MAX_CHAT_IMAGES} images")
        else:
            # Parts are read before their message is added.
            self._pictures.append(Picture(url, path, len(self._messages)))

    def conversation(self) -> Conversation:
        """Returns what has been added."""
        return Conversation(tuple(self._messages), tuple(self._pictures))


def _read_message(message: Message, path: str, reader: ConversationReader, problems: Problems) -> None:
    for name in _ONLY_OF_ANSWERS:
        if message.role != "assistant" and name in message.model_fields_set:
            problems.add(f"{path}.{name}", "is not a field of this request")
        elif name in _EMPTY_IN_ANSWERS and getattr(message, name):
            problems.add(f"{path}.{name}", NOT_SUPPORTED)
    if message.role != "tool" and message.tool_call_id is not None:
        problems.add(f"{path}.tool_call_id", "is a field of messages of tools only")
    calls = [reader.call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    texts: list[str] = []
    if isinstance(message.content, str):
        texts = [message.content]
    elif message.content is not None:
        parts = (
            _read_part(part, message.role, f"{path}.content[{index}]", reader, problems)
            for index, part in enumerate(message.content)
        )
        texts = [text for text in parts if text is not None]
    elif not calls and not message.refusal:
        problems.add(f"{path}.content", "is required")
    if calls:
        texts = [*filter(None, texts), *calls]
    text = "\n".join(texts)
    if message.role == "tool":
        reader.result(message.tool_call_id, text, f"{path}.tool_call_id")
    else:
        reader.say(message.role, text)


def _read_part(part: Part, role: str, path: str, reader: ConversationReader, problems: Problems) -> str | None:
    """Returns the text of a part; None if it is an image or a refusal."""
    if part.type == "refusal" and role != "assistant":
        problems.add(f"{path}.type", "refusal is a part of messages of the assistant only")
    for name in ("text", "image_url", "refusal"):
        is_given = getattr(part, name) is not None
        if is_given and name != part.type:
            problems.add(f"{path}.{name}", f"is not a field of a part of type {part.type}")
        elif not is_given and name == part.type:
            problems.add(f"{path}.{name}", "is required")
    if part.type == "image_url" and part.image_url is not None:
        reader.picture(part.image_url.url, role, path, f"{path}.image_url.url")
    return part.text if part.type == "text" else None
