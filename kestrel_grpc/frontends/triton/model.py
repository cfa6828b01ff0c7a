"""Describes the one model to Triton's clients: its name, its inputs, its output.

The names and types are those of Kestrel's model for Triton, which has no `EYE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_runtime.api.errors import ModelNotFound

MODEL = "moondream"
VERSION = "1"
OUTPUT = "TEXT_OUTPUT"
_PLATFORM = "kestrel"
_MAX_ECHO_CHARS = 20
_DATA_TYPES: Mapping[str, wire.DataType] = MappingProxyType(
    {"BYTES": wire.TYPE_STRING, "BOOL": wire.TYPE_BOOL, "INT32": wire.TYPE_INT32, "FP32": wire.TYPE_FP32}
)


@dataclass(frozen=True, slots=True)
class Input:
    """Describes one input tensor. In `shape`, -1 stands for any length."""

    name: str
    datatype: str
    shape: tuple[int, ...] = (1,)
    is_required: bool = False


INPUTS: Mapping[str, Input] = MappingProxyType(
    {
        item.name: item
        for item in (
            Input("SKILL", "BYTES", is_required=True),
            Input("QUESTION", "BYTES"),
            Input("OBJECT", "BYTES"),
            Input("IMAGE", "BYTES"),
            Input("LENGTH", "BYTES"),
            Input("TEMPERATURE", "FP32"),
            Input("TOP_P", "FP32"),
            Input("MAX_TOKENS", "INT32"),
            Input("MAX_OBJECTS", "INT32"),
            Input("MIN_SCORE", "FP32"),
            Input("REASONING", "BOOL"),
            Input("STREAM", "BOOL"),
            Input("SPATIAL_REFS", "FP32", (-1, -1)),
            Input("EYE", "FP32", (2,)),
        )
    }
)


def is_model(name: str, version: str, served: str) -> bool:
    """Returns True if `name` is `MODEL` or `served`, the engine's name of the model, and it has this version."""
    return name in (MODEL, served) and version in ("", VERSION)


def require_model(name: str, version: str, served: str) -> None:
    """Raises `ModelNotFound` unless `is_model` returns True."""
    if is_model(name, version, served):
        return
    known = name in (MODEL, served)
    raise ModelNotFound(f"{name}/versions/{version[:_MAX_ECHO_CHARS]}" if known else name)


def metadata(name: str) -> wire.ModelMetadataResponse:
    """Returns the description of the model under the name that the caller uses."""
    tensor = wire.ModelMetadataResponse.TensorMetadata
    return wire.ModelMetadataResponse(
        name=name,
        versions=[VERSION],
        platform=_PLATFORM,
        inputs=[tensor(name=item.name, datatype=item.datatype, shape=item.shape) for item in INPUTS.values()],
        outputs=[tensor(name=OUTPUT, datatype="BYTES", shape=(1,))],
    )


def config(name: str) -> wire.ModelConfig:
    """Returns the configuration of the model under the name that the caller uses."""
    return wire.ModelConfig(
        name=name,
        platform=_PLATFORM,
        backend=_PLATFORM,
        max_batch_size=0,
        input=[
            wire.ModelInput(
                name=item.name,
                data_type=_DATA_TYPES[item.datatype],
                dims=item.shape,
                optional=not item.is_required,
            )
            for item in INPUTS.values()
        ],
        output=[wire.ModelOutput(name=OUTPUT, data_type=wire.TYPE_STRING, dims=(1,))],
        model_transaction_policy=wire.ModelTransactionPolicy(decoupled=True),
    )
