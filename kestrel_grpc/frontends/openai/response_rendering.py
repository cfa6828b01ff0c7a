"""Converts the engine's events to the objects and the events of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kestrel_grpc.calls.errors import CallFailure
from kestrel_grpc.frontends.http.output_json import to_json
from kestrel_grpc.frontends.openai.rendering import (
    failure_body,
    new_call_id,
    prompt_tokens_by_kind,
    query_output,
    read_call,
    skill_json,
)
from kestrel_grpc.frontends.openai.responses import ResponseStyle
from kestrel_grpc.frontends.openai.tools import CallReader
from kestrel_runtime.api.events import Event, Finished, FinishReason, Started, TextChannel, TextDelta, Usage


class ResponseRenderer:
    """Formats the answer to one request; `created_s` is in seconds since the epoch."""

    def __init__(self, request_id: str, model: str, created_s: int, style: ResponseStyle) -> None:
        self._request_id = request_id
        facts = {"id": f"resp_{request_id}", "object": "response", "created_at": created_s, "error": None}
        # Three events of a stream have these facts.
        self._facts = b"%b,%b" % (to_json({**facts, "model": model})[:-1], style.echo[1:-1])
        self._functions = style.functions
        self._is_json = style.is_json
        self._reader = CallReader(style.functions)
        self._num_events = 0
        self._done: list[dict[str, Any]] = []
        self._open: _Item | None = None

    def answer(self, finished: Finished) -> bytes:
        """Returns the whole answer."""
        status = _status(finished)
        if self._is_json:
            items = [_Message(self._request_id, skill_json(finished)).whole(status)]
            return self._response(status, items, finished.usage)
        output = query_output(finished)
        items = [] if output.reasoning is None else [_Reasoning(self._request_id, output.reasoning.text).whole()]
        if not self._functions:
            items.append(_Message(self._request_id, output.answer).whole(status))
        elif (call := read_call(finished, self._functions)) is not None:
            items.append(_Call(self._request_id, *call).whole(status))
        return self._response(status, items, finished.usage)

    def events(self, event: Event, sample: int) -> bytes:
        """Returns the server-sent events for an event."""
        if isinstance(event, Started):
            response = self._response("in_progress", [], None)
            return self._response_event("created", response) + self._response_event("in_progress", response)
        if self._is_json and not isinstance(event, Finished):
            return b""
        if isinstance(event, TextDelta):
            if event.channel is not TextChannel.ANSWER:
                return self._delta(_Reasoning, event.text)
            if self._functions:
                return self._call_delta(self._reader.push(event.text))
            return self._delta(_Message, event.text)
        assert isinstance(event, Finished), "answers are text"
        return self._finish(event)

    def end(self, finished: Finished) -> bytes:
        """Returns nothing: the last event has the whole answer."""
        return b""

    def failure(self, failure: CallFailure) -> bytes:
        """Returns the last event of a stream that fails."""
        body = failure_body(failure)
        error = body["error"]
        # Clients take the object or, as OpenAI documents the event, the same fields outside of it.
        return self._event("error", code=error["code"], message=error["message"], param=error["param"], **body)

    def _finish(self, finished: Finished) -> bytes:
        status = _status(finished)
        written = b""
        if self._is_json:
            written += self._delta(_Message, skill_json(finished))
        elif self._functions:
            written += self._call_delta(self._reader.end(is_complete=status == "completed"))
        elif not isinstance(self._open, _Message):  # an answer without a text
            written += self._delta(_Message, "")
        written += self._close(status)
        response = self._response(status, self._done, finished.usage)
        return written + self._response_event(status, response)

    def _delta(self, kind: type[_Message] | type[_Reasoning], text: str) -> bytes:
        written = b""
        if not isinstance(self._open, kind):
            written += self._close()
            written += self._begin(kind(self._request_id, ""))
        item = self._open
        assert isinstance(item, _Message | _Reasoning)
        if text:
            item.text += text
            written += self._event(item.delta, **self._place(), content_index=0, delta=text, **item.no_logprobs)
        return written

    def _call_delta(self, text: str) -> bytes:
        written = b""
        if self._reader.name is not None and not isinstance(self._open, _Call):
            written += self._close()
            written += self._begin(_Call(self._request_id, self._reader.name, ""))
        if text:
            assert isinstance(self._open, _Call)
            self._open.arguments += text
            written += self._event("response.function_call_arguments.delta", **self._place(), delta=text)
        return written

    def _begin(self, item: _Item) -> bytes:
        self._open = item
        written = self._event(
            "response.output_item.added", output_index=len(self._done), item=item.whole("in_progress", is_new=True)
        )
        if isinstance(item, _Call):
            return written
        return written + self._event(
            "response.content_part.added", **self._place(), content_index=0, part=item.part("")
        )

    def _close(self, status: str = "completed") -> bytes:
        """Ends the item that is open, if one is."""
        item = self._open
        if item is None:
            return b""
        if isinstance(item, _Call):
            written = self._event(
                "response.function_call_arguments.done",
                **self._place(),
                name=item.name,
                arguments=item.arguments,
            )
        else:
            place = {**self._place(), "content_index": 0}
            written = self._event(item.done, **place, text=item.text, **item.no_logprobs)
            written += self._event("response.content_part.done", **place, part=item.part(item.text))
        whole = item.whole(status)
        written += self._event("response.output_item.done", output_index=len(self._done), item=whole)
        self._done.append(whole)
        self._open = None
        return written

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": len(self._done)}

    def _event(self, kind: str, **facts: Any) -> bytes:
        return _sent(kind, to_json({**self._head(kind), **facts}))

    def _response_event(self, kind: str, response: bytes) -> bytes:
        kind = f"response.{kind}"
        return _sent(kind, b'%b,"response":%b}' % (to_json(self._head(kind))[:-1], response))

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"type": kind, "sequence_number": self._num_events}
        self._num_events += 1
        return head

    def _response(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> bytes:
        facts = {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": None if usage is None else _usage(usage),
        }
        return b"%b,%b" % (self._facts, to_json(facts)[1:])


def _sent(kind: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class _Message:
    delta = "response.output_text.delta"
    done = "response.output_text.done"
    no_logprobs: Mapping[str, Any] = MappingProxyType({"logprobs": ()})

    def __init__(self, request_id: str, text: str) -> None:
        self.id = f"msg_{request_id}"
        self.text = text

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": (), "logprobs": ()}

    def whole(self, status: str = "completed", *, is_new: bool = False) -> dict[str, Any]:
        content = () if is_new else (self.part(self.text),)
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _Reasoning:
    delta = "response.reasoning_text.delta"
    done = "response.reasoning_text.done"
    no_logprobs: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, request_id: str, text: str) -> None:
        self.id = f"rs_{request_id}"
        self.text = text

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def whole(self, status: str = "completed", *, is_new: bool = False) -> dict[str, Any]:
        content = () if is_new else (self.part(self.text),)
        return {"id": self.id, "type": "reasoning", "summary": (), "content": content, "status": status}


class _Call:
    def __init__(self, request_id: str, name: str, arguments: str) -> None:
        self.id = f"fc_{request_id}"
        self.name = name
        self.arguments = arguments
        self._call_id = new_call_id()

    def whole(self, status: str = "completed", *, is_new: bool = False) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self.name,
            "arguments": "" if is_new else self.arguments,
        }


_Item = _Message | _Reasoning | _Call


def _status(finished: Finished) -> str:
    return "incomplete" if finished.finish_reason is FinishReason.LENGTH else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_input_tokens,
        "input_tokens_details": prompt_tokens_by_kind(usage),
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_input_tokens + usage.num_output_tokens,
    }
