"""Converts the engine's events to OpenAI's objects and chunks, and failures to OpenAI's errors."""

from __future__ import annotations

import codecs
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from kestrel_grpc.calls.errors import BadFields, CallFailure
from kestrel_grpc.frontends.http.output_json import (
    encoder_for,
    grounding,
    objects,
    pairs,
    result,
    sent_event,
    to_json,
)
from kestrel_grpc.frontends.openai.conversation import NOT_SUPPORTED
from kestrel_grpc.frontends.openai.requests import Style
from kestrel_grpc.frontends.openai.tools import CallReader
from kestrel_runtime.api.events import (
    Event,
    Finished,
    FinishReason,
    QueryOutput,
    Started,
    TextChannel,
    TextDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
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
# OpenAI's codes for these reasons; other codes are the reasons in lower case.
_CODES: Mapping[str, str] = MappingProxyType(
    {"TOKEN_INVALID": "invalid_api_key", "RATE_LIMITED": "rate_limit_exceeded"}
)


class ChatRenderer:
    """Formats the answers of `/v1/chat/completions` to one request; `created_s` is in seconds since the epoch."""

    def __init__(self, request_id: str, model: str, created_s: int, style: Style) -> None:
        self._facts = {"id": f"chatcmpl-{request_id}", "created": created_s, "model": model}
        self._includes_usage = includes_usage = style.includes_usage
        self._functions = style.functions
        self._is_json = style.is_json
        self._calls = defaultdict[int, _Call](lambda: _Call(CallReader(style.functions)))  # by sample
        # Each token has a chunk; the parts that all chunks share are encoded once.
        head = to_json({"id": f"chatcmpl-{request_id}", "object": "chat.completion.chunk"})[:-1]
        rest = to_json({"created": created_s, "model": model})[1:-1]
        self._head = b'data: %b,%b,"choices":[{"index":' % (head, rest)
        usage = ',"usage":null' if includes_usage else ""
        self._tail = f',"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'.encode()

    def answer(self, finished: Finished) -> bytes:
        """Returns the whole answer."""
        render = _json_choice if self._is_json else partial(_chat_choice, functions=self._functions)
        choices = [render(index, sample) for index, sample in enumerate((finished, *finished.alternatives))]
        facts = {"object": "chat.completion", "choices": choices, "usage": _usage(finished.usage)}
        return encoder_for(finished)({**self._facts, **facts})

    def events(self, event: Event, sample: int) -> bytes:
        """Returns the server-sent events for an event of a sample; empty if there are none."""
        head = b'%b%d,"delta":' % (self._head, sample)
        if self._is_json:
            return self._events_of_json(event, sample)
        if self._functions and not (isinstance(event, TextDelta) and event.channel is not TextChannel.ANSWER):
            return self._events_of_call(event, sample)
        if isinstance(event, TextDelta):
            is_answer = event.channel is TextChannel.ANSWER
            name = b'{"content":' if is_answer else b'{"reasoning":'
            tail = self._tail
            if event.logprobs and is_answer:
                tail = tail.replace(b"null", to_json(_chat_logprobs(event.logprobs)), 1)
            return b"".join((head, name, to_json(event.text), b"}", tail))
        if isinstance(event, Started):
            return b"".join((head, b'{"role":"assistant","content":""}', self._tail))
        assert isinstance(event, Finished), "answers to a chat are text"
        reason = _FINISH_REASONS[event.finish_reason]
        usage = ',"usage":null' if self._includes_usage else ""
        return head + f'{{}},"logprobs":null,"finish_reason":"{reason}"}}]{usage}}}\n\n'.encode()

    def _events_of_call(self, event: Event, sample: int) -> bytes:
        """Returns the server-sent events for an event of a sample that is a call, but for its reasoning."""
        if isinstance(event, Started):
            return self._chunk(sample, {"role": "assistant", "content": None})
        call = self._calls[sample]
        if isinstance(event, TextDelta):
            call.logprobs += event.logprobs
            arguments, is_over, reason = call.reader.push(event.text), False, None
        else:
            assert isinstance(event, Finished), "answers to a chat are text"
            reason = _call_reason(event)
            arguments, is_over = call.reader.end(is_complete=reason == "tool_calls"), True
        chunks = b""
        if call.reader.name is not None and not call.is_begun:
            call.is_begun = True
            chunks += self._chunk(sample, {"tool_calls": [{"index": 0, **_call(call.reader.name, "")}]})
        if arguments:
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}
            chunks += self._chunk(sample, delta, call.taken_logprobs())
        if is_over:
            chunks += self._chunk(sample, {}, call.taken_logprobs(), reason)
        return chunks

    def _events_of_json(self, event: Event, sample: int) -> bytes:
        """Returns the server-sent events for an event of a sample of a skill, whose JSON is sent as one piece."""
        if isinstance(event, Started):
            return self._chunk(sample, {"role": "assistant", "content": ""})
        if not isinstance(event, Finished):
            return b""
        reason = _FINISH_REASONS[event.finish_reason]
        return self._chunk(sample, {"content": skill_json(event)}) + self._chunk(sample, {}, reason=reason)

    def _chunk(
        self, sample: int, delta: dict[str, Any], logprobs: Sequence[TokenLogprob] = (), reason: str | None = None
    ) -> bytes:
        choice = {
            "index": sample,
            "delta": delta,
            "logprobs": _chat_logprobs(logprobs) if logprobs else None,
            "finish_reason": reason,
        }
        facts = {**self._facts, "object": "chat.completion.chunk", "choices": [choice]}
        return sent_event({**facts, "usage": None} if self._includes_usage else facts)

    def end(self, finished: Finished) -> bytes:
        """Returns the last server-sent events of all samples."""
        if not self._includes_usage:
            return DONE
        facts = {"object": "chat.completion.chunk", "choices": [], "usage": _usage(finished.usage)}
        return sent_event({**self._facts, **facts}) + DONE

    def failure(self, failure: CallFailure) -> bytes:
        """Returns the last event of a stream that fails."""
        return sent_event(failure_body(failure))


class CompletionRenderer:
    """Formats the answers of `/v1/completions` to one request; `created_s` is in seconds since the epoch."""

    def __init__(self, request_id: str, model: str, created_s: int, style: Style) -> None:
        self._facts = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": created_s,
            "model": model,
        }
        self._includes_usage = style.includes_usage
        self._num_chars = defaultdict[int, int](int)  # of the text sent so far, by sample

    def answer(self, finished: Finished) -> bytes:
        """Returns the whole answer."""
        choices = [_whole_text(index, sample) for index, sample in enumerate((finished, *finished.alternatives))]
        return encoder_for(finished)({**self._facts, "choices": choices, "usage": _usage(finished.usage)})

    def events(self, event: Event, sample: int) -> bytes:
        """Returns the server-sent events for an event of a sample; empty if there are none."""
        usage = {"usage": None} if self._includes_usage else {}
        if isinstance(event, TextDelta):
            logprobs = _text_logprobs(event.logprobs, self._num_chars[sample]) if event.logprobs else None
            self._num_chars[sample] += len(event.text)
            choices = [_text_choice(event.text, None, logprobs, sample)]
        elif isinstance(event, Finished):
            choices = [_text_choice("", _FINISH_REASONS[event.finish_reason], index=sample)]
        else:
            return b""
        return sent_event({**self._facts, "choices": choices, **usage})

    def end(self, finished: Finished) -> bytes:
        """Returns the last server-sent events of all samples."""
        if not self._includes_usage:
            return DONE
        return sent_event({**self._facts, "choices": [], "usage": _usage(finished.usage)}) + DONE

    def failure(self, failure: CallFailure) -> bytes:
        """Returns the last event of a stream that fails."""
        return sent_event(failure_body(failure))


def models_json(models: Sequence[str], adapters: Iterable[str], created_s: int) -> bytes:
    """Returns the list of the served model's names and of its adapters."""
    data = [_model(name, created_s) for name in models]
    data += [_model(name, created_s, parent=models[0]) for name in adapters]
    return to_json({"object": "list", "data": data})


def model_json(name: str, created_s: int, *, parent: str | None) -> bytes:
    """Returns the served model, or one of its adapters; `parent` is the model that the adapter changes."""
    return to_json(_model(name, created_s, parent=parent))


def failure_body(failure: CallFailure) -> dict[str, Any]:
    """Returns a failure in the form of OpenAI's errors."""
    violations = [item for detail in failure.details if isinstance(detail, BadFields) for item in detail.violations]
    code = _CODES.get(failure.reason, failure.reason.lower())
    if violations and violations[0].description == NOT_SUPPORTED:
        code = "unsupported_parameter"
    kind = "server_error" if failure.http_status >= 500 else "invalid_request_error"
    error = {
        "message": failure.message,
        "type": _TYPES.get(failure.http_status, kind),
        "param": (violations[0].field or None) if violations else None,
        "code": code,
    }
    return {"error": error}


def failure_json(failure: CallFailure) -> bytes:
    """Returns the body of the response to a call that has failed."""
    return to_json(failure_body(failure))


class _Call:
    """Holds what a stream knows about the call of a sample."""

    def __init__(self, reader: CallReader) -> None:
        self.reader = reader
        self.is_begun = False
        self.logprobs: tuple[TokenLogprob, ...] = ()

    def taken_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Returns the logprobs that no chunk has had."""
        taken, self.logprobs = self.logprobs, ()
        return taken


def new_call_id() -> str:
    """Returns an id for a call, which is new."""
    return f"call_{secrets.token_hex(12)}"


def read_call(finished: Finished, functions: Sequence[str]) -> tuple[str, str] | None:
    """Returns the name of the function that an answer calls and the arguments; None if the answer is too short."""
    reader = CallReader(functions)
    arguments = reader.push(query_output(finished).answer)
    arguments += reader.end(is_complete=_call_reason(finished) == "tool_calls")
    return None if reader.name is None else (reader.name, arguments)


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": new_call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_reason(finished: Finished) -> str:
    reason = _FINISH_REASONS[finished.finish_reason]
    return "tool_calls" if reason == "stop" else reason


def _chat_choice(index: int, finished: Finished, functions: Sequence[str]) -> dict[str, Any]:
    output = query_output(finished)
    message: dict[str, Any] = {"role": "assistant", "content": output.answer, "refusal": None}
    reason = _FINISH_REASONS[finished.finish_reason]
    if functions:
        call, reason = read_call(finished, functions), _call_reason(finished)
        message["content"] = None
        if call is not None:
            message["tool_calls"] = [_call(*call)]
    if output.reasoning is not None:
        message["reasoning"] = output.reasoning.text
        message["reasoning_details"] = grounding(output.reasoning, pairs)
    return {
        "index": index,
        "message": message,
        "logprobs": None if output.logprobs is None else _chat_logprobs(output.logprobs),
        "finish_reason": reason,
    }


def skill_json(finished: Finished) -> str:
    """Returns the result of a skill, as the REST API has it."""
    return encoder_for(finished)(result(finished.output, objects, pairs)).decode()


def _json_choice(index: int, finished: Finished) -> dict[str, Any]:
    message = {"role": "assistant", "content": skill_json(finished), "refusal": None}
    reason = _FINISH_REASONS[finished.finish_reason]
    return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}


def _chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = ({**_token(token), "top_logprobs": [_token(top) for top in token.top]} for token in tokens)
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


def _whole_text(index: int, finished: Finished) -> dict[str, Any]:
    output = query_output(finished)
    logprobs = None if output.logprobs is None else _text_logprobs(output.logprobs, 0)
    return _text_choice(output.answer, _FINISH_REASONS[finished.finish_reason], logprobs, index)


def _text_choice(
    text: str, finish_reason: str | None, logprobs: dict[str, Any] | None = None, index: int = 0
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _text_logprobs(tokens: Iterable[TokenLogprob], num_chars: int) -> dict[str, Any]:
    """Returns the logprobs of tokens. `num_chars` is the length of the text before these tokens."""
    offsets: list[int] = []
    decoder = _Utf8Decoder(errors="ignore")  # a character may have several tokens
    tokens = tuple(tokens)
    for token in tokens:
        offsets.append(num_chars)
        num_chars += len(decoder.decode(token.bytes))
    return {
        "tokens": (token.text for token in tokens),
        "token_logprobs": (token.logprob for token in tokens),
        "top_logprobs": ({top.text: top.logprob for top in token.top} for token in tokens),
        "text_offset": iter(offsets),
    }


def query_output(finished: Finished) -> QueryOutput:
    """Returns the output of an answer in text."""
    assert isinstance(finished.output, QueryOutput)
    return finished.output


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_input_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_input_tokens + usage.num_output_tokens,
        "prompt_tokens_details": prompt_tokens_by_kind(usage),
    }


def prompt_tokens_by_kind(usage: Usage) -> dict[str, int]:
    """Returns the tokens of a prompt that were cached, and of all of them those of images and those of text."""
    return {
        "cached_tokens": usage.num_cached_tokens,
        "image_tokens": usage.num_image_tokens,
        "text_tokens": usage.num_input_tokens - usage.num_image_tokens,
    }


def _model(name: str, created_s: int, *, parent: str | None = None) -> dict[str, Any]:
    """Returns the description of a model. `parent` is the model that the named adapter changes."""
    found = {"id": name, "object": "model", "created": created_s, "owned_by": "kestrel"}
    return found if parent is None else {**found, "parent": parent}
