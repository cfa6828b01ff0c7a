"""Stubs of `inference.GRPCInferenceService`, and requests as Triton's clients write them."""

import json
import struct
from collections.abc import AsyncIterable, Iterator, Mapping
from typing import Any

import grpc

from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire

SERVICE: Any = wire.DESCRIPTOR.services_by_name["GRPCInferenceService"]
IMAGE = b"an encoded image"
FINAL = "triton_final_response"
_LAYOUTS: Mapping[type, tuple[str, str]] = {bool: ("BOOL", "<?"), int: ("INT32", "<i"), float: ("FP32", "<f")}


class TritonStub:
    """Each method of the service on a channel, by its name."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        for name, method in SERVICE.methods_by_name.items():
            make = channel.stream_stream if method.client_streaming else channel.unary_unary
            call = make(
                f"/{SERVICE.full_name}/{name}",
                request_serializer=method.input_type._concrete_class.SerializeToString,
                response_deserializer=method.output_type._concrete_class.FromString,
            )
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def element(value: bytes) -> bytes:
    """One element of a BYTES tensor."""
    return struct.pack("<I", len(value)) + value


def infer(request_id: str = "", *, parameters: Mapping[str, Any] | None = None, **inputs: Any) -> Any:
    """A request whose inputs are given by their names; a list becomes a vector, a list of lists a matrix."""
    message = wire.ModelInferRequest(model_name="moondream", id=request_id)
    for name, value in inputs.items():
        tensor = message.inputs.add(name=name)
        if isinstance(value, str | bytes):
            tensor.datatype, tensor.shape[:] = "BYTES", [1]
            message.raw_input_contents.append(element(value.encode() if isinstance(value, str) else value))
        elif isinstance(value, list):
            rows = value if isinstance(value[0], list) else [value]
            tensor.datatype, tensor.shape[:] = (
                "FP32",
                [len(value), len(value[0])] if rows is value else [len(value)],
            )
            numbers = [number for row in rows for number in row]
            message.raw_input_contents.append(struct.pack(f"<{len(numbers)}f", *numbers))
        else:
            tensor.datatype, layout = _LAYOUTS[type(value)]
            tensor.shape[:] = [1]
            message.raw_input_contents.append(struct.pack(layout, value))
    for name, value in (parameters or {}).items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    return message


def query(request_id: str = "", **more: Any) -> Any:
    given: dict[str, Any] = {"SKILL": "query", "QUESTION": "?", "IMAGE": IMAGE, **more}
    return infer(request_id, **given)


def facts(response: Any) -> dict[str, Any]:
    """The JSON in the output of a response."""
    (output,), (raw,) = response.outputs, response.raw_output_contents
    assert (output.name, output.datatype, list(output.shape)) == ("TEXT_OUTPUT", "BYTES", [1])
    assert struct.unpack_from("<I", raw) == (len(raw) - 4,)
    return json.loads(raw[4:])


async def answers(call: AsyncIterable[Any]) -> list[Any]:
    return [response async for response in call]


def iterate(*messages: Any) -> Iterator[Any]:
    return iter(messages)
