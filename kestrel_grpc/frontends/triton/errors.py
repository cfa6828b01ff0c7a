"""Puts failures into the words of Triton: its texts, and the names of its inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from kestrel_grpc.wire.errors import BadFields, CallFailure, MissingResource
from kestrel_runtime.api.errors import Violation

# The inputs and parameters that the fields of a request come from.
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "question": "QUESTION",
        "object": "OBJECT",
        "image": "IMAGE",
        "length": "LENGTH",
        "max_objects": "MAX_OBJECTS",
        "spatial_refs": "SPATIAL_REFS",
        "sampling.temperature": "TEMPERATURE",
        "sampling.top_p": "TOP_P",
        "sampling.max_tokens": "MAX_TOKENS",
    }
)
_HEAD = re.compile(r"(?:sampling\.)?\w+")
_VERSION = re.compile(r"(.*)/versions/(.*)", re.DOTALL)


def to_triton(failure: CallFailure) -> CallFailure:
    """The same failure as Triton's clients expect it."""
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
    """Descriptions of tensors name their input themselves."""
    if not violation.field or violation.field.startswith(("inputs", "outputs", "raw_input_contents")):
        return violation.description
    return f"{violation.field}: {violation.description}"


def _unknown_model(name: str) -> str:
    versioned = _VERSION.fullmatch(name)
    if versioned is not None:
        return f"Request for unknown model: '{versioned[1]}' version {versioned[2]} is not found"
    return f"Request for unknown model: '{name}' is not found"
