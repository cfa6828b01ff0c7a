"""The fields of OpenAI's requests: those that are read, those without effect, and those that must ask for nothing.

A field is accepted without effect where it cannot change an answer of these models.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kestrel_grpc.frontends.http import sampling
from kestrel_grpc.frontends.http.constraints import CONSTRAINT, RESPONSE_FORMAT, STRUCTURED_OUTPUTS
from kestrel_grpc.frontends.http.fields import Field, Kind
from kestrel_runtime.api.sampling_params import MAX_LOGPROBS

_STREAM_OPTIONS = Field(
    "stream_options",
    Kind.OBJECT,
    "Options of a stream.",
    fields=(
        Field("include_usage", Kind.BOOLEAN, "Whether the last chunk has the numbers of tokens."),
        Field("include_obfuscation", Kind.BOOLEAN, "Without effect: chunks are not padded."),
    ),
)
_SHARED = (
    Field("model", Kind.TEXT, "The model's name, as `/v1/models` has it, or `model/adapter`.", is_required=True),
    Field("temperature", Kind.NUMBER, "0 is greedy; the default is the skill's."),
    Field("top_p", Kind.NUMBER, "Share of probability that tokens are sampled from."),
    Field("max_tokens", Kind.INTEGER, "Most tokens to generate."),
    Field("seed", Kind.INTEGER, "Makes the answer repeatable."),
    *sampling.FIELDS,
    Field("stream", Kind.BOOLEAN, "Whether the answer comes as server-sent events."),
    _STREAM_OPTIONS,
    CONSTRAINT,
    STRUCTURED_OUTPUTS,
    Field("user", Kind.TEXT, "Without effect: callers are told apart by their tokens."),
)
_WITHOUT_EFFECT = (
    Field("metadata", Kind.OBJECT, "Without effect: nothing is stored."),
    Field("store", Kind.BOOLEAN, "Without effect: nothing is stored."),
    Field("parallel_tool_calls", Kind.BOOLEAN, "Without effect: there are no tools."),
    Field("prediction", Kind.OBJECT, "Without effect: it may speed an answer up, and changes none."),
    Field("prompt_cache_key", Kind.TEXT, "Without effect: the caches find equal prompts by themselves."),
    Field("prompt_cache_retention", Kind.TEXT, "Without effect: the server says how long it keeps what."),
    Field("reasoning_effort", Kind.TEXT, "Without effect: `reasoning` says whether the model reasons."),
    Field("safety_identifier", Kind.TEXT, "Without effect: callers are told apart by their tokens."),
    Field("service_tier", Kind.TEXT, "Without effect: there is one tier."),
    Field("verbosity", Kind.TEXT, "Without effect: the models know no such setting."),
)

CHAT = (
    Field(
        "messages",
        Kind.LIST,
        "Messages of the roles `system`, `developer`, `user` and `assistant`; the last one is of the user.",
        is_required=True,
        item={"type": "object", "required": ["role", "content"]},
    ),
    Field("max_completion_tokens", Kind.INTEGER, "Most tokens to generate; goes before `max_tokens`."),
    Field("reasoning", Kind.BOOLEAN, "Whether the model reasons before it answers."),
    RESPONSE_FORMAT,
    Field("logprobs", Kind.BOOLEAN, "Tells how likely each token of the answer was, before penalties."),
    Field(
        "top_logprobs",
        Kind.INTEGER,
        f"How many of the most likely tokens `logprobs` tells for each, 0 to {MAX_LOGPROBS}.",
    ),
    *_SHARED,
    *_WITHOUT_EFFECT,
)
COMPLETIONS = (
    Field("prompt", Kind.TEXT, "The text to answer.", is_required=True),
    Field(
        "logprobs",
        Kind.INTEGER,
        f"Tells how likely each token was, and as many of the most likely ones, 0 to {MAX_LOGPROBS}.",
    ),
    *_SHARED,
)

CONSTRAINTS = (RESPONSE_FORMAT.name, CONSTRAINT.name, STRUCTURED_OUTPUTS.name)
_NONE: tuple[Any, ...] = (None,)
# These fields are refused unless empty, such as `tools: []`.
CHAT_DEFAULTS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": _NONE,
        "web_search_options": _NONE,
    }
)
COMPLETIONS_DEFAULTS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "best_of": (None, 1),
        "echo": (None, False),
        "suffix": _NONE,
    }
)
NOT_SUPPORTED = "is not supported"
MANY_IMAGES = "several images in one conversation are not supported"

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "options.model": "model",
    }
)


def chat_name(field: str, constraint: str = RESPONSE_FORMAT.name) -> str:
    """The name in a chat request of a field of the engine's requests; `constraint` is the field that has one."""
    if field == "sampling.max_tokens":
        return "max_completion_tokens"
    if field == "sampling.logprobs":
        return "top_logprobs"
    return _name(field, "messages", constraint)


def completions_name(field: str, constraint: str = CONSTRAINT.name) -> str:
    """The name in a completion request of a field of the engine's requests, as `chat_name`."""
    return _name(field, "prompt", constraint)


def _name(field: str, others: str, constraint: str) -> str:
    if field.startswith("sampling."):
        return field.removeprefix("sampling.")
    return constraint if field.startswith("constraint") else _NAMES.get(field, others)
