"""Inference requests of Triton with anything in them. `infer` is what must hold for each."""

import struct
from typing import Any

from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from kestrel_grpc.calls.errors import ResourceMissing, Unsupported
from kestrel_grpc.frontends.triton.model import INPUTS
from kestrel_grpc.frontends.triton.parsing import infer_request
from kestrel_grpc.frontends.triton.rendering import to_triton
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_runtime.api.errors import InvalidRequest, ModelNotFound
from tests.fuzzing.images import damaged, images
from tests.fuzzing.requests import prepare, told

_REASONS = frozenset(("MODEL_NOT_FOUND", "RESOURCE_MISSING", "UNSUPPORTED"))
_DATATYPES = ("BYTES", "BOOL", "INT32", "FP32", "FP64", "UINT8", "", "bytes", "\U0001f985" * 50)
_NAMES = (*INPUTS, "ADAPTER", "skill", "", "X" * 300, "\U0001f985" * 100)


def infer(data: bytes) -> str:
    """Take a request as far as the engine's queue, or to the status that its caller is told; returns which."""
    try:
        message = wire.ModelInferRequest.FromString(data)
    except DecodeError:
        return "no message"
    parsing = infer_request(message, "moondream-nano", _read_region)
    try:
        parsing.send(None)
    except StopIteration as parsed:
        try:
            prepare(parsed.value.request)
        except InvalidRequest as error:
            return told(error, to_triton)
        return "prepared"
    except (InvalidRequest, ModelNotFound, ResourceMissing, Unsupported) as error:
        return told(error, to_triton, _REASONS)
    raise AssertionError("waited for something")


async def _read_region(name: str, offset: int, num_bytes: int) -> bytes:
    if offset < 0 or num_bytes not in range(2**20):
        raise ResourceMissing("shared memory region", name)
    return bytes(num_bytes)


def _element(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


_USUAL = ("SKILL", "QUESTION", "OBJECT")
_skills = st.sampled_from((b"query", b"caption", b"point", b"detect", b"segment", b"gaze"))
_texts = st.one_of(st.sampled_from(("bird", "What?", "", "\ud7ff")), st.text(min_size=1, max_size=60))
_numbers = st.one_of(st.integers(-2, 2000), st.integers(-(2**31), 2**31 - 1))
_floats = st.one_of(st.floats(0, 1, width=32), st.floats(width=32))
_raw = {
    "BYTES": _texts.map(lambda text: _element(text.encode())),
    "BOOL": st.sampled_from((b"\0", b"\1", b"\2", b"")),
    "INT32": _numbers.map(lambda number: struct.pack("<i", number)),
    "FP32": _floats.map(lambda number: struct.pack("<f", number)),
}
_rows = st.tuples(st.integers(0, 6), st.sampled_from((2, 4, 3))).flatmap(
    lambda shape: st.tuples(
        st.just(list(shape)),
        st.lists(_floats, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]).map(
            lambda numbers: struct.pack(f"<{len(numbers)}f", *numbers)
        ),
    )
)
_parameters = st.dictionaries(
    st.sampled_from(
        (
            *("priority", "timeout", "triton_enable_empty_final_response", "sequence_id", "x" * 300, ""),
            *("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "classification"),
        )
    ),
    st.one_of(
        st.builds(lambda value: wire.InferParameter(int64_param=value), st.integers(-(2**63), 2**63 - 1)),
        st.builds(lambda value: wire.InferParameter(uint64_param=value), st.integers(0, 2**64 - 1)),
        st.builds(lambda value: wire.InferParameter(bool_param=value), st.booleans()),
        st.builds(lambda value: wire.InferParameter(string_param=value), _texts),
        st.builds(lambda value: wire.InferParameter(double_param=value), st.floats()),
        st.just(wire.InferParameter()),
    ),
    max_size=4,
)
_rarely = st.sampled_from((False,) * 20 + (True,))


@st.composite
def _messages(draw: Any) -> bytes:
    message = wire.ModelInferRequest(
        model_name=draw(st.sampled_from(("moondream",) * 40 + ("moondream-nano", "other", "", "\U0001f985" * 200))),
        model_version=draw(st.sampled_from(("",) * 40 + ("1", "2", "x" * 500))),
        id=draw(_texts),
    )
    names = draw(st.lists(st.sampled_from(tuple(INPUTS)), max_size=8, unique=True))
    if not draw(_rarely):
        names = [*_USUAL, *(name for name in names if name not in _USUAL)]
    if draw(_rarely):
        names += draw(st.lists(st.sampled_from(_NAMES), max_size=30))
    for name in names:
        known = INPUTS.get(name)
        datatype = known.datatype if known is not None and not draw(_rarely) else draw(st.sampled_from(_DATATYPES))
        shape, raw = [1], draw(_raw.get(datatype, st.binary(max_size=20)))
        if name == "SKILL" and not draw(_rarely):
            raw = _element(draw(_skills))
        elif name == "LENGTH" and not draw(_rarely):
            raw = _element(b"short")
        elif name == "IMAGE":
            raw = _element(draw(images))
        elif name == "SPATIAL_REFS":
            shape, raw = draw(_rows)
        elif name == "EYE":
            shape, raw = [2], struct.pack("<2f", draw(_floats), draw(_floats))
        if draw(_rarely):
            shape = draw(st.lists(st.one_of(st.integers(-1, 5), st.integers(-(2**63), 2**63 - 1)), max_size=9))
        tensor = message.inputs.add(name=name, datatype=datatype, shape=shape)
        if draw(_rarely):
            tensor.contents.bytes_contents.append(draw(st.binary(max_size=20)))
        for key, value in draw(_parameters).items() if draw(_rarely) else ():
            tensor.parameters[key].CopyFrom(value)
        if not draw(_rarely) or "shared_memory_region" not in tensor.parameters:
            message.raw_input_contents.append(raw)
    for key, value in draw(_parameters).items() if draw(_rarely) else ():
        message.parameters[key].CopyFrom(value)
    for _ in range(draw(st.integers(0, 3)) if draw(_rarely) else 0):
        output = message.outputs.add(name=draw(st.sampled_from(("TEXT_OUTPUT", "OTHER"))))
        for key, value in draw(_parameters).items():
            output.parameters[key].CopyFrom(value)
    return message.SerializeToString()


infer_requests = st.one_of(_messages(), damaged(_messages()), st.binary(max_size=200))
"""What may arrive as the message of `ModelInfer`."""
