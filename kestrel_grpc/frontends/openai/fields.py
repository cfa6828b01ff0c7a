"""The fields of OpenAI's requests: those that are read, and those that are taken at their default value only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kestrel_grpc.frontends.http import sampling
from kestrel_grpc.frontends.http.constraints import RESPONSE_FORMAT
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
    Field("user", Kind.TEXT, "Without effect: callers are told apart by their tokens."),
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

_NONE: tuple[Any, ...] = (None,)
# These fields are refused unless empty, such as `tools: []`.
CHAT_DEFAULTS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": (None, True),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": _NONE,
        "prediction": _NONE,
        "store": (None, False),
        "metadata": (None, {}),
        "service_tier": (None, "auto", "default"),
        "reasoning_effort": _NONE,
        "verbosity": _NONE,
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


def chat_name(field: str) -> str:
    """The name in a chat request of a field of the engine's requests."""
    if field == "sampling.max_tokens":
        return "max_completion_tokens"
    if field == "sampling.logprobs":
        return "top_logprobs"
    return _name(field, "messages")


def completions_name(field: str) -> str:
    """The name in a completion request of a field of the engine's requests."""
    return _name(field, "prompt")


def _name(field: str, others: str) -> str:
    if field.startswith("sampling."):
        return field.removeprefix("sampling.")
    return "response_format" if field.startswith("constraint") else _NAMES.get(field, others)
