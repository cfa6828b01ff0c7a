"""The forty requests as a client of Triton makes them: one in a call, or as the only one of a stream."""

import re
from typing import Any

import grpc
import pytest

from tests.server.frontends.forty.cases import Ask
from tests.server.frontends.forty.columns import REQUEST_ID, Rig, Told
from tests.server.frontends.forty.grpc_column import failure
from tests.server.serving import EOF
from tests.server.triton_calls import FINAL, TritonStub, facts, infer

_INPUTS = {"query": "QUESTION", "caption": "LENGTH"}  # of the other skills: OBJECT


class TritonColumn:
    """`GRPCInferenceService`."""

    name = "triton"
    has_http_statuses = False

    def expresses(self, ask: Ask) -> bool:
        has_points_and_boxes = len({len(ref) for ref in ask.refs}) > 1
        has_image_elsewhere = isinstance(ask.image, str)
        return not (
            ask.skill == "embed"
            or has_points_and_boxes
            or has_image_elsewhere
            or ask.objects
            or "seed" in ask.sampling
        )

    def method(self, ask: Ask) -> str:
        return f"inference.GRPCInferenceService/{'ModelStreamInfer' if ask.is_streamed else 'ModelInfer'}"

    def field_name(self, ask: Ask, name: str) -> str | None:
        """The name of the input, and after it the place in the input as it is."""
        return re.sub(r"^\w+", lambda head: head[0].upper(), name.removeprefix("sampling."))

    async def call(self, rig: Rig, ask: Ask) -> Told:
        call = self._begin(rig, ask)
        try:
            found = await self._streamed(call) if ask.is_streamed else facts(await call)
        except grpc.aio.AioRpcError as error:
            return failure(error)
        metadata: Any = await (call.initial_metadata() if ask.is_streamed else call.trailing_metadata())
        assert found["request_id"] == REQUEST_ID + ("-0" if ask.is_streamed else "")
        return Told("OK", "OK", _answer(found), request_id=dict(metadata)["x-request-id"])

    async def leave(self, rig: Rig, ask: Ask) -> None:
        call = self._begin(rig, ask)
        await rig.engine.num_submitted.acquire()
        call.cancel()

    async def error_texts(self, rig: Rig, ask: Ask) -> tuple[str | None, str]:
        """What a failure says as the status of a stream, and as a message of one that stays open."""
        message = _message(ask)
        stub, metadata = TritonStub(rig.channel), [("authorization", f"Bearer {ask.token}")]
        strict = stub.ModelStreamInfer(iter((message,)), metadata=[*metadata, ("triton_grpc_error", "true")])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await strict.read()
        call = stub.ModelStreamInfer(iter((message,)), metadata=metadata)
        response = await call.read()
        assert not response.infer_response.outputs
        assert await call.read() is EOF
        return caught.value.details(), response.error_message

    async def _streamed(self, call: Any) -> dict[str, Any]:
        """What the last response says."""
        responses: list[Any] = []
        while (response := await call.read()) is not EOF:
            assert not response.error_message
            responses.append(response.infer_response)
        assert [item.parameters[FINAL].bool_param for item in responses] == [False] * (len(responses) - 1) + [True]
        return facts(responses[-1])

    def _begin(self, rig: Rig, ask: Ask) -> Any:
        """A failure is the status of a stream and not its message, so that it has a reason."""
        metadata = [("x-request-id", REQUEST_ID), ("triton_grpc_error", "true")]
        if ask.token is not None:
            metadata.append(("authorization", f"Bearer {ask.token}"))
        stub = TritonStub(rig.channel)
        if ask.is_streamed:
            return stub.ModelStreamInfer(iter((_message(ask),)), metadata=metadata)
        return stub.ModelInfer(_message(ask), metadata=metadata)


def _message(ask: Ask) -> Any:
    inputs: dict[str, Any] = {"SKILL": ask.skill}
    if ask.skill != "gaze":
        inputs[_INPUTS.get(ask.skill, "OBJECT")] = ask.text
    if ask.image is not None:
        inputs["IMAGE"] = ask.image
    if ask.skill == "gaze":
        inputs["EYE"] = list(ask.refs[0])
    elif ask.refs:
        inputs["SPATIAL_REFS"] = [list(ref) for ref in ask.refs]
    if ask.max_objects is not None:
        inputs["MAX_OBJECTS"] = ask.max_objects
    if ask.min_score is not None:
        inputs["MIN_SCORE"] = ask.min_score
    inputs |= {name.upper(): value for name, value in ask.sampling.items()}
    if ask.reasoning:
        inputs["REASONING"] = True
    if ask.is_streamed:
        inputs["STREAM"] = True
    parameters = None if ask.timeout_s is None else {"timeout": round(ask.timeout_s * 1e6)}
    message = infer(parameters=parameters, **inputs)
    message.model_name = ask.model
    return message


def _answer(found: dict[str, Any]) -> dict[str, Any]:
    if "answer" in found:
        thought = found.get("reasoning")
        reasoning = {} if thought is None else {"reasoning": (thought["text"], _groundings(thought))}
        return {"answer": found["answer"], **reasoning}
    if "caption" in found:
        return {"caption": found["caption"]}
    if "points" in found:
        return {"points": _points(found["points"])}
    if "objects" in found:
        return {"boxes": [_box(item) for item in found["objects"]]}
    (segment,) = found["segments"]
    return {"path": segment["svg_path"], "box": _box(segment["bbox"])}


def _groundings(thought: dict[str, Any]) -> list[Any]:
    return [(item["start_idx"], item["end_idx"], _points(item["points"])) for item in thought["grounding"]]


def _points(points: list[dict[str, float]]) -> list[tuple[float, float]]:
    return [(point["x"], point["y"]) for point in points]


def _box(box: dict[str, float]) -> tuple[float, ...]:
    return box["x_min"], box["y_min"], box["x_max"], box["y_max"]
