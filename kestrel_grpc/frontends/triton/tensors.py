"""Reads input tensors: checks them against the model's inputs and converts their elements to Python values.

It reports every problem of a message at once, with `inputs[2]` or `raw_input_contents[0]` as its field.
`parsing.py` interprets the inputs.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kestrel_grpc.frontends.triton.model import INPUTS, MODEL, Input
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_runtime.api.errors import InvalidRequest, Violation

REGION, REGION_OFFSET, REGION_BYTES = (
    "shared_memory_region",
    "shared_memory_offset",
    "shared_memory_byte_size",
)
"""The parameters of a tensor whose elements are in shared memory."""
_MAX_INPUTS = 2 * len(INPUTS)
_MAX_ELEMENTS = 4096
_MAX_PROBLEMS = 8
_MAX_ECHO_CHARS = 40
_LENGTH = struct.Struct("<I")
_FORMATS = {"BOOL": "?", "INT32": "i", "FP32": "f"}
_CONTENTS = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "FP32": "fp32_contents",
}

ReadRegion = Callable[[str, int, int], Awaitable[bytes]]
"""Reads bytes of the caller's region of this name, from an offset, of a length. Raises `InvalidRequest`."""


class Tensor:
    """Holds the shape and the elements of one input: `bytes`, `bool`, `int` or `float`."""

    __slots__ = ("elements", "shape")

    def __init__(self, shape: Sequence[int], elements: Sequence[Any]) -> None:
        self.shape = tuple(shape)
        self.elements = elements


def shown(text: str) -> str:
    """Returns a value from a caller, shortened and in ASCII, so that it fits into a status."""
    return ascii(text[:_MAX_ECHO_CHARS])[1:-1][:_MAX_ECHO_CHARS]


class _Problem(Exception):
    """Raised for a problem of one tensor."""


async def read_tensors(message: wire.ModelInferRequest, read_region: ReadRegion) -> Mapping[str, Tensor]:
    """Returns the input tensors by name. Raises `InvalidRequest`."""
    if len(message.inputs) > _MAX_INPUTS:
        raise _refusal("inputs", f"expected at most {len(INPUTS)} inputs but got {len(message.inputs)}")
    raw = iter(message.raw_input_contents)
    num_raw = sum(REGION not in tensor.parameters for tensor in message.inputs) if message.raw_input_contents else 0
    if len(message.raw_input_contents) != num_raw:
        raise _refusal(
            "raw_input_contents",
            f"expected {num_raw} elements, one for each input that is not in shared memory, but got "
            f"{len(message.raw_input_contents)}",
        )
    tensors: dict[str, Tensor] = {}
    violations: list[Violation] = []
    for index, tensor in enumerate(message.inputs):
        is_raw = bool(num_raw) and REGION not in tensor.parameters
        data = next(raw) if is_raw else None
        try:
            if tensor.name in tensors:
                raise _Problem(f"input '{shown(tensor.name)}' appears more than once")
            expected = _expected(tensor)
            if REGION in tensor.parameters:
                data = await _shared(tensor, read_region)
            elif is_raw and tensor.HasField("contents"):
                raise _Problem("contents must not be given together with raw_input_contents")
            tensors[tensor.name] = Tensor(tensor.shape, _elements(tensor, expected, data))
        except _Problem as problem:
            violations.append(Violation(f"inputs[{index}]", str(problem)))
    missing = [name for name, item in INPUTS.items() if item.is_required and name not in tensors]
    if missing and not violations:
        violations.append(Violation("inputs", f"missing required input(s) {missing}"))
    if violations:
        raise InvalidRequest(tuple(violations[:_MAX_PROBLEMS]))
    return tensors


def _expected(tensor: wire.ModelInferRequest.InferInputTensor) -> Input:
    name = shown(tensor.name)
    expected = INPUTS.get(tensor.name)
    if expected is None:
        raise _Problem(f"unexpected inference input '{name}' for model '{MODEL}'")
    if tensor.datatype != expected.datatype:
        raise _Problem(
            f"inference input '{name}' data-type is '{shown(tensor.datatype)}', but model '{MODEL}' "
            f"expects '{expected.datatype}'"
        )
    fits = len(tensor.shape) == len(expected.shape) and all(
        wanted in (-1, got) and got >= 0 for wanted, got in zip(expected.shape, tensor.shape, strict=True)
    )
    if not fits:
        raise _Problem(
            f"unexpected shape for input '{name}' for model '{MODEL}'. Expected {list(expected.shape)}, got "
            f"{list(tensor.shape)[:8]}"
        )
    unknown = [key for key in tensor.parameters if key not in (REGION, REGION_OFFSET, REGION_BYTES)]
    if unknown:
        raise _Problem(f"unexpected parameter '{shown(unknown[0])}' of input '{name}'")
    return expected


async def _shared(tensor: wire.ModelInferRequest.InferInputTensor, read_region: ReadRegion) -> bytes:
    parameters = tensor.parameters
    region = parameters[REGION]
    offset = parameters[REGION_OFFSET] if REGION_OFFSET in parameters else wire.InferParameter(int64_param=0)
    size = parameters[REGION_BYTES] if REGION_BYTES in parameters else wire.InferParameter()
    if (
        not region.HasField("string_param")
        or not offset.HasField("int64_param")
        or not size.HasField("int64_param")
    ):
        raise _Problem(f"shared memory needs {REGION} as a string and {REGION_OFFSET} and {REGION_BYTES} as int64")
    if tensor.HasField("contents"):
        raise _Problem("contents must not be given for an input in shared memory")
    try:
        return await read_region(region.string_param, offset.int64_param, size.int64_param)
    except InvalidRequest as error:
        raise _Problem("; ".join(violation.description for violation in error.violations)) from None


def _elements(
    tensor: wire.ModelInferRequest.InferInputTensor, expected: Input, data: bytes | None
) -> Sequence[Any]:
    num_elements = 1
    for length in tensor.shape:
        num_elements *= length
    if num_elements > _MAX_ELEMENTS:
        raise _Problem(f"input '{shown(tensor.name)}' has more than {_MAX_ELEMENTS} elements")
    if data is None:
        elements = getattr(tensor.contents, _CONTENTS[expected.datatype])
        if len(elements) != num_elements:
            raise _Problem(f"input '{shown(tensor.name)}' needs {num_elements} elements, got {len(elements)}")
        return tuple(elements)
    if expected.datatype == "BYTES":
        return (_only_element(tensor.name, data),)
    layout = f"<{num_elements}{_FORMATS[expected.datatype]}"
    num_bytes = struct.calcsize(layout)
    if len(data) != num_bytes:
        raise _Problem(f"expected {num_bytes} bytes of data for input '{tensor.name}', got {len(data)}")
    return struct.unpack(layout, data)


def _only_element(name: str, data: bytes) -> bytes:
    """Returns the one element of a BYTES tensor, which begins with its length in 4 bytes, little endian."""
    if len(data) < _LENGTH.size:
        raise _Problem(f"incomplete string length indicator for inference input '{name}', expecting 4 bytes")
    (length,) = _LENGTH.unpack_from(data)
    if len(data) - _LENGTH.size != length:
        raise _Problem(
            f"expected a string of {length} bytes for inference input '{name}', got {len(data) - _LENGTH.size}"
        )
    return data[_LENGTH.size :]


def _refusal(field: str, description: str) -> InvalidRequest:
    return InvalidRequest((Violation(field, description),))
