"""Both versions of reflection, through their own messages and through grpcurl."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from kestrel_grpc.access.token_file import Scope, line_for
from kestrel_grpc.frontends.grpc.reflection import V1, V1ALPHA
from tests.server.serving import EOF, Serving, reason_of, serving

CHECKOUT = Path(__file__).parents[5]
SERVICES = {
    "inference.GRPCInferenceService",
    *(V1, V1ALPHA, "grpc.health.v1.Health"),
    *("kestrel.v1.EngineService", "kestrel.v1.ImageService", "kestrel.v1.VisionService"),
}


async def ask(
    rig: Serving, version: str, metadata: tuple[tuple[str, str], ...] = (), **question: Any
) -> ServerReflectionResponse:
    # On the wire a stream of one question; asked as one, since a write that comes after the refusal hides it.
    call: Any = rig.channel.unary_stream(
        f"/{version}/ServerReflectionInfo",
        request_serializer=ServerReflectionRequest.SerializeToString,
        response_deserializer=ServerReflectionResponse.FromString,
    )(ServerReflectionRequest(**question), metadata=metadata)
    return await call.read()


@pytest.mark.parametrize("version", [V1, V1ALPHA])
async def test_all_services_are_listed(version: str):
    async with serving() as rig:
        answer = await ask(rig, version, list_services="")
        assert {service.name for service in answer.list_services_response.service} == SERVICES


@pytest.mark.parametrize("version", [V1, V1ALPHA])
@pytest.mark.parametrize("name", sorted(SERVICES))
async def test_every_listed_service_is_described_with_all_it_needs(version: str, name: str):
    async with serving() as rig:
        answer = await ask(rig, version, file_containing_symbol=name)
    files = [FileDescriptorProto.FromString(text) for text in answer.file_descriptor_response.file_descriptor_proto]
    described = {f"{file.package}.{service.name}" for file in files for service in file.service}
    assert name in described
    assert {needed for file in files for needed in file.dependency} <= {file.name for file in files}


async def test_the_comments_of_the_contract_are_served():
    async with serving() as rig:
        answer = await ask(rig, V1, file_containing_symbol="kestrel.v1.VisionService")
    files = [FileDescriptorProto.FromString(text) for text in answer.file_descriptor_response.file_descriptor_proto]
    comments = {
        file.name: "".join(place.leading_comments for place in file.source_code_info.location) for file in files
    }
    for path in sorted((CHECKOUT / "proto" / "kestrel" / "v1").glob("*.proto")):
        name = f"kestrel/v1/{path.name}"
        if name in comments:
            written = [line.strip(" /") for line in path.read_text().splitlines() if line.strip().startswith("//")]
            # The first comment belongs to the file.
            assert [line for line in written if line and line not in comments[name]] == [], name
    assert {"kestrel/v1/vision_service.proto", "kestrel/v1/generation.proto", "kestrel/v1/media.proto"} <= set(
        comments
    )


@pytest.mark.parametrize(
    ("symbol", "comment"),
    [
        ("kestrel.v1.QueryRequest", "// What the question is about. Absent means a question without an image."),
        ("kestrel.v1.VisionService.Detect", "// Finds a box around each object of a kind."),
        ("kestrel.v1.EngineService", "rpc GetLoad"),
    ],
)
async def test_grpcurl_describes_with_comments(symbol: str, comment: str):
    grpcurl = Path(sys.executable).parent / "grpcurl"
    async with serving() as rig:
        process = await asyncio.create_subprocess_exec(
            *(str(grpcurl), "-plaintext", rig.address, "describe", symbol), stdout=asyncio.subprocess.PIPE
        )
        shown, _ = await process.communicate()
    assert process.returncode == 0
    assert comment in shown.decode()
    assert "//" in shown.decode()


async def test_unknown_symbol_is_not_found():
    async with serving() as rig:
        answer = await ask(rig, V1, file_containing_symbol="kestrel.v1.FlightService")
        assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_reflection_can_be_switched_off():
    async with serving(reflection="off") as rig:
        for version in (V1, V1ALPHA):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(rig, version, list_services="")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_grpcurl_shows_what_is_wrong_with_a_request():
    grpcurl = Path(sys.executable).parent / "grpcurl"
    async with serving() as rig:
        process = await asyncio.create_subprocess_exec(
            *(str(grpcurl), "-plaintext", "-d", "{}", rig.address, "kestrel.v1.VisionService/Point"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        _, shown = await process.communicate()
    assert process.returncode != 0
    for part in ("InvalidArgument", "INVALID_REQUEST", '"field":"image","description":"must not be empty"'):
        assert part in shown.decode()


@pytest.mark.parametrize("version", [V1, V1ALPHA])
async def test_reflection_can_ask_for_a_token_of_any_scope(version: str, tmp_path: Path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(line_for("alice", "secret", frozenset({Scope.INFER})))
    async with serving(reflection="token", tokens=str(tokens)) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(rig, version, list_services="")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert reason_of(caught.value) == "TOKEN_INVALID"
        answer = await ask(rig, version, metadata=(("authorization", "Bearer secret"),), list_services="")
        assert answer.list_services_response.service


async def test_reflection_shows_to_whom_asks_a_port_what_is_served_there():
    async with serving(admin_port=0) as rig:
        answer = await ask(rig, V1, list_services="")
        names = {service.name for service in answer.list_services_response.service}
        assert names == SERVICES - {"kestrel.v1.EngineService"}


@pytest.mark.parametrize("version", [V1, V1ALPHA])
async def test_bytes_that_are_no_question_are_the_callers_fault(version: str, caplog: pytest.LogCaptureFixture):
    async with serving() as rig:
        call: Any = rig.channel.unary_stream(f"/{version}/ServerReflectionInfo")(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert caplog.records == []


async def test_several_questions_on_one_stream_are_answered_in_turn():
    async with serving() as rig:
        call: Any = rig.channel.stream_stream(
            f"/{V1}/ServerReflectionInfo",
            request_serializer=ServerReflectionRequest.SerializeToString,
            response_deserializer=ServerReflectionResponse.FromString,
        )()
        for name in sorted(SERVICES):
            await call.write(ServerReflectionRequest(file_containing_symbol=name))
            assert (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()
        assert await call.read() is EOF


async def test_a_stream_without_a_further_question_ends_well():
    async with serving(receive_timeout=1.0) as rig:
        call: Any = rig.channel.stream_stream(
            f"/{V1}/ServerReflectionInfo",
            request_serializer=ServerReflectionRequest.SerializeToString,
            response_deserializer=ServerReflectionResponse.FromString,
        )()
        await call.write(ServerReflectionRequest(list_services=""))
        assert (await call.read()).list_services_response.service
        assert await call.read() is EOF
        assert await call.code() is grpc.StatusCode.OK
