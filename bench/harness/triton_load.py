"""Load for Triton's service, and a bare service that sends the same messages as ours."""

import asyncio
import os
import struct
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from kestrel_grpc.frontends.triton.rendering import ResponseRenderer
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_runtime.api.events import Event, Finished, TextDelta

_SERVICE = "inference.GRPCInferenceService"
_REQUEST_ID = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class TritonLoad:
    """A kind of load: one request, sent again and again by `num_in_flight` callers.

    Where `num_responses` is not 0, each caller sends its requests in one stream, and each has so many responses.
    """

    name: str
    request: bytes
    num_in_flight: int
    num_responses: int = 0


def triton_loads(num_pieces: int) -> tuple[TritonLoad, ...]:
    """The loads; a streamed answer has `num_pieces` pieces."""
    asked = {"SKILL": b"query", "QUESTION": b"?"}
    found = {"SKILL": b"point", "OBJECT": b"?"}
    return (
        TritonLoad("Triton, streamed responses", _request(asked, streams=True), 64, num_pieces + 1),
        TritonLoad("Triton, requests with a 100 KB image", _request({**found, "IMAGE": os.urandom(100_000)}), 16),
        TritonLoad("Triton, requests with a 1 MB image", _request({**found, "IMAGE": os.urandom(1_000_000)}), 16),
    )


async def drive(channel: grpc.aio.Channel, load: TritonLoad, duration_s: float) -> int:
    """Keep `num_in_flight` requests running for a while; how many responses came."""
    until = time.perf_counter() + duration_s
    count = 0

    async def stream() -> None:
        nonlocal count
        call: Any = channel.stream_stream(f"/{_SERVICE}/ModelStreamInfer")()
        while time.perf_counter() < until:
            await call.write(load.request)
            for _ in range(load.num_responses):
                await call.read()
                count += 1
        await call.done_writing()
        await call.read()

    async def unary() -> None:
        nonlocal count
        call: Any = channel.unary_unary(f"/{_SERVICE}/ModelInfer")
        while time.perf_counter() < until:
            await call(load.request)
            count += 1

    await asyncio.gather(*((stream if load.num_responses else unary)() for _ in range(load.num_in_flight)))
    return count


def bare_service(events: Sequence[Event], found: Finished) -> grpc.GenericRpcHandler:
    """Answers every request of a stream with `events`, and every single request with `found`."""

    async def infer(message: wire.ModelInferRequest, context: Any) -> wire.ModelInferResponse:
        return ResponseRenderer(message).answer(found, _REQUEST_ID)

    async def stream(
        messages: AsyncIterator[wire.ModelInferRequest], context: Any
    ) -> AsyncIterator[wire.ModelStreamInferResponse]:
        async for message in messages:
            render = ResponseRenderer(message)
            for event in events:
                if isinstance(event, TextDelta):
                    yield render.piece(event)
                elif isinstance(event, Finished):
                    yield render.last(event, _REQUEST_ID, streams=True, is_final=True)

    parse = wire.ModelInferRequest.FromString
    handlers: dict[str, Any] = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(infer, parse, wire.ModelInferResponse.SerializeToString),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
            stream, parse, wire.ModelStreamInferResponse.SerializeToString
        ),
    }
    return grpc.method_handlers_generic_handler(_SERVICE, handlers)


def _request(inputs: dict[str, bytes], *, streams: bool = False) -> bytes:
    message = wire.ModelInferRequest(model_name="moondream")
    for name, value in inputs.items():
        message.inputs.add(name=name, datatype="BYTES", shape=(1,))
        message.raw_input_contents.append(struct.pack("<I", len(value)) + value)
    if streams:
        message.inputs.add(name="STREAM", datatype="BOOL", shape=(1,))
        message.raw_input_contents.append(b"\1")
    return message.SerializeToString()
