"""The forty requests over gRPC."""

from collections.abc import Mapping
from typing import Any

import grpc
from grpc_status import rpc_status

from kestrel_client.v1 import media_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from tests.server.frontends.forty.cases import Ask
from tests.server.frontends.forty.columns import REQUEST_ID, Rig, Told
from tests.server.serving import EOF, details_of

_UNARY = {
    "query": wire.CompleteQueryRequest,
    "caption": wire.CompleteCaptionRequest,
    "point": wire.PointRequest,
    "detect": wire.DetectRequest,
    "segment": wire.SegmentRequest,
    "gaze": wire.GazeRequest,
    "embed": wire.EmbedImageRequest,
}
_STREAMED = {"query": wire.QueryRequest, "caption": wire.CaptionRequest}


class GrpcColumn:
    """`VisionService`."""

    name = "grpc"
    has_http_statuses = False

    def expresses(self, ask: Ask) -> bool:
        return not ask.is_streamed or ask.skill in _STREAMED

    def method(self, ask: Ask) -> str:
        return f"kestrel.v1.VisionService/{self._rpc(ask)}"

    def field_name(self, ask: Ask, name: str) -> str | None:
        return name

    async def call(self, rig: Rig, ask: Ask) -> Told:
        call = self._begin(rig, ask)
        last: Any = None
        try:
            if ask.is_streamed:
                while (message := await call.read()) is not EOF:
                    last = message
                answer = _answer(last.completed)
            else:
                last = await call
                answer = _answer(getattr(last, "result", last))
        except grpc.aio.AioRpcError as error:
            return failure(error)
        metadata: Any = await (call.initial_metadata() if ask.is_streamed else call.trailing_metadata())
        return Told("OK", "OK", answer, request_id=dict(metadata)["x-request-id"])

    async def leave(self, rig: Rig, ask: Ask) -> None:
        call = self._begin(rig, ask)
        await rig.engine.num_submitted.acquire()
        call.cancel()

    def _begin(self, rig: Rig, ask: Ask) -> Any:
        metadata = [("x-request-id", REQUEST_ID)]
        if ask.token is not None:
            metadata.append(("authorization", f"Bearer {ask.token}"))
        if ask.timeout_s is not None:  # for the server alone: the caller's own clock could run out before
            metadata.append(("grpc-timeout", f"{round(ask.timeout_s * 1000)}m"))
        stub: Any = VisionServiceStub(rig.channel)
        return getattr(stub, self._rpc(ask))(_message(ask), metadata=metadata)

    def _rpc(self, ask: Ask) -> str:
        if ask.skill == "embed":
            return "EmbedImage"
        is_whole = ask.skill in _STREAMED and not ask.is_streamed
        return f"Complete{ask.skill.capitalize()}" if is_whole else ask.skill.capitalize()


def _message(ask: Ask) -> Any:
    kind = (_STREAMED if ask.is_streamed else _UNARY)[ask.skill]
    fields: dict[str, Any] = {"sampling": ask.sampling, "options": {"model": ask.model}}
    if ask.skill == "embed":
        fields = {"normalize": True, "options": {"model": ask.model}}
    if ask.skill == "query":
        fields |= {"question": ask.text, "reasoning": ask.reasoning}
    elif ask.skill == "caption":
        fields["length"] = f"CAPTION_LENGTH_{ask.text.upper()}"
    elif ask.skill == "gaze":
        fields["eye"] = _ref(ask.refs[0])["point"]
    elif ask.skill != "embed":
        fields["object"] = ask.text
    if ask.max_objects is not None:
        fields["max_objects"] = ask.max_objects
    if ask.min_score is not None:
        fields["min_score"] = ask.min_score
    if ask.objects:
        fields["objects"] = ask.objects
    if ask.refs and ask.skill != "gaze":
        fields["spatial_refs"] = [_ref(ref) for ref in ask.refs]
    if isinstance(ask.image, bytes):
        fields["image"] = media_pb2.Image(data=ask.image)
    elif ask.image is not None:
        is_handle = ask.image.startswith("sha256:")
        fields["image"] = media_pb2.Image(image_id=ask.image) if is_handle else media_pb2.Image(uri=ask.image)
    return kind(**fields)


def _ref(ref: tuple[float, ...]) -> dict[str, Mapping[str, float]]:
    if len(ref) == 2:
        return {"point": dict(zip("xy", ref, strict=True))}
    return {"box": dict(zip(("x_min", "y_min", "x_max", "y_max"), ref, strict=True))}


def _answer(result: Any) -> dict[str, Any]:
    name = type(result).__name__.removesuffix("Response").removesuffix("Result")
    if name == "Query":
        reasoning = result.reasoning
        thought = (
            reasoning.text,
            [(item.start_char, item.end_char, _points(item.points)) for item in reasoning.groundings],
        )
        return {"answer": result.answer, **({"reasoning": thought} if result.HasField("reasoning") else {})}
    if name == "Caption":
        return {"caption": result.caption}
    if name == "Point":
        return {"points": _points(result.points)}
    if name == "Gaze":
        return {"points": _points([result.target])}
    if name == "Detect" and result.groups:
        return {"groups": [(group.object, [_box(item.box) for item in group.objects]) for group in result.groups]}
    if name == "EmbedImage":
        return {"mean": list(result.mean)}
    if name == "Detect":
        return {"boxes": [_box(item.box) for item in result.objects]}
    (segment,) = result.segments
    return {"path": segment.svg_path, "box": _box(segment.box)}


def _points(points: Any) -> list[tuple[float, float]]:
    return [(point.x, point.y) for point in points]


def _box(box: Any) -> tuple[float, ...]:
    return box.x_min, box.y_min, box.x_max, box.y_max


def failure(error: grpc.aio.AioRpcError) -> Told:
    """What the status of a call tells."""
    call: Any = error
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and rpc_status.from_call(call) is None:
        # gRPC itself ends a call at its deadline, without details, where it is earlier than the engine.
        return Told(error.code().name, error.code().name, request_id=REQUEST_ID)
    details: dict[str, Any] = details_of(error)
    info = details["ErrorInfo"]
    violations = details["BadRequest"].field_violations if "BadRequest" in details else ()
    trailers: dict[str, Any] = dict(error.trailing_metadata())
    delay = details["RetryInfo"].retry_delay if "RetryInfo" in details else None
    return Told(
        error.code().name,
        info.reason,
        fields=tuple(violation.field for violation in violations),
        request_id=trailers["x-request-id"],
        retry_after_s=None if delay is None else delay.ToNanoseconds() / 1e9,
    )
