"""Converts results of the engine to JSON, for all frontends that answer in JSON.

Triton's frontend uses it too: the output tensor of its responses holds JSON.
"""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

from kestrel_grpc.frontends.masks import forms_of
from kestrel_runtime.api.events import (
    Box,
    CaptionOutput,
    EmbedOutput,
    Finished,
    FinishReason,
    Location,
    Output,
    PointOutput,
    QueryOutput,
    Reasoning,
    SegmentOutput,
    TokenLogprob,
    TopLogprob,
)

FINISH_REASONS: Mapping[FinishReason, str] = MappingProxyType(
    {
        FinishReason.STOP: "stop",
        FinishReason.LENGTH: "length",
        FinishReason.MAX_OBJECTS: "max_objects",
        FinishReason.STOP_SEQUENCE: "stop_sequence",
    }
)
Points = Callable[[Iterable[Location]], list[Any]]
"""The format of points without scores: `pairs` or `objects`."""

_ITEMS_AT_ONCE = 16
"""The most tokens that are encoded at a time, each with up to 20 alternatives. Other threads wait for them."""

# Iterators stand for lists.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=list).encode


def to_json(facts: Any) -> bytes:
    """Returns JSON without spaces, in UTF-8. Half of a surrogate pair becomes a question mark.

    Raises `ValueError` for numbers that are not finite, which JSON does not have.
    """
    return _encode(facts).encode(errors="replace")


def large_json(facts: Any) -> bytes:
    """Returns the JSON of a large answer, in a thread. Encodes piece by piece, so that other threads run
    meanwhile."""
    return b"".join(_pieces(facts))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        for index, (name, item) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if index else b"{", to_json(name))
            yield from _pieces(item)
        yield b"}" if value else b"{}"
    elif isinstance(value, Iterator):
        start = b"["
        while items := tuple(islice(value, _ITEMS_AT_ONCE)):
            yield start + to_json(items)[1:-1]
            start = b","
            time.sleep(0)  # gives the interpreter to a thread that waits for it
        yield b"[]" if start == b"[" else b"]"
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield b"," if index else b"["
            yield from _pieces(item)
        yield b"]" if value else b"[]"
    else:
        yield to_json(value)


def sent_event(facts: Mapping[str, Any], encode: Callable[[Any], bytes] = to_json) -> bytes:
    """Returns one server-sent event."""
    return b"data: %b\n\n" % encode(facts)


def encoder_for(finished: Finished) -> Callable[[Any], bytes]:
    """Returns `large_json` for an answer that has many logprobs, else `to_json`, which is faster."""
    return large_json if finished.is_large else to_json


def result(output: Output, points: Points, grounding_points: Points) -> dict[str, Any]:
    """Returns the result of a skill. `grounding_points` is the format of the points in a reasoning."""
    if isinstance(output, QueryOutput):
        found = {"answer": output.answer, **_logprobs(output.logprobs)}
        if output.reasoning is None:
            return found
        thought = output.reasoning
        points_of_text = grounding(thought, grounding_points)
        return {**found, "reasoning": {"text": thought.text, **points_of_text, **_logprobs(thought.logprobs)}}
    if isinstance(output, CaptionOutput):
        return {"caption": output.caption, **_logprobs(output.logprobs)}
    if isinstance(output, SegmentOutput):
        found = (
            {"path": mask.svg_path, "bbox": box(mask.box), "partial": mask.is_partial} for mask in output.segments
        )
        return next(found, {"path": "", "bbox": None, "partial": False})
    if isinstance(output, EmbedOutput):
        return {"mean": output.mean, "patch_count": output.num_patches}
    if isinstance(output, PointOutput):
        found = points(output.points)
        if points is pairs:  # a pair has no place for a score
            return {"points": found, **({"scores": list(output.scores)} if output.scores else {})}
        return {"points": _with_scores(found, output.scores)}
    return {"objects": _with_scores([box(found) for found in output.boxes], output.scores)}


def scored(fields: Any, score: float | None) -> Any:
    """Returns the fields of an object that was found with its score, if there is one."""
    return fields if score is None else {**fields, "score": score}


def _with_scores(found: list[dict[str, Any]], scores: Sequence[float]) -> list[dict[str, Any]]:
    return [scored(*item) for item in zip(found, scores, strict=True)] if scores else found


def mask(finished: Finished) -> dict[str, Any]:
    """Returns the form of an outline that the request asks for in addition to its path; nothing for other answers.

    Raises `InvalidRequest` if it is too large.
    """
    if not isinstance(finished.output, SegmentOutput) or not finished.output.segments:
        return {}
    forms = forms_of(finished.output.segments[0], finished)
    if forms.polygons is not None:
        return {"polygons": forms.polygons}
    if forms.run_lengths is not None:
        runs = forms.run_lengths
        return {"rle": {"size": [runs.height_px, runs.width_px], "counts": runs.counts}}
    return {} if forms.png is None else {"png": b64encode(forms.png).decode()}


def ending(finished: Finished) -> dict[str, Any]:
    """Returns the fields that say why generation ended."""
    stop = {} if finished.stop_sequence is None else {"stop_sequence": finished.stop_sequence}
    return {"finish_reason": FINISH_REASONS[finished.finish_reason], **stop}


def logprobs(tokens: Iterable[TokenLogprob]) -> Iterator[dict[str, Any]]:
    """Returns tokens with their logprobs."""
    return ({**_token(token), "top": [_token(top) for top in token.top]} for token in tokens)


def _logprobs(tokens: Iterable[TokenLogprob] | None) -> dict[str, Any]:
    return {} if tokens is None else {"logprobs": logprobs(tokens)}


def _token(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"text": token.text, "bytes": list(token.bytes), "logprob": token.logprob, "token_id": token.id}


def grounding(reasoning: Reasoning, points: Points) -> dict[str, Any]:
    """Returns the points that parts of a reasoning refer to."""
    return {
        "grounding": [
            {"start_idx": item.start_char, "end_idx": item.end_char, "points": points(item.points)}
            for item in reasoning.groundings
        ]
    }


def objects(locations: Iterable[Location]) -> list[dict[str, float]]:
    """Returns points as objects."""
    return [{"x": location.x, "y": location.y} for location in locations]


def pairs(locations: Iterable[Location]) -> list[tuple[float, float]]:
    """Returns points as lists of two numbers."""
    return [(location.x, location.y) for location in locations]


def box(box: Box) -> dict[str, float]:
    """Returns a box as an object."""
    return {"x_min": box.x_min, "y_min": box.y_min, "x_max": box.x_max, "y_max": box.y_max}
