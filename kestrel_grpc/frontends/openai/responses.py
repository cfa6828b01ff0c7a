"""Defines the body of `/v1/responses`: what a chat has, in other words. Nothing is stored.

Each request has the whole conversation, and what names an earlier response or a file is refused.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator, WithJsonSchema

from kestrel_grpc.frontends.http.answers import ParsedRequest
from kestrel_grpc.frontends.http.bodies import Body, Problems, Text, TextOr, Unusable, read
from kestrel_grpc.frontends.http.fields import (
    EXAMPLE_IMAGE,
    ImageText,
    new_constraint,
    setting,
)
from kestrel_grpc.frontends.http.json_body import parse_json
from kestrel_grpc.frontends.http.output_json import to_json
from kestrel_grpc.frontends.openai.conversation import MAX_MESSAGES, MAX_PARTS, ConversationReader
from kestrel_grpc.frontends.openai.requests import ANY_OBJECT, NOT_IN_CALLS, CommonFields, Only
from kestrel_grpc.frontends.openai.skills import (
    DESCRIPTION,
    TEXT,
    Skill,
    chosen_skill,
    engine_request,
    refuse_with_skill,
)
from kestrel_grpc.frontends.openai.tools import (
    CHOICE_DESCRIPTION,
    MAX_TOOLS,
    Function,
    FunctionFields,
    ToolChoiceField,
    forced_call,
)
from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.requests import RequestOptions

MAX_PAIRS, MAX_NAME_CHARS, MAX_VALUE_CHARS = 16, 64, 512
"""The bounds of `metadata`, which are OpenAI's."""
_NO_EFFECT: Any = Field(None, description="Without effect.")
_NOTHING_STORED: Any = Field(None, description="Without effect: nothing is stored.")


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Unusable("must be an object")
    is_small = len(value) <= MAX_PAIRS and all(
        len(name) <= MAX_NAME_CHARS and isinstance(text, str) and len(text) <= MAX_VALUE_CHARS
        for name, text in value.items()
    )
    if not is_small:
        raise Unusable(
            f"must have at most {MAX_PAIRS} texts of at most {MAX_VALUE_CHARS} characters, "
            f"with names of at most {MAX_NAME_CHARS}"
        )
    return value


# Each event that has the response repeats it.
Metadata = Annotated[dict[str, str], PlainValidator(_metadata), WithJsonSchema({"type": "object"})]


class InputPart(Body):
    """A text or an image of an input item, or what a reasoning says."""

    type: Literal["input_text", "input_image", "output_text", "refusal", "reasoning_text"] = Field(
        description="What it is.", examples=["input_text"]
    )
    text: Text | None = Field(None, description="The text.")
    image_url: ImageText | None = Field(
        None,
        description="An image file as a data URL; an address on one of the hosts of `--image-hosts`; or the "
        "`image_id` of a stored image.",
        examples=[EXAMPLE_IMAGE],
    )
    detail: Text | None = Field(
        None, description="Without effect: every image has the detail that the model takes."
    )
    refusal: Text | None = _NO_EFFECT
    annotations: Any = _NO_EFFECT
    logprobs: Any = _NO_EFFECT
    prompt_cache_breakpoint: Any = _NO_EFFECT
    file_id: Annotated[None, Only()] = None


class InputItem(Body):
    """A message, a call of a function, its result, or a reasoning, which is ignored."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = Field(
        "message", description="What it is."
    )
    role: Literal["system", "developer", "user", "assistant"] | None = Field(
        None, description="Who says a message; required of messages."
    )
    content: TextOr[Annotated[list[InputPart], Field(max_length=MAX_PARTS)]] | None = Field(
        None, description="A text, or a list of parts; required of messages."
    )
    call_id: Text | None = Field(None, description="Required of calls and of results: what connects them.")
    name: Text | None = Field(None, description="Required of calls: the name of the function.")
    arguments: Text | None = Field(None, description="Required of calls: the arguments, as JSON.")
    output: TextOr[Annotated[list[InputPart], Field(max_length=MAX_PARTS)]] | None = Field(
        None, description="Required of results: a text, or a list of parts."
    )
    id: Text | None = _NOTHING_STORED
    status: Text | None = _NO_EFFECT
    phase: Text | None = _NO_EFFECT
    summary: Any = _NO_EFFECT
    encrypted_content: Any = _NO_EFFECT
    namespace: Any = _NO_EFFECT


class TextFormat(Body):
    """Constrains the form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="The kind of answer.", examples=["text"]
    )
    name: Text | None = Field(None, description="Without effect.")
    description: Text | None = Field(None, description="Without effect.")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="For `json_schema`: the answer is JSON that is valid under it."
    )
    strict: bool | None = Field(None, description="Without effect: answers are valid in any case.")


class TextOptions(Body):
    """Describes the text of the answer."""

    format: TextFormat | None = Field(None, description="What the answer must look like.")
    verbosity: Text | None = Field(None, description="Without effect: the models know no such setting.")


class ReasoningOptions(Body):
    """Says whether the model reasons."""

    enabled: bool = Field(
        False, description="Whether the model reasons before it answers. Not a field of OpenAI's."
    )
    effort: Text | None = Field(None, description="Without effect: `enabled` says whether the model reasons.")
    summary: Text | None = Field(None, description="Without effect: the whole reasoning is returned.")
    generate_summary: Text | None = Field(None, description="Without effect: the whole reasoning is returned.")


class ResponseTool(FunctionFields):
    """A tool of a response."""

    type: Literal["function"] = Field(description="What it is.", examples=["function"])


class ResponseStreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: bool = Field(False, description="Without effect: events are not padded.")


class ResponseBody(CommonFields):
    """Answers a conversation about images, as a response of OpenAI's newer API. Nothing is stored."""

    input: TextOr[Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]] = Field(
        description="A text of the user, or a list of items.",
        examples=[[{"role": "user", "content": "What is in this image?"}]],
    )
    skill: Skill | None = Field(None, description=DESCRIPTION)
    instructions: Text | None = Field(None, description="A message of the system before all others.")
    stream_options: ResponseStreamOptions | None = Field(None, description="Options of a stream.")
    max_output_tokens: int | None = setting("max_tokens", "Most tokens to generate.")
    top_logprobs: Annotated[None, Only(0)] = None
    text: TextOptions | None = Field(None, description="The form of the text.")
    reasoning: ReasoningOptions | None = Field(None, description="The reasoning.")
    tools: list[ResponseTool] | None = Field(
        None,
        description=f"Functions, at most {MAX_TOOLS}. Without a forced call they have no effect.",
        max_length=MAX_TOOLS,
        examples=[[{"type": "function", "name": "find"}]],
    )
    tool_choice: ToolChoiceField | None = Field(None, description=CHOICE_DESCRIPTION)
    parallel_tool_calls: bool | None = Field(None, description="Without effect: an answer has one call at most.")
    max_tool_calls: int | None = Field(None, description="Without effect: an answer has one call at most.")
    metadata: Metadata | None = Field(
        None,
        description=f"Without effect, and returned: at most {MAX_PAIRS} texts of at most {MAX_VALUE_CHARS} "
        f"characters, with names of at most {MAX_NAME_CHARS}.",
    )
    store: bool | None = Field(None, description="Without effect: nothing is stored, and the answer says so.")
    include: list[Text] | None = _NO_EFFECT
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Without effect: a conversation that is too long is refused."
    )
    background: Annotated[None, Only(False)] = None
    previous_response_id: Annotated[None, Only()] = None
    conversation: Annotated[None, Only()] = None
    prompt: Annotated[None, Only()] = None
    n: Annotated[None, Only(1)] = None


class ResponseStyle(NamedTuple):
    """Holds what a response repeats of its request, and the functions one of which the answer calls."""

    echo: bytes
    """The JSON object of what it repeats, which may be large."""
    functions: tuple[str, ...]
    is_json: bool = False
    """True if the text of the answer is the JSON of a skill's result."""


def parse_response(max_image_bytes: int, served: Collection[str], data: bytes) -> ParsedRequest:
    """Reads a request of `/v1/responses`. Raises `InvalidRequest` with every mistake, or `ImageError`.

    `max_image_bytes` is the largest encoded image, `served` are the names of the served model.
    """
    problems = Problems()
    body = read(ResponseBody, parse_json(data, problems.add), problems)
    reader = ConversationReader(problems)
    paths: list[str] = []  # of the messages of the conversation
    if body.instructions is not None:
        reader.say("system", body.instructions)
        paths.append("instructions")
    if isinstance(body.input, str):
        reader.say("user", body.input)
        paths.append("input")
    else:
        for index, item in enumerate(body.input):
            if _read_item(item, f"input[{index}]", reader, problems):
                paths.append(f"input[{index}]")
    conversation = reader.conversation()
    functions = [
        Function(tool.name, tool.parameters, f"tools[{index}].parameters")
        for index, tool in enumerate(body.tools or ())
    ]
    call = forced_call(functions, body.tool_choice, problems)
    constraint, constraint_path = _constraint(body, problems), "text.format.schema"
    if call is not None:
        constraint, constraint_path = call.constraint, call.path

    def name(field: str) -> str:
        group, _, rest = field.partition(".")
        if field == "sampling.max_tokens" and body.max_output_tokens is not None:
            return "max_output_tokens"
        if field == "sampling.stop[0]" and isinstance(body.stop, str):
            return "stop"
        if group == "sampling":
            return rest
        path = conversation.image_path(field)
        if path is not None:
            return path
        if group.startswith("messages["):
            place = int(group.removeprefix("messages[").removesuffix("]"))
            return f"{paths[place]}.{rest}" if paths[place].startswith("input[") else paths[place]
        text = f"{paths[-1]}.content" if paths and paths[-1].startswith("input[") else "input"
        known = {"constraint": constraint_path, "options": "model"}
        return known.get(group, text)

    images = conversation.images(max_image_bytes, problems)
    model, skill = chosen_skill(body.model, body.skill, served, problems)
    reasons = body.reasoning is not None and body.reasoning.enabled
    form = None if body.text is None else body.text.format
    is_shaped = form is not None and form.type == "json_schema"
    refuse_with_skill(
        skill, {"reasoning.enabled": reasons, "tool_choice": call, "text.format": is_shaped}, problems
    )
    sampling = body.params(
        **({} if call is None else NOT_IN_CALLS),
        max_tokens=body.max_tokens if body.max_output_tokens is None else body.max_output_tokens,
    )
    options = RequestOptions(model=model)
    files = [image.data or b"" for image in images]
    request = problems.checked(
        name,
        lambda: engine_request(
            skill, conversation, files, sampling, options, problems, reasoning=reasons, constraint=constraint
        ),
    )
    style = ResponseStyle(to_json(_echo(body)), () if call is None else call.names, skill != TEXT)
    return ParsedRequest(request, tuple(image.reference for image in images), body.stream, style, name)


def _constraint(body: ResponseBody, problems: Problems) -> Constraint | None:
    given = None if body.text is None else body.text.format
    if given is not None and given.type != "json_schema" and given.schema_ is not None:
        problems.add("text.format.schema", "is a field of json_schema only")
    if given is None or given.type == "text":
        return None
    if given.type == "json_schema" and given.schema_ is None:
        problems.add("text.format.schema", "is required")
    return new_constraint(
        json_schema=given.schema_ if given.type == "json_schema" and given.schema_ else ANY_OBJECT
    )


def _read_item(item: InputItem, path: str, reader: ConversationReader, problems: Problems) -> bool:
    """Adds an item to the conversation; returns False for one that is ignored."""
    required = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "reasoning": (),
    }[item.type]
    missing = [name for name in required if getattr(item, name) is None]
    for name in missing:
        problems.add(f"{path}.{name}", "is required")
    if item.type == "reasoning":
        return False
    if missing:
        reader.say("user", "?")
    elif item.type == "function_call":
        reader.say("assistant", reader.call(item.call_id or "", item.name or "", item.arguments or ""))
    elif item.type == "function_call_output":
        text = _text(item.output, "tool", f"{path}.output", reader, problems)
        reader.result(item.call_id, text, f"{path}.call_id")
    else:
        role = item.role or "user"
        reader.say(role, _text(item.content, role, f"{path}.content", reader, problems))
    return True


def _text(
    content: str | list[InputPart] | None, role: str, path: str, reader: ConversationReader, problems: Problems
) -> str:
    """Returns the text of a message or of a result, and notes its images."""
    if not isinstance(content, list):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        place = f"{path}[{index}]"
        if part.type == "input_image":
            if part.image_url is None:
                problems.add(f"{place}.image_url", "is required")
            else:
                reader.picture(part.image_url, role, place, f"{place}.image_url")
        elif part.type == "refusal":
            continue
        elif part.type == "reasoning_text":
            problems.add(f"{place}.type", "reasoning_text is a part of reasonings only")
        elif part.text is None:
            problems.add(f"{place}.text", "is required")
        else:
            texts.append(part.text)
    return "\n".join(texts)


def _echo(body: ResponseBody) -> dict[str, Any]:
    """Returns what a response repeats of its request."""
    choice = body.tool_choice
    shown: Any = "auto" if choice is None else choice.mode
    if choice is not None and choice.mode == "required" and len(choice.names) == 1:
        shown = {"type": "function", "name": choice.names[0]}
    text_format = None if body.text is None or body.text.format is None else body.text.format
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {
            "format": {"type": "text"}
            if text_format is None
            else text_format.model_dump(by_alias=True, exclude_none=True)
        },
        "tool_choice": shown,
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
            for tool in body.tools or ()
        ],
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
