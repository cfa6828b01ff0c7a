"""Converts the engine's events to OpenAI's objects and chunks, and failures to OpenAI's errors. Knows no engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kestrel_grpc.frontends.http.output_json import grounding, pairs, sent_event, to_json
from kestrel_grpc.frontends.openai.fields import MANY_IMAGES, NOT_SUPPORTED
from kestrel_grpc.wire.errors import BadFields, CallFailure
from kestrel_runtime.api.events import (
    Event,
    Finished,
    FinishReason,
    QueryOutput,
    Started,
    TextChannel,
    TextDelta,
    Usage,
)

DONE = b"data: [DONE]\n\n"
_FINISH_REASONS: Mapping[FinishReason, str] = MappingProxyType(
    {
        FinishReason.STOP: "stop",
        FinishReason.LENGTH: "length",
        FinishReason.MAX_OBJECTS: "stop",
        FinishReason.STOP_SEQUENCE: "stop",
    }
)
_TYPES: Mapping[int, str] = MappingProxyType(
    {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
)
# The names that OpenAI has for these; others are our reasons in lower case.
_CODES: Mapping[str, str] = MappingProxyType(
    {"TOKEN_INVALID": "invalid_api_key", "RATE_LIMITED": "rate_limit_exceeded"}
)


class ChatRenderer:
    """The answers of `/v1/chat/completions` to one request; `created_s` is in seconds since the epoch."""

    def __init__(self, request_id: str, model: str, created_s: int, *, includes_usage: bool) -> None:
        self._facts = {"id": f"chatcmpl-{request_id}", "created": created_s, "model": model}
        self._includes_usage = includes_usage
        # A chunk is made for each token: what is the same in all is encoded once.
        head = to_json({"id": f"chatcmpl-{request_id}", "object": "chat.completion.chunk"})[:-1]
        rest = to_json({"created": created_s, "model": model})[1:-1]
        self._head = b'data: %b,%b,"choices":[{"index":0,"delta":' % (head, rest)
        usage = ',"usage":null' if includes_usage else ""
        self._tail = f',"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'.encode()

    def answer(self, finished: Finished) -> bytes:
        """The whole answer."""
        output = finished.output
        assert isinstance(output, QueryOutput)
        message: dict[str, Any] = {"role": "assistant", "content": output.answer, "refusal": None}
        if output.reasoning is not None:
            message["reasoning"] = output.reasoning.text
            message["reasoning_details"] = grounding(output.reasoning, pairs)
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": _FINISH_REASONS[finished.finish_reason],
        }
        facts = {"object": "chat.completion", "choices": [choice], "usage": _usage(finished.usage)}
        return to_json({**self._facts, **facts})

    def events(self, event: Event) -> bytes:
        """The server-sent events of an event."""
        if isinstance(event, TextDelta):
            name = b'{"content":' if event.channel is TextChannel.ANSWER else b'{"reasoning":'
            return b"".join((self._head, name, to_json(event.text), b"}", self._tail))
        if isinstance(event, Started):
            return b"".join((self._head, b'{"role":"assistant","content":""}', self._tail))
        reason = _FINISH_REASONS[event.finish_reason]
        usage = ',"usage":null' if self._includes_usage else ""
        last = self._head + f'{{}},"logprobs":null,"finish_reason":"{reason}"}}]{usage}}}\n\n'.encode()
        if not self._includes_usage:
            return last + DONE
        facts = {"object": "chat.completion.chunk", "choices": [], "usage": _usage(event.usage)}
        return b"".join((last, sent_event({**self._facts, **facts}), DONE))


class CompletionRenderer:
    """The answers of `/v1/completions` to one request; `created_s` is in seconds since the epoch."""

    def __init__(self, request_id: str, model: str, created_s: int, *, includes_usage: bool) -> None:
        self._facts = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": created_s,
            "model": model,
        }
        self._includes_usage = includes_usage

    def answer(self, finished: Finished) -> bytes:
        """The whole answer."""
        output = finished.output
        assert isinstance(output, QueryOutput)
        choices = [_text_choice(output.answer, _FINISH_REASONS[finished.finish_reason])]
        return to_json({**self._facts, "choices": choices, "usage": _usage(finished.usage)})

    def events(self, event: Event) -> bytes:
        """The server-sent events of an event; empty where there is none to tell."""
        usage = {"usage": None} if self._includes_usage else {}
        if isinstance(event, TextDelta):
            return sent_event({**self._facts, "choices": [_text_choice(event.text, None)], **usage})
        if isinstance(event, Started):
            return b""
        last = {
            **self._facts,
            "choices": [_text_choice("", _FINISH_REASONS[event.finish_reason])],
            **usage,
        }
        if not self._includes_usage:
            return sent_event(last) + DONE
        total = {**self._facts, "choices": [], "usage": _usage(event.usage)}
        return b"".join((sent_event(last), sent_event(total), DONE))


def models_json(model: str, created_s: int) -> bytes:
    """The list of models."""
    return to_json({"object": "list", "data": [_model(model, created_s)]})


def model_json(model: str, created_s: int) -> bytes:
    """One model."""
    return to_json(_model(model, created_s))


def failure_json(failure: CallFailure) -> bytes:
    """A failure as OpenAI's clients expect it."""
    violations = [item for detail in failure.details if isinstance(detail, BadFields) for item in detail.violations]
    code = _CODES.get(failure.reason, failure.reason.lower())
    if violations and violations[0].description in (NOT_SUPPORTED, MANY_IMAGES):
        code = "unsupported_parameter"
    kind = "server_error" if failure.http_status >= 500 else "invalid_request_error"
    error = {
        "message": failure.message,
        "type": _TYPES.get(failure.http_status, kind),
        "param": (violations[0].field or None) if violations else None,
        "code": code,
    }
    return to_json({"error": error})


def _text_choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_input_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_input_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def _model(model: str, created_s: int) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": created_s, "owned_by": "kestrel"}
