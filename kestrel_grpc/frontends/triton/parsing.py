"""Converts an inference request of Triton to a request of the engine.

Inputs that a skill does not use are ignored, as Kestrel's model for Triton does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kestrel_grpc.calls.errors import Unsupported
from kestrel_grpc.frontends.triton.model import MODEL, OUTPUT, require_model
from kestrel_grpc.frontends.triton.tensors import REGION, ReadRegion, Tensor, read_tensors, shown
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_runtime.api.errors import InvalidRequest, Violation
from kestrel_runtime.api.requests import (
    MAX_SPATIAL_REFS,
    BoxRef,
    Caption,
    Detect,
    Gaze,
    Point,
    PointRef,
    Priority,
    Query,
    Request,
    RequestOptions,
    SamplingParams,
    Segment,
    SpatialRef,
    too_many_spatial_refs,
)

_MAX_SHOWN = 8
_EMPTY_FINAL = "triton_enable_empty_final_response"
# `binary_data_output` belongs to the protocol over HTTP and has no effect here.
_PARAMETERS = frozenset(("priority", "timeout", _EMPTY_FINAL, "binary_data_output"))
# Three levels, of which the second is the default; Triton maps other numbers to the default.
_PRIORITIES: Mapping[int, Priority] = MappingProxyType(
    {1: Priority.INTERACTIVE, 2: Priority.NORMAL, 3: Priority.BATCH}
)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Holds a request of the engine, and the form in which its caller wants the answer."""

    request: Request
    streams: bool
    """True if the text is wanted in pieces."""
    timeout_s: float | None
    """The time for the whole answer, in seconds; None if the caller set none."""


def wants_empty_final(message: wire.ModelInferRequest) -> bool:
    """Returns True if the last response of a stream must be one without output."""
    return _EMPTY_FINAL in message.parameters and message.parameters[_EMPTY_FINAL].bool_param


async def infer_request(message: wire.ModelInferRequest, served: str, read_region: ReadRegion) -> InferRequest:
    """Converts a message. Raises `ModelNotFound`, `Unsupported`, and `InvalidRequest` with all problems of one
    kind."""
    require_model(message.model_name, message.model_version, served)
    _check_outputs(message)
    violations: list[Violation] = []
    priority, timeout_s = _parameters(message, violations)
    tensors = _Tensors(await read_tensors(message, read_region), violations)
    skill = tensors.text("SKILL")
    build = _SKILLS.get(skill)
    if build is None:
        known = ", ".join(_SKILLS)
        violations.append(Violation("SKILL", f"'{shown(skill)}' is none of {known}"))
        raise InvalidRequest(tuple(violations))
    sampling = SamplingParams(
        temperature=tensors.value("TEMPERATURE"),
        top_p=tensors.value("TOP_P"),
        max_tokens=tensors.value("MAX_TOKENS"),
    )
    try:
        request = build(tensors, sampling, RequestOptions(priority=priority))
    except InvalidRequest as error:
        raise InvalidRequest((*violations, *error.violations)) from None
    streams = bool(tensors.value("STREAM")) and skill in ("query", "caption")
    if violations:
        raise InvalidRequest(tuple(violations))
    return InferRequest(request, streams, timeout_s)


class _Tensors:
    """Reads the values of scalar inputs, by name. Adds problems to `violations`."""

    def __init__(self, tensors: Mapping[str, Tensor], violations: list[Violation]) -> None:
        self._tensors = tensors
        self._violations = violations

    def value(self, name: str) -> Any:
        """Returns the value of an input; None if there is no such input."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.elements[0]

    def text(self, name: str) -> str:
        """Returns the text of an input; "" if there is no such input."""
        try:
            return (self.value(name) or b"").decode()
        except UnicodeDecodeError:
            self._violations.append(Violation(name, "must be UTF-8"))
            return "?"

    def image(self) -> bytes:
        """Returns the bytes of the image; empty if there is none."""
        return self.value("IMAGE") or b""

    def eye(self) -> PointRef:
        """Returns the position of the eye, which `gaze` needs."""
        tensor = self._tensors.get("EYE")
        if tensor is None:
            self._violations.append(Violation("EYE", "is required"))
            return PointRef(0.0, 0.0)
        return PointRef(*tensor.elements)

    def spatial_refs(self) -> tuple[SpatialRef, ...]:
        """Returns the references to parts of the image: rows of two numbers are points, rows of four are boxes."""
        tensor = self._tensors.get("SPATIAL_REFS")
        if tensor is None:
            return ()
        num_rows, num_columns = tensor.shape
        if num_columns not in (2, 4):
            self._violations.append(Violation("SPATIAL_REFS", "must have 2 (points) or 4 (boxes) columns"))
            return ()
        if num_rows > MAX_SPATIAL_REFS:
            self._violations.append(too_many_spatial_refs())
            return ()
        kind = PointRef if num_columns == 2 else BoxRef
        rows = (
            tensor.elements[start : start + num_columns] for start in range(0, num_rows * num_columns, num_columns)
        )
        return tuple(kind(*row) for row in rows)


def _query(tensors: _Tensors, sampling: SamplingParams, options: RequestOptions) -> Query:
    return Query(
        question=tensors.text("QUESTION"),
        image=tensors.value("IMAGE"),
        reasoning=bool(tensors.value("REASONING")),
        spatial_refs=tensors.spatial_refs(),
        sampling=sampling,
        options=options,
    )


def _caption(tensors: _Tensors, sampling: SamplingParams, options: RequestOptions) -> Caption:
    length = tensors.text("LENGTH") or "normal"
    return Caption(image=tensors.image(), length=length, sampling=sampling, options=options)


def _gaze(tensors: _Tensors, sampling: SamplingParams, options: RequestOptions) -> Gaze:
    return Gaze(image=tensors.image(), eye=tensors.eye(), sampling=sampling, options=options)


def _about_objects(kind: type[Point] | type[Detect] | type[Segment]) -> _Build:
    def build(tensors: _Tensors, sampling: SamplingParams, options: RequestOptions) -> Request:
        # Of an outline there is only one.
        limits: dict[str, Any] = (
            {}
            if kind is Segment
            else {"max_objects": tensors.value("MAX_OBJECTS"), "min_score": tensors.value("MIN_SCORE")}
        )
        return kind(
            object=tensors.text("OBJECT"),
            image=tensors.image(),
            spatial_refs=tensors.spatial_refs(),
            sampling=sampling,
            options=options,
            **limits,
        )

    return build


_Build = Callable[[_Tensors, SamplingParams, RequestOptions], Request]
_SKILLS: Mapping[str, _Build] = MappingProxyType(
    {
        "query": _query,
        "caption": _caption,
        "point": _about_objects(Point),
        "detect": _about_objects(Detect),
        "segment": _about_objects(Segment),
        "gaze": _gaze,
    }
)


def _check_outputs(message: wire.ModelInferRequest) -> None:
    for output in message.outputs:
        if output.name != OUTPUT:
            name = shown(output.name)
            raise InvalidRequest(
                (Violation("outputs", f"unexpected inference output '{name}' for model '{MODEL}'"),)
            )
        if REGION in output.parameters:
            raise Unsupported("outputs are not written to shared memory")
        if "classification" in output.parameters:
            raise Unsupported("the classification extension is not supported")


def _parameters(message: wire.ModelInferRequest, violations: list[Violation]) -> tuple[Priority, float | None]:
    """Returns the priority, and the timeout in seconds. Unknown parameters are refused."""
    violations += [
        Violation(f"parameters.{shown(key)}", "is not a parameter of this server")
        for key in sorted(message.parameters)
        if key not in _PARAMETERS
    ][:_MAX_SHOWN]
    priority = next(_integers(message, "priority", violations), 0)
    timeout_us = next(_integers(message, "timeout", violations), 0)
    return _PRIORITIES.get(priority, Priority.NORMAL), timeout_us / 1e6 if timeout_us else None


def _integers(message: wire.ModelInferRequest, name: str, violations: list[Violation]) -> Iterator[int]:
    """Yields the value of a parameter, which must be a whole number of at least 0; nothing if it is not given."""
    if name not in message.parameters:
        return
    parameter = message.parameters[name]
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in ("int64_param", "uint64_param") or (value := getattr(parameter, kind)) < 0:
        violations.append(Violation(f"parameters.{name}", "must be a whole number of at least 0"))
        return
    yield value
