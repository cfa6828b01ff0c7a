"""Sends single requests over each API of the server, and records when each piece of an answer arrives.

A `Caller` takes little processor time, so that a process of load measures the server and not itself. It sends a
request once: refusals of a server are part of the measurement.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import struct
import time
from array import array
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import grpc

from kestrel_client.connection import ClientTls, target_of, token_of
from kestrel_client.requests import IMAGE_DIGEST_KEY
from kestrel_client.this_machine import proxy_options
from kestrel_client.v1 import generation_pb2, media_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_grpc.cli.bench.loops import Sample

STREAMED = frozenset(("query", "caption"))
"""The skills whose answers are streamed in pieces."""
_MAX_MESSAGE_BYTES = 64 * 2**20
_SERVICE = "kestrel.v1.VisionService"
# The method of each skill, with the types of its request and its response.
_STREAMS: Mapping[str, tuple[str, Any, Any]] = MappingProxyType(
    {
        "query": ("Query", wire.QueryRequest, wire.QueryResponse),
        "caption": ("Caption", wire.CaptionRequest, wire.CaptionResponse),
    }
)
_WHOLES: Mapping[str, tuple[str, Any, Any]] = MappingProxyType(
    {
        "query": ("CompleteQuery", wire.CompleteQueryRequest, wire.CompleteQueryResponse),
        "caption": ("CompleteCaption", wire.CompleteCaptionRequest, wire.CompleteCaptionResponse),
        "point": ("Point", wire.PointRequest, wire.PointResponse),
        "detect": ("Detect", wire.DetectRequest, wire.DetectResponse),
        "segment": ("Segment", wire.SegmentRequest, wire.SegmentResponse),
    }
)
TEXT_FIELDS: Mapping[str, str] = MappingProxyType(
    {"query": "question", "point": "object", "detect": "object", "segment": "object"}
)
"""The field with the text of a request, by skill."""
Metadata = tuple[tuple[str, str], ...]
TIMED_OUT = "DEADLINE_EXCEEDED"
_TRITON = "inference.GRPCInferenceService"
_FINAL = "triton_final_response"
_LENGTH = struct.Struct("<I")
_EOF: Any = vars(grpc.aio)["EOF"]
"""The end of a stream; the type stubs do not list it."""


@dataclass(frozen=True, slots=True)
class Question:
    """Describes a request for any of the APIs. None leaves a setting to the server."""

    skill: str
    text: str = ""
    picture: bytes | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    is_streamed: bool = True
    adapter: str = ""
    sends_digest: bool = False
    """True if the metadata of a gRPC call include the digest of the picture, for a balancer."""


class Caller(Protocol):
    """Sends requests to one server."""

    async def call(self, question: Question, started: float, timeout_s: float) -> Sample:
        """Sends one request that starts at this moment of the monotonic clock; returns its sample, also if it
        fails."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """Describes a server and the API that is called.

    `model` is the name that OpenAI's API asks for, and for adapters REST.
    """

    api: str
    address: str
    token: str | None = None
    tls: ClientTls | None = None
    model: str = ""

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Caller]:
        """Connects the caller of one process for the block.

        Raises ValueError or OSError for an unusable address or file.
        """
        if self.api in ("rest", "openai"):
            from kestrel_grpc.cli.bench.http import HttpCaller  # gRPC does not need the parser of HTTP

            caller = HttpCaller(self)
            try:
                yield caller
            finally:
                caller.close()
            return
        token = token_of(self.token or "")
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        async with self._channel() as channel:
            if self.api == "grpc":
                yield GrpcCaller(channel, metadata)
                return
            triton = TritonCaller(channel, metadata)
            try:
                yield triton
            finally:
                triton.close()

    def _channel(self) -> grpc.aio.Channel:
        target, is_encrypted = target_of(self.address)
        tls = ClientTls() if is_encrypted and self.tls is None else self.tls
        if is_encrypted is False and tls is not None:
            raise ValueError("http:// asks for no encryption, and --tls-ca (KESTREL_GRPC_TLS_CA) for it")
        # Processes of a machine must not share a connection, also not with other users of this library.
        options = (
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),
            *proxy_options(target),
        )
        if tls is None:
            return grpc.aio.insecure_channel(target, options)
        return grpc.aio.secure_channel(target, tls.credentials(), (*options, *tls.channel_options()))


class GrpcCaller:
    """Calls `VisionService`. All requests share a connection."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> None:
        self._metadata = metadata
        self._streams = {
            skill: channel.unary_stream(f"/{_SERVICE}/{name}", response_deserializer=response.FromString)
            for skill, (name, _, response) in _STREAMS.items()
        }
        self._wholes = {
            skill: channel.unary_unary(f"/{_SERVICE}/{name}", response_deserializer=response.FromString)
            for skill, (name, _, response) in _WHOLES.items()
        }

    async def call(self, question: Question, started: float, timeout_s: float) -> Sample:
        if not (question.is_streamed and question.skill in _STREAMS):
            return await self._whole(question, started, timeout_s)
        message = _message(_STREAMS[question.skill][1], question).SerializeToString()
        pieces: array[float] = array("d")
        num_first, usage = 1, None
        error = text = ""
        call: Any = self._streams[question.skill](message, timeout=timeout_s, metadata=self._metadata_of(question))
        try:
            while (response := await call.read()) is not _EOF:
                if response.HasField("delta"):
                    if not pieces:
                        num_first = response.delta.token_count
                    pieces.append(time.perf_counter())
                elif response.HasField("completed"):
                    usage = response.completed.info.usage
        except grpc.aio.AioRpcError as failure:
            error, text = failure.code().name, failure.details() or ""
        finally:
            call.cancel()
        return _sample(started, pieces, usage, num_first, error, text)

    async def _whole(self, question: Question, started: float, timeout_s: float) -> Sample:
        message = _message(_WHOLES[question.skill][1], question).SerializeToString()
        try:
            response: Any = await self._wholes[question.skill](
                message, timeout=timeout_s, metadata=self._metadata_of(question)
            )
        except grpc.aio.AioRpcError as failure:
            error, text = failure.code().name, failure.details() or ""
            return Sample(started, time.perf_counter(), error=error, message=text)
        result = response.result if question.skill in _STREAMS else response
        usage = result.info.usage
        pieces = array("d", (time.perf_counter(),))
        return _sample(started, pieces, usage, usage.output_token_count, "", "")

    def _metadata_of(self, question: Question) -> Metadata:
        if not question.sends_digest or question.picture is None:
            return self._metadata
        return (*self._metadata, (IMAGE_DIGEST_KEY, hashlib.sha256(question.picture).hexdigest()))


def _sample(started: float, pieces: array[float], usage: Any, num_first: int, error: str, text: str) -> Sample:
    if usage is None:
        return Sample(started, time.perf_counter(), 0, pieces, error, num_first, message=text)
    return Sample(
        started,
        time.perf_counter(),
        usage.output_token_count,
        pieces,
        error,
        num_first,
        usage.cached_token_count,
        usage.input_token_count,
        text,
    )


def _message(kind: Any, question: Question) -> Any:
    message = kind(
        sampling=generation_pb2.SamplingParams(temperature=question.temperature, max_tokens=question.max_tokens),
        image=None if question.picture is None else media_pb2.Image(data=question.picture),
    )
    if (name := TEXT_FIELDS.get(question.skill)) is not None:
        setattr(message, name, question.text)
    if question.skill == "query":
        message.reasoning = False
    if question.adapter:
        message.options.adapter = question.adapter
    return message


class TritonCaller:
    """Calls Triton's service. Streams of streamed answers are reused, for one answer at a time."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> None:
        from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as triton

        self._wire = triton
        self._metadata = metadata
        self._idle: list[Any] = []
        self._infer = channel.unary_unary(
            f"/{_TRITON}/ModelInfer",
            request_serializer=triton.ModelInferRequest.SerializeToString,
            response_deserializer=triton.ModelInferResponse.FromString,
        )
        self._open = channel.stream_stream(
            f"/{_TRITON}/ModelStreamInfer",
            request_serializer=triton.ModelInferRequest.SerializeToString,
            response_deserializer=triton.ModelStreamInferResponse.FromString,
        )

    def close(self) -> None:
        """Ends the idle streams. The caller has no request in flight then."""
        for stream in self._idle:
            stream.cancel()

    async def call(self, question: Question, started: float, timeout_s: float) -> Sample:
        is_streamed = question.is_streamed and question.skill in STREAMED
        message = self._message(question, is_streamed=is_streamed)
        pieces: array[float] = array("d")
        try:
            if is_streamed:
                async with asyncio.timeout(timeout_s):
                    answer, error = await self._stream(message, pieces)
            else:
                response: Any = await self._infer(message, timeout=timeout_s, metadata=self._metadata)
                answer, error = _output(response), ""
        except TimeoutError:
            return Sample(started, time.perf_counter(), 0, pieces, TIMED_OUT, message="no answer in time")
        except grpc.aio.AioRpcError as failure:
            error = failure.code().name
            return Sample(started, time.perf_counter(), 0, pieces, error, message=failure.details() or "")
        now = time.perf_counter()
        if error:  # a stream of Triton reports a text instead of a status
            return Sample(started, now, 0, pieces, "FAILED", message=error)
        metrics = answer["metrics"]
        num_tokens = metrics["output_tokens"]
        num_first = 1
        if not is_streamed:
            pieces.append(now)
            num_first = num_tokens
        return Sample(started, now, num_tokens, pieces, "", num_first, num_input_tokens=metrics["input_tokens"])

    async def _stream(self, message: Any, pieces: array[float]) -> tuple[Mapping[str, Any], str]:
        """Returns the whole answer at the end of its pieces, and the error that ended it."""
        stream: Any = self._idle.pop() if self._idle else self._open(metadata=self._metadata)
        is_usable = False
        try:
            await stream.write(message)
            while (response := await stream.read()) is not _EOF:
                if response.error_message:
                    is_usable = True
                    return {}, response.error_message
                answer = _output(response.infer_response)
                if answer["completed"]:
                    is_usable = response.infer_response.parameters[_FINAL].bool_param
                    return answer, ""
                pieces.append(time.perf_counter())
            return {}, "the stream has ended"
        finally:
            if is_usable:
                self._idle.append(stream)
            else:
                stream.cancel()

    def _message(self, question: Question, *, is_streamed: bool) -> Any:
        message: Any = self._wire.ModelInferRequest(model_name="moondream")
        tensors = [("SKILL", "BYTES", _bytes(question.skill.encode()))]
        if (name := TEXT_FIELDS.get(question.skill)) is not None:
            tensors.append((name.upper(), "BYTES", _bytes(question.text.encode())))
        if question.picture is not None:
            tensors.append(("IMAGE", "BYTES", _bytes(question.picture)))
        if question.max_tokens is not None:
            tensors.append(("MAX_TOKENS", "INT32", struct.pack("<i", question.max_tokens)))
        if question.temperature is not None:
            tensors.append(("TEMPERATURE", "FP32", struct.pack("<f", question.temperature)))
        if is_streamed:
            tensors.append(("STREAM", "BOOL", b"\1"))
        for name, datatype, content in tensors:
            message.inputs.add(name=name, datatype=datatype, shape=(1,))
            message.raw_input_contents.append(content)
        return message


def _bytes(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


def _output(response: Any) -> dict[str, Any]:
    """Returns the JSON of an answer or of a piece of it."""
    return json.loads(response.raw_output_contents[0][_LENGTH.size :])
