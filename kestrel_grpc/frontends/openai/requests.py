"""Defines the bodies of OpenAI's requests: fields are read, ignored, or refused unless they ask for nothing.

A field is ignored if it cannot change an answer of these models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, PlainValidator
from pydantic.json_schema import JsonSchemaValue

from kestrel_grpc.frontends.http.answers import ParsedRequest
from kestrel_grpc.frontends.http.bodies import Body, Problems, Text, TextOr, Unusable, read
from kestrel_grpc.frontends.http.fields import (
    ConstraintBody,
    GivenImage,
    Sampling,
    new_constraint,
    setting,
)
from kestrel_grpc.frontends.http.json_body import parse_json
from kestrel_grpc.frontends.openai.conversation import (
    MAX_MESSAGES,
    NOT_SUPPORTED,
    Conversation,
    Message,
    read_conversation,
)
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
    ForcedCall,
    Function,
    FunctionFields,
    ToolChoiceField,
    forced_call,
)
from kestrel_runtime.api.constraints import MAX_CHOICES, Constraint
from kestrel_runtime.api.requests import ChatMessage, RequestOptions, Role
from kestrel_runtime.api.sampling_params import SamplingParams

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of any JSON object."""
_NO_SEED = -1
NOT_IN_CALLS: Mapping[str, Any] = MappingProxyType({"stop": (), "include_stop": False})
"""The settings of sampling of a forced call: a stop string would end its arguments anywhere."""
_SIGN = 2**63


# Fields with an object


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = Field(False, description="Whether the last chunk has the numbers of tokens.")
    include_obfuscation: bool = Field(False, description="Without effect: chunks are not padded.")


class JsonSchemaFormat(Body):
    """The schema of a `ResponseFormat`."""

    name: Text = Field(description="Without effect.", examples=["answer"])
    description: Text | None = Field(None, description="Without effect.")
    schema_: dict[str, Any] = Field(
        {**ANY_OBJECT}, alias="schema", description="The answer is JSON that is valid under it."
    )
    strict: bool | None = Field(None, description="Without effect: answers are valid in any case.")


class ResponseFormat(Body):
    """Constrains the form of the answer, as OpenAI's API does."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="The kind of answer.", examples=["text"]
    )
    json_schema: JsonSchemaFormat | None = Field(None, description="For the type of this name.")

    def value(self, problems: Problems) -> Constraint | None:
        """Returns the constraint for the engine; None if the answer may be any text."""
        if self.type == "text":
            return None
        if self.type == "json_schema" and self.json_schema is None:
            problems.add("response_format.json_schema", "is required")
        given = self.json_schema if self.type == "json_schema" else None
        return new_constraint(json_schema=ANY_OBJECT if given is None else given.schema_)


class StructuredOutputs(Body):
    """Constrains the form of the answer, as vLLM does, by one of its fields."""

    choice: list[Text] | None = Field(
        None,
        description=f"At most {MAX_CHOICES} texts, one of which is it.",
        max_length=MAX_CHOICES,
        examples=[["yes", "no"]],
    )
    regex: Text | None = Field(None, description="A regular expression that the whole answer matches.")
    json_: dict[str, Any] | None = Field(
        None, alias="json", description="A JSON schema; the answer is JSON that is valid under it."
    )
    json_object: bool = Field(False, description="Whether the answer is any JSON object.")

    def value(self) -> Constraint | None:
        """Returns the constraint for the engine; None if the answer may be any text."""
        if self.choice is None and self.regex is None and self.json_ is None and not self.json_object:
            return None
        json_schema = ANY_OBJECT if self.json_ is None and self.json_object else self.json_
        return new_constraint(self.choice, self.regex, json_schema)


class Tool(Body):
    """A tool of a chat."""

    type: Literal["function"] = Field(description="What it is.", examples=["function"])
    function: FunctionFields = Field(description="The function.", examples=[{"name": "find"}])
    cache_control: Any = Field(None, description="Without effect: the caches find equal prompts by themselves.")


class Style(NamedTuple):
    """Says what form the answer to a request has."""

    includes_usage: bool = False
    """True if the last chunk of a stream has the numbers of tokens."""
    functions: tuple[str, ...] = ()
    """The names of functions one of which the answer calls; empty for an answer in text."""
    is_json: bool = False
    """True if the content of the answer is the JSON of a skill's result."""


# Fields that are refused unless they ask for nothing


class Only:
    """Defines the type of a field that must have one of `values` or be null: the server lacks the features of other
    values."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(Annotated[None, PlainValidator(self._check)])

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [None, *self.values]}

    def _check(self, given: Any) -> None:
        # `1 == True` in Python.
        if not any(given == value and isinstance(given, bool) is isinstance(value, bool) for value in self.values):
            raise Unusable(NOT_SUPPORTED)


# The routes


class CommonFields(Sampling):
    """Has the fields that chats, completions and responses have in common."""

    model: Text = Field(
        description="The model's name, as `/v1/models` has it, or `model/adapter`; in chats and responses "
        "`:detect` or another skill may follow.",
        examples=["moondream3-preview"],
    )
    stream: bool = Field(False, description="Whether the answer comes as server-sent events.")
    user: Text | None = Field(None, description="Without effect: callers are distinguished by their tokens.")
    prompt_cache_key: Text | None = Field(
        None, description="Without effect: the caches find equal prompts by themselves."
    )
    prompt_cache_retention: Text | None = Field(
        None, description="Without effect: the server says how long it keeps what."
    )
    prompt_cache_options: dict[str, Any] | None = Field(
        None, description="Without effect: the caches find equal prompts by themselves."
    )
    moderation: dict[str, Any] | None = Field(None, description="Without effect: nothing is moderated.")
    safety_identifier: Text | None = Field(
        None, description="Without effect: callers are distinguished by their tokens."
    )
    service_tier: Text | None = Field(None, description="Without effect: there is one tier.")


class _OpenAiBody(CommonFields):
    stream_options: StreamOptions = Field(StreamOptions.model_validate({}), description="Options of a stream.")
    constraint: ConstraintBody | None = Field(
        None, description="What the answer must look like; one of its fields."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="What the answer must look like, in the words of vLLM; one of its fields."
    )
    seed: int | None = Field(
        None,
        description="Makes the answer repeatable: 64 bits with a sign. -1 draws anew each time, as no seed does.",
    )
    metadata: dict[str, Any] | None = Field(None, description="Without effect: nothing is stored.")
    store: bool | None = Field(None, description="Without effect: nothing is stored.")


class ChatBody(_OpenAiBody):
    """Answers a conversation about images."""

    messages: list[Message] = Field(
        description="The conversation. Messages of the system and of developers precede all others; the last one "
        "is of the user or of a tool.",
        min_length=1,
        max_length=MAX_MESSAGES,
        examples=[[{"role": "user", "content": "What is in this image?"}]],
    )
    max_completion_tokens: int | None = setting("max_tokens", "Most tokens to generate; goes before `max_tokens`.")
    reasoning: bool = Field(False, description="Whether the model reasons before it answers.")
    response_format: ResponseFormat | None = Field(None, description="What the answer must look like.")
    logprobs: bool = Field(False, description="Adds the logprob of each token of the answer, before penalties.")
    top_logprobs: int | None = setting(
        "logprobs", "The number of likeliest tokens whose logprobs are added for each token; needs `logprobs`."
    )
    tools: list[Tool] | None = Field(
        None,
        description=f"Functions, at most {MAX_TOOLS}. Without a forced call they have no effect.",
        max_length=MAX_TOOLS,
        examples=[[{"type": "function", "function": {"name": "find"}}]],
    )
    tool_choice: ToolChoiceField | None = Field(None, description=CHOICE_DESCRIPTION)
    parallel_tool_calls: bool | None = Field(None, description="Without effect: an answer has one call at most.")
    skill: Skill | None = Field(None, description=DESCRIPTION)
    prediction: dict[str, Any] | None = Field(
        None, description="Without effect: it may speed an answer up, and changes none."
    )
    reasoning_effort: Text | None = Field(
        None, description="Without effect: `reasoning` says whether the model reasons."
    )
    verbosity: Text | None = Field(None, description="Without effect: the models know no such setting.")
    functions: Annotated[None, Only([])] = None
    function_call: Annotated[None, Only("none", "auto")] = None
    modalities: Annotated[None, Only(["text"])] = None
    audio: Annotated[None, Only()] = None
    web_search_options: Annotated[None, Only()] = None


class CompletionBody(_OpenAiBody):
    """Answers a text."""

    prompt: TextOr[Annotated[list[Text], Field(min_length=1)]] = Field(
        description="The text to answer, or a list of one text.", examples=["What is a kestrel?"]
    )
    logprobs: int | None = setting(
        "logprobs", "Adds the logprob of each token and of this many of the likeliest tokens."
    )
    best_of: Annotated[None, Only(1)] = None
    echo: Annotated[None, Only(False)] = None
    suffix: Annotated[None, Only()] = None


# From bytes to the request of the engine


def parse_chat(max_image_bytes: int, served: Collection[str], data: bytes) -> ParsedRequest:
    """Reads a request of `/v1/chat/completions`. Raises `InvalidRequest` with every mistake, or `ImageError`.

    `max_image_bytes` is the largest encoded image, `served` are the names of the served model.
    """
    problems = Problems()
    body = read(ChatBody, parse_json(data, problems.add), problems)
    conversation = read_conversation(body.messages, problems)
    if body.top_logprobs is not None and not body.logprobs:
        problems.add("top_logprobs", "needs logprobs")
    functions = [
        Function(tool.function.name, tool.function.parameters, f"tools[{index}].function.parameters")
        for index, tool in enumerate(body.tools or ())
    ]
    call = forced_call(functions, body.tool_choice, problems)
    sampling = body.params(
        **({} if call is None else NOT_IN_CALLS),
        seed=_seed(body, problems),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    images = conversation.images(max_image_bytes, problems)
    model, skill = chosen_skill(body.model, body.skill, served, problems)
    is_shaped = body.response_format is not None and body.response_format.type == "json_schema"
    given = {name: getattr(body, name) for name in ("reasoning", "constraint", "structured_outputs")}
    refuse_with_skill(skill, {**given, "response_format": is_shaped, "tool_choice": call}, problems)
    text_name = f"messages[{len(body.messages) - 1}].content"
    return _parsed(
        body, conversation, images, sampling, problems, text_name, call, model, skill, reasoning=body.reasoning
    )


def parse_completion(data: bytes) -> ParsedRequest:
    """Reads a request of `/v1/completions`. Raises `InvalidRequest` with every mistake."""
    problems = Problems()
    body = read(CompletionBody, parse_json(data, problems.add), problems)
    sampling = body.params(seed=_seed(body, problems), logprobs=body.logprobs)
    prompt, name = (body.prompt, "prompt") if isinstance(body.prompt, str) else (body.prompt[0], "prompt[0]")
    if len(body.prompt) > 1 and name != "prompt":
        problems.add("prompt", "must be one text: several prompts in one request are not supported")
    return _parsed(body, Conversation((ChatMessage(Role.USER, prompt),)), (), sampling, problems, name)


def _seed(body: ChatBody | CompletionBody, problems: Problems) -> int | None:
    """Returns the seed for the engine, which has 64 bits without a sign. Different seeds stay different."""
    seed = body.seed
    if seed is None or seed == _NO_SEED:
        return None
    if not -_SIGN <= seed < _SIGN:
        problems.add("seed", f"must be from {-_SIGN} to {_SIGN - 1}")
        return None
    return seed if seed >= 0 else seed + 2 * _SIGN


def _parsed(
    body: ChatBody | CompletionBody,
    conversation: Conversation,
    images: Sequence[GivenImage],
    sampling: SamplingParams,
    problems: Problems,
    text_name: str,
    call: ForcedCall | None = None,
    model: str | None = None,
    skill: str = TEXT,
    *,
    reasoning: bool = False,
) -> ParsedRequest:
    """Returns the request for the engine. `text_name` is the field that has the question, `model` replaces the name
    of the model."""
    constraint, constraint_name = _constraint(body, call, problems)
    name = partial(
        _name,
        body=body,
        text_name=text_name,
        image_path=conversation.image_path,
        constraint_name=constraint_name,
    )
    options = RequestOptions(model=body.model if model is None else model)
    files = [image.data or b"" for image in images]
    query = problems.checked(
        name,
        lambda: engine_request(
            skill, conversation, files, sampling, options, problems, reasoning=reasoning, constraint=constraint
        ),
    )
    references = tuple(image.reference for image in images)
    style = Style(body.stream_options.include_usage, () if call is None else call.names, skill != TEXT)
    return ParsedRequest(query, references, body.stream, style, name)


def _constraint(
    body: ChatBody | CompletionBody, call: ForcedCall | None, problems: Problems
) -> tuple[Constraint | None, str]:
    """Returns the constraint of the answer, None if it may be any text, and the name of its field."""
    response_format = body.response_format if isinstance(body, ChatBody) else None
    given = {
        "response_format": None if response_format is None else response_format.value(problems),
        "constraint": None if body.constraint is None else body.constraint.value(),
        "structured_outputs": None if body.structured_outputs is None else body.structured_outputs.value(),
    }
    names = [name for name, value in given.items() if value is not None]
    for name in names[1:]:
        problems.add(name, f"cannot be combined with {names[0]}")
    if call is not None:
        for name in names:
            if name != "response_format":  # which is the form of a text
                problems.add(name, "cannot be combined with a tool_choice that forces a call")
        return call.constraint, call.path
    first = names[0] if names else "constraint"
    return given[first], first


def _name(
    field: str,
    *,
    body: ChatBody | CompletionBody,
    text_name: str,
    image_path: Callable[[str], str | None],
    constraint_name: str,
) -> str:
    """Returns the name in the body of a field of the engine's requests: of several names for it, the one that was
    sent."""
    group, _, rest = field.partition(".")
    if field == "sampling.max_tokens" and isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return "max_completion_tokens"
    if field == "sampling.logprobs" and isinstance(body, ChatBody) and body.top_logprobs is not None:
        return "top_logprobs"
    if field == "sampling.stop[0]" and isinstance(body.stop, str):
        return "stop"
    if group == "sampling":
        return rest
    if group == "constraint":
        kind, bracket, index = rest.partition("[")
        name = _CONSTRAINT_NAMES.get(constraint_name, {}).get(kind, "")
        return f"{constraint_name}{name}{bracket}{index}"
    if group == "options":
        return "model"
    path = image_path(field)
    if path is not None:
        return path
    # Messages of the engine are those of the body, one by one; a query has one.
    return field if group.startswith("messages") else text_name


# The name of each field of a constraint, behind that of the field that has the constraint.
_CONSTRAINT_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "response_format": {"json_schema": ".json_schema.schema"},
        "constraint": {name: f".{name}" for name in ConstraintBody.model_fields},
        "structured_outputs": {"choices": ".choice", "regex": ".regex", "json_schema": ".json"},
    }
)
