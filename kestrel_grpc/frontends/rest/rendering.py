"""Converts the engine's events and results to JSON and server-sent events.

Every answer has `request_id`, `model`, `finish_reason` and metrics in addition to its result.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kestrel_grpc.calls.errors import BadFields, CallFailure
from kestrel_grpc.calls.submission import ObjectAnswer
from kestrel_grpc.frontends.http.output_json import (
    box,
    encoder_for,
    ending,
    logprobs,
    mask,
    objects,
    pairs,
    result,
    scored,
    sent_event,
    to_json,
)
from kestrel_grpc.frontends.rest.requests import Format
from kestrel_runtime.api.events import (
    Box,
    CaptionOutput,
    Event,
    Finished,
    FoundObject,
    OutlineBox,
    PatchEmbeddings,
    QueryOutput,
    TextChannel,
    TextDelta,
)


class Renderer:
    """Formats the answers to one request."""

    def __init__(self, request_id: str, model: str, format: Format) -> None:
        self._request_id = request_id
        self._model = model
        self._is_kestrel = format == "kestrel"
        self._points = pairs if self._is_kestrel else objects

    def answer(self, finished: Finished) -> bytes:
        """Returns the whole answer."""
        return encoder_for(finished)(self._facts(finished))

    def groups(self, answers: Sequence[ObjectAnswer], finished: Finished, *, is_streamed: bool) -> bytes:
        """Returns the whole answer about several objects, or the last event with it; `finished` has the sums of
        all."""
        metrics = self._metrics(finished)
        facts = {
            "request_id": self._request_id,
            "model": self._model,
            "groups": [self._group(answer) for answer in answers],
            **ending(finished),
            **(metrics if self._is_kestrel else {"metrics": metrics}),
        }
        return sent_event({"type": "final", **facts, "completed": True}) if is_streamed else to_json(facts)

    def _group(self, answer: ObjectAnswer) -> dict[str, Any]:
        if answer.finished is not None:
            return {"object": answer.object, **self._result(answer.finished), **ending(answer.finished)}
        assert answer.failure is not None, "an object has an answer or a failure"
        return {"object": answer.object, **failure_body(answer.failure, self._request_id)}

    def end(self, finished: Finished) -> bytes:
        """Returns nothing: the last event has the whole answer."""
        return b""

    def failure(self, failure: CallFailure) -> bytes:
        """Returns the last event of a stream that fails."""
        return sent_event({**failure_body(failure, self._request_id), "completed": True})

    def events(self, event: Event, sample: int) -> bytes:
        """Returns the server-sent events for an event; empty if there are none.

        `sample` is the index of the object, where several are looked for.
        """
        if isinstance(event, TextDelta):
            if event.channel is TextChannel.PATH:
                return sent_event({"type": "path_delta", "chunk": event.text, "completed": False})
            logged = {"logprobs": logprobs(event.logprobs)} if event.logprobs else {}
            return sent_event({_CHUNKS[event.channel]: event.text, **logged, "completed": False})
        if isinstance(event, OutlineBox):
            return sent_event({"type": "bbox", "bbox": box(event.box), "completed": False})
        if isinstance(event, FoundObject):
            return sent_event({**self._found(event), "index": sample, "completed": False})
        if isinstance(event, PatchEmbeddings):
            piece = {"first_patch": event.first_patch, "patch_count": event.num_patches}
            data = b64encode(event.data).decode()
            return sent_event({"type": "patches", **piece, "data": data, "completed": False})
        if not isinstance(event, Finished):
            return b""
        is_text = isinstance(event.output, QueryOutput | CaptionOutput)
        kind = {} if is_text else {"type": "final"}
        return sent_event({**kind, **self._facts(event), "completed": True}, encoder_for(event))

    def _found(self, found: FoundObject) -> dict[str, Any]:
        if isinstance(found.place, Box):
            return {"type": "bbox", "bbox": scored(box(found.place), found.score)}
        (place,) = self._points((found.place,))
        if self._is_kestrel:
            return {"type": "point", **scored({"point": place}, found.score)}
        return {"type": "point", "point": scored(place, found.score)}

    def _facts(self, finished: Finished) -> dict[str, Any]:
        metrics, others = self._metrics(finished), finished.alternatives
        return {
            "request_id": self._request_id,
            "model": self._model,
            **self._result(finished),
            **ending(finished),
            **({"alternatives": [self._alternative(other) for other in others]} if others else {}),
            **(metrics if self._is_kestrel else {"metrics": metrics}),
        }

    def _alternative(self, finished: Finished) -> dict[str, Any]:
        return {**self._result(finished), **ending(finished)}

    def _result(self, finished: Finished) -> dict[str, Any]:
        return {**result(finished.output, self._points, pairs), **mask(finished)}

    def _metrics(self, finished: Finished) -> dict[str, Any]:
        usage, timing = finished.usage, finished.timing
        counts = {
            "input_tokens": usage.num_input_tokens,
            "cached_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_output_tokens,
        }
        if self._is_kestrel:
            rate = finished.num_decoded / timing.decode_s if timing.decode_s > 0.0 else 0.0
            return {
                **counts,
                "ttft_s": timing.time_to_first_token_s,
                "prefill_time_s": timing.prefill_s,
                "decode_time_s": timing.decode_s,
                "decode_tokens_per_s": rate,
            }
        return {
            **counts,
            "prefill_time_ms": timing.prefill_s * 1000.0,
            "decode_time_ms": timing.decode_s * 1000.0,
            "ttft_ms": timing.time_to_first_token_s * 1000.0,
        }


def failure_body(failure: CallFailure, request_id: str) -> dict[str, Any]:
    """Returns a failure in the form of all errors of the REST API."""
    error: dict[str, Any] = {
        "code": failure.reason,
        "message": failure.message,
        "status": failure.http_status,
        "request_id": request_id,
    }
    violations = [
        {"field": item.field, "description": item.description}
        for detail in failure.details
        if isinstance(detail, BadFields)
        for item in detail.violations
    ]
    if violations:
        error["violations"] = violations
    if failure.facts:
        error["facts"] = dict(failure.facts)
    if failure.retry_after_s is not None:
        error["retry_after_seconds"] = failure.retry_after_s
    return {"error": error}


def failure_json(failure: CallFailure, request_id: str) -> bytes:
    """Returns the body of the response to a call that has failed."""
    return to_json(failure_body(failure, request_id))


_CHUNKS: Mapping[TextChannel, str] = MappingProxyType(
    {TextChannel.ANSWER: "chunk", TextChannel.REASONING: "reasoning_chunk"}
)
