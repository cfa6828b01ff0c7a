"""Converts events of the engine to JSON in the output tensor of Triton's responses. Knows no call."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from kestrel_grpc.frontends.triton.model import OUTPUT, VERSION
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_runtime.api.events import (
    Box,
    CaptionOutput,
    DetectOutput,
    Finished,
    FinishReason,
    Location,
    Output,
    PointOutput,
    QueryOutput,
    Reasoning,
    TextChannel,
    TextDelta,
)

FINAL = "triton_final_response"
_FINISH_REASONS: Mapping[FinishReason, str] = MappingProxyType(
    {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.MAX_OBJECTS: "max_objects"}
)
_LENGTH = struct.Struct("<I")
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class ResponseRenderer:
    """Makes the responses to one request, whose id and model name each of them repeats."""

    __slots__ = ("_id", "_model_name")

    def __init__(self, message: wire.ModelInferRequest) -> None:
        self._model_name = message.model_name
        self._id = message.id

    def answer(self, finished: Finished, request_id: str) -> wire.ModelInferResponse:
        """A whole answer."""
        return self._with_output(_facts(finished, request_id))

    def piece(self, delta: TextDelta) -> wire.ModelStreamInferResponse:
        """A piece of the text of a streamed answer, or of the reasoning before it."""
        facts: dict[str, Any] = {"chunk": delta.text, "completed": False, "token_index": delta.token_index}
        if delta.channel is TextChannel.REASONING:
            facts |= {"chunk": "", "reasoning_chunk": delta.text}
        return _streamed(self._with_output(facts), is_final=False)

    def last(
        self, finished: Finished, request_id: str, *, streams: bool, is_final: bool
    ) -> wire.ModelStreamInferResponse:
        """The whole answer at the end of its pieces, or on its own."""
        facts = _facts(finished, request_id)
        if streams:
            facts = {"chunk": "", "completed": True, **facts}
        return _streamed(self._with_output(facts), is_final=is_final)

    def empty(self) -> wire.ModelStreamInferResponse:
        """The end of a request, without output."""
        return _streamed(self._bare(), is_final=True)

    def error(self, message: str) -> wire.ModelStreamInferResponse:
        """A request has failed."""
        return wire.ModelStreamInferResponse(error_message=message, infer_response=self._bare())

    def _bare(self) -> wire.ModelInferResponse:
        return wire.ModelInferResponse(model_name=self._model_name, model_version=VERSION, id=self._id)

    def _with_output(self, facts: Mapping[str, Any]) -> wire.ModelInferResponse:
        response = self._bare()
        response.outputs.add(name=OUTPUT, datatype="BYTES", shape=(1,))
        text = _to_json(facts).encode(errors="replace")
        response.raw_output_contents.append(_LENGTH.pack(len(text)) + text)
        return response


def _streamed(response: wire.ModelInferResponse, *, is_final: bool) -> wire.ModelStreamInferResponse:
    response.parameters[FINAL].bool_param = is_final
    return wire.ModelStreamInferResponse(infer_response=response)


def _facts(finished: Finished, request_id: str) -> dict[str, Any]:
    usage, timing = finished.usage, finished.timing
    return {
        "request_id": request_id,
        "finish_reason": _FINISH_REASONS[finished.finish_reason],
        **_result(finished.output),
        "metrics": {
            "input_tokens": usage.num_input_tokens,
            "output_tokens": usage.num_output_tokens,
            "prefill_time_ms": timing.prefill_s * 1000.0,
            "decode_time_ms": timing.decode_s * 1000.0,
            "ttft_ms": timing.time_to_first_token_s * 1000.0,
        },
    }


def _result(output: Output) -> dict[str, Any]:
    if isinstance(output, QueryOutput):
        reasoning = {} if output.reasoning is None else {"reasoning": _reasoning(output.reasoning)}
        return {"answer": output.answer, **reasoning}
    if isinstance(output, CaptionOutput):
        return {"caption": output.caption}
    if isinstance(output, PointOutput):
        return {"points": _points(output.points)}
    if isinstance(output, DetectOutput):
        return {"objects": [_box(box) for box in output.boxes]}
    return {"segments": [{"svg_path": mask.svg_path, "bbox": _box(mask.box)} for mask in output.segments]}


def _reasoning(reasoning: Reasoning) -> dict[str, Any]:
    return {
        "text": reasoning.text,
        "grounding": [
            {"start_idx": item.start_char, "end_idx": item.end_char, "points": _points(item.points)}
            for item in reasoning.groundings
        ],
    }


def _points(locations: Iterable[Location]) -> list[dict[str, float]]:
    return [{"x": location.x, "y": location.y} for location in locations]


def _box(box: Box) -> dict[str, float]:
    return {"x_min": box.x_min, "y_min": box.y_min, "x_max": box.x_max, "y_max": box.y_max}
