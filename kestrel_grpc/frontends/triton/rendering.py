"""Converts events to JSON in the output tensor of Triton's responses, and failures to Triton's messages."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kestrel_grpc.calls.errors import BadFields, CallFailure, MissingResource
from kestrel_grpc.frontends.http.output_json import FINISH_REASONS, box, objects, result, to_json
from kestrel_grpc.frontends.triton.model import OUTPUT, VERSION
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_runtime.api.errors import Violation
from kestrel_runtime.api.events import Finished, Output, SegmentOutput, TextChannel, TextDelta

FINAL = "triton_final_response"
_LENGTH = struct.Struct("<I")
# The input of Triton for each field of a request.
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "question": "QUESTION",
        "object": "OBJECT",
        "eye": "EYE",
        "image": "IMAGE",
        "length": "LENGTH",
        "max_objects": "MAX_OBJECTS",
        "min_score": "MIN_SCORE",
        "spatial_refs": "SPATIAL_REFS",
        "sampling.temperature": "TEMPERATURE",
        "sampling.top_p": "TOP_P",
        "sampling.max_tokens": "MAX_TOKENS",
    }
)
_HEAD = re.compile(r"(?:sampling\.)?\w+")
_VERSION = re.compile(r"(.*)/versions/(.*)", re.DOTALL)


class ResponseRenderer:
    """Makes the responses to one request. Each repeats the id and the model name of the request."""

    __slots__ = ("_id", "_model_name")

    def __init__(self, message: wire.ModelInferRequest) -> None:
        self._model_name = message.model_name
        self._id = message.id

    def answer(self, finished: Finished, request_id: str) -> wire.ModelInferResponse:
        """Returns the response with a whole answer."""
        return self._with_output(_facts(finished, request_id))

    def piece(self, delta: TextDelta) -> wire.ModelStreamInferResponse:
        """Returns the response with a piece of the text of a streamed answer, or of the reasoning before it."""
        facts: dict[str, Any] = {"chunk": delta.text, "completed": False, "token_index": delta.token_index}
        if delta.channel is TextChannel.REASONING:
            facts |= {"chunk": "", "reasoning_chunk": delta.text}
        return _streamed(self._with_output(facts), is_final=False)

    def last(
        self, finished: Finished, request_id: str, *, streams: bool, is_final: bool
    ) -> wire.ModelStreamInferResponse:
        """Returns the response with the whole answer, at the end of its pieces or on its own."""
        facts = _facts(finished, request_id)
        if streams:
            facts = {"chunk": "", "completed": True, **facts}
        return _streamed(self._with_output(facts), is_final=is_final)

    def empty(self) -> wire.ModelStreamInferResponse:
        """Returns the response that ends a request, without output."""
        return _streamed(self._bare(), is_final=True)

    def error(self, message: str) -> wire.ModelStreamInferResponse:
        """Returns the response to a request that has failed."""
        return wire.ModelStreamInferResponse(error_message=message, infer_response=self._bare())

    def _bare(self) -> wire.ModelInferResponse:
        return wire.ModelInferResponse(model_name=self._model_name, model_version=VERSION, id=self._id)

    def _with_output(self, facts: Mapping[str, Any]) -> wire.ModelInferResponse:
        response = self._bare()
        response.outputs.add(name=OUTPUT, datatype="BYTES", shape=(1,))
        text = to_json(facts)
        response.raw_output_contents.append(_LENGTH.pack(len(text)) + text)
        return response


def _streamed(response: wire.ModelInferResponse, *, is_final: bool) -> wire.ModelStreamInferResponse:
    response.parameters[FINAL].bool_param = is_final
    return wire.ModelStreamInferResponse(infer_response=response)


def _facts(finished: Finished, request_id: str) -> dict[str, Any]:
    usage, timing = finished.usage, finished.timing
    return {
        "request_id": request_id,
        "finish_reason": FINISH_REASONS[finished.finish_reason],
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
    if isinstance(output, SegmentOutput):
        found = (
            {"svg_path": mask.svg_path, "bbox": box(mask.box), "partial": mask.is_partial}
            for mask in output.segments
        )
        return {"segments": list(found)}
    return result(output, objects, objects)


def to_triton(failure: CallFailure) -> CallFailure:
    """Returns the failure in the form that Triton's clients expect."""
    details = tuple(
        BadFields(tuple(_renamed(violation) for violation in detail.violations))
        if isinstance(detail, BadFields)
        else detail
        for detail in failure.details
    )
    for detail in details:
        if isinstance(detail, BadFields):
            return replace(failure, details=details, message="; ".join(map(_text, detail.violations)))
        if isinstance(detail, MissingResource) and detail.kind == "model":
            return replace(failure, message=_unknown_model(detail.name))
        if isinstance(detail, MissingResource):
            return replace(failure, message=f"Unable to find {detail.kind}: '{detail.name}'")
    return failure


def _renamed(violation: Violation) -> Violation:
    head = _HEAD.match(violation.field)
    if head is None or head[0] not in _NAMES:
        return violation
    return Violation(_NAMES[head[0]] + violation.field[head.end() :], violation.description)


def _text(violation: Violation) -> str:
    """Returns a violation as text. Descriptions of tensors already name their input."""
    if not violation.field or violation.field.startswith(("inputs", "outputs", "raw_input_contents")):
        return violation.description
    return f"{violation.field}: {violation.description}"


def _unknown_model(name: str) -> str:
    versioned = _VERSION.fullmatch(name)
    if versioned is not None:
        return f"Request for unknown model: '{versioned[1]}' version {versioned[2]} is not found"
    return f"Request for unknown model: '{name}' is not found"
