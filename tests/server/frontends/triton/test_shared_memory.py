"""Inputs in shared memory: who may name which memory, and what happens when it changes."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.errors import ResourceExists, ResourceMissing, Unsupported
from kestrel_grpc.frontends.triton.shared_memory import MAX_REGIONS, SharedMemory
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as wire
from kestrel_runtime.api.errors import InvalidRequest
from kestrel_runtime.api.requests import Query
from tests.server.serving import serving
from tests.server.triton_calls import IMAGE, TritonStub, answers, element, facts, infer, iterate, query

LOCAL = "ipv4:127.0.0.1:50000"
PREFIX = "kestrel-"


def call_of(principal: str = "", peer: str = LOCAL) -> CallContext:
    call = CallContext((), None, "inference.GRPCInferenceService/ModelInfer")
    call.principal, call.peer = principal, lambda: peer
    return call


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[SharedMemory]:
    (tmp_path / "kestrel-a").write_bytes(b"0123456789")
    (tmp_path / "other").write_bytes(b"0123456789")
    made = SharedMemory(PREFIX, 1000, folder=tmp_path)
    yield made
    made.close()


def refusal(caught: pytest.ExceptionInfo[InvalidRequest]) -> str:
    (violation,) = caught.value.violations
    return violation.description


async def test_a_part_of_a_region_is_copied(memory: SharedMemory):
    memory.register(call_of(), "image", "/kestrel-a", 2, 6)
    assert await memory.read(call_of(), "image", 0, 6) == b"234567"
    assert await memory.read(call_of(), "image", 1, 2) == b"34"
    assert await memory.read(call_of(), "image", 6, 0) == b""
    region = memory.regions(call_of())["image"]
    assert (region.key, region.offset, region.num_bytes) == ("/kestrel-a", 2, 6)


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 7), (6, 1), (-1, 2), (0, -1), (2**62, 1)])
async def test_nothing_outside_of_a_region_is_read(memory: SharedMemory, offset: int, num_bytes: int):
    memory.register(call_of(), "image", "/kestrel-a", 2, 6)
    with pytest.raises(InvalidRequest) as caught:
        await memory.read(call_of(), "image", offset, num_bytes)
    assert "Invalid offset" in refusal(caught)


async def test_memory_that_is_shortened_later_is_an_error(memory: SharedMemory, tmp_path: Path):
    memory.register(call_of(), "image", "kestrel-a", 0, 10)
    os.truncate(tmp_path / "kestrel-a", 4)
    with pytest.raises(InvalidRequest) as caught:
        await memory.read(call_of(), "image", 0, 10)
    assert "shorter than registered" in refusal(caught)


async def test_memory_whose_name_is_gone_is_still_read(memory: SharedMemory, tmp_path: Path):
    memory.register(call_of(), "image", "kestrel-a", 0, 10)
    (tmp_path / "kestrel-a").unlink()
    assert await memory.read(call_of(), "image", 0, 10) == b"0123456789"


@pytest.mark.parametrize(
    "key", ["other", "/other", "", "/", "kestrel-/../other", "../kestrel-a", "//kestrel-a", "kestrel-\0"]
)
def test_only_names_with_the_prefix_are_opened(memory: SharedMemory, key: str):
    with pytest.raises(InvalidRequest) as caught:
        memory.register(call_of(), "image", key, 0, 1)
    assert "begins with 'kestrel-'" in refusal(caught)


def test_only_regular_files_are_opened(memory: SharedMemory, tmp_path: Path):
    os.mkfifo(tmp_path / "kestrel-pipe")
    (tmp_path / "kestrel-link").symlink_to(tmp_path / "other")
    (tmp_path / "kestrel-folder").mkdir()
    for name in ("pipe", "link", "folder", "missing"):
        with pytest.raises(InvalidRequest) as caught:
            memory.register(call_of(), "image", f"kestrel-{name}", 0, 1)
        assert "Unable to open" in refusal(caught)


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 11), (10, 1), (0, 0), (2**63, 2**63)])
def test_a_region_lies_within_its_memory(memory: SharedMemory, offset: int, num_bytes: int):
    with pytest.raises(InvalidRequest):
        memory.register(call_of(), "image", "kestrel-a", offset, num_bytes)


async def test_each_caller_has_regions_of_its_own(memory: SharedMemory):
    memory.register(call_of("alice"), "image", "kestrel-a", 0, 3)
    assert memory.regions(call_of("bob")) == {}
    with pytest.raises(ResourceMissing):
        await memory.read(call_of("bob"), "image", 0, 1)
    memory.unregister(call_of("bob"))
    memory.register(call_of("bob"), "image", "kestrel-a", 3, 3)
    assert await memory.read(call_of("alice"), "image", 0, 3) == b"012"
    assert await memory.read(call_of("bob"), "image", 0, 3) == b"345"


@pytest.mark.parametrize("peer", ["ipv4:10.0.0.7:50000", "ipv6:[2001:db8::1]:50000", "ipv4:128.0.0.1:1", ""])
async def test_callers_on_other_machines_have_none(memory: SharedMemory, peer: str):
    remote = call_of(peer=peer)
    with pytest.raises(Unsupported):
        memory.register(remote, "image", "kestrel-a", 0, 1)
    memory.register(call_of(), "image", "kestrel-a", 0, 1)
    with pytest.raises(Unsupported):
        await memory.read(remote, "image", 0, 1)
    with pytest.raises(Unsupported):
        memory.regions(remote)


@pytest.mark.parametrize(
    "peer", [LOCAL, "unix:", "ipv6:[::1]:5", "ipv6:%5B::1%5D:5", "ipv6:%5B::ffff:127.0.0.1%5D:5"]
)
def test_callers_on_this_machine_are_known_by_their_address(memory: SharedMemory, peer: str):
    memory.register(call_of(peer=peer), "image", "kestrel-a", 0, 1)


def test_a_name_is_registered_once_until_it_is_forgotten(memory: SharedMemory):
    memory.register(call_of(), "image", "kestrel-a", 0, 1)
    with pytest.raises(ResourceExists):
        memory.register(call_of(), "image", "kestrel-a", 0, 1)
    memory.unregister(call_of(), "image")
    memory.unregister(call_of(), "image")
    memory.register(call_of(), "image", "kestrel-a", 0, 1)


def test_regions_are_limited_and_their_files_are_closed(memory: SharedMemory):
    before = len(os.listdir("/dev/fd"))
    for index in range(MAX_REGIONS):
        memory.register(call_of(), f"{index}", "kestrel-a", 0, 1)
    with pytest.raises(InvalidRequest):
        memory.register(call_of(), "one more", "kestrel-a", 0, 1)
    memory.unregister(call_of())
    assert len(os.listdir("/dev/fd")) == before


def test_regions_of_callers_that_are_gone_are_forgotten(tmp_path: Path):
    (tmp_path / "kestrel-a").write_bytes(b"0123456789")
    known = {"alice", "bob"}
    memory = SharedMemory(PREFIX, 1000, lambda: known, folder=tmp_path)
    memory.register(call_of("alice"), "image", "kestrel-a", 0, 1)
    before = len(os.listdir("/dev/fd"))
    known.remove("alice")
    memory.register(call_of("bob"), "image", "kestrel-a", 0, 1)
    assert len(os.listdir("/dev/fd")) == before
    assert memory.regions(call_of("alice")) == {}
    memory.close()


@pytest.fixture
def image_in_memory() -> Iterator[Path]:
    path = Path("/dev/shm") / f"kestrel-{secrets.token_hex(8)}"
    path.write_bytes(element(IMAGE))
    yield path
    path.unlink()


def in_memory(offset: int = 0) -> Any:
    """A query whose image is in the region `image`."""
    message = infer(SKILL="query", QUESTION="?")
    tensor = message.inputs.add(name="IMAGE", datatype="BYTES", shape=(1,))
    tensor.parameters["shared_memory_region"].string_param = "image"
    tensor.parameters["shared_memory_offset"].int64_param = offset
    tensor.parameters["shared_memory_byte_size"].int64_param = len(IMAGE) + 4
    message.inputs.insert(0, message.inputs.pop())  # the others keep their order in `raw_input_contents`
    return message


def registration(path: Path, **more: Any) -> wire.SystemSharedMemoryRegisterRequest:
    fields: dict[str, Any] = {"name": "image", "key": f"/{path.name}", "byte_size": path.stat().st_size, **more}
    return wire.SystemSharedMemoryRegisterRequest(**fields)


async def test_a_request_takes_its_image_from_memory_and_outlives_its_truncation(image_in_memory: Path):
    async with serving(triton_shared_memory=PREFIX) as rig:
        triton = TritonStub(rig.channel)
        await triton.SystemSharedMemoryRegister(registration(image_in_memory))
        status = await triton.SystemSharedMemoryStatus(wire.SystemSharedMemoryStatusRequest())
        assert status.regions["image"].byte_size == len(IMAGE) + 4
        assert facts(await triton.ModelInfer(in_memory()))["answer"] == "a kestrel"
        os.truncate(image_in_memory, 3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await triton.ModelInfer(in_memory())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "shorter than registered" in (caught.value.details() or "")
        failed, answered = await answers(triton.ModelStreamInfer(iterate(in_memory(), query("next"))))
        if not failed.error_message:
            failed, answered = answered, failed
        assert "shorter than registered" in failed.error_message
        assert answered.infer_response.id == "next"
        await triton.SystemSharedMemoryUnregister(wire.SystemSharedMemoryUnregisterRequest(name="image"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await triton.ModelInfer(in_memory())
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert caught.value.details() == "Unable to find shared memory region: 'image'"
    assert rig.engine.requests == [Query("?", IMAGE), Query("?", IMAGE)]


async def test_shared_memory_is_off_unless_it_is_asked_for(image_in_memory: Path):
    async with serving() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await TritonStub(rig.channel).SystemSharedMemoryRegister(registration(image_in_memory))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        metadata = await TritonStub(rig.channel).ServerMetadata(wire.ServerMetadataRequest())
        assert "system_shared_memory" not in metadata.extensions


async def test_a_region_that_exists_is_told_by_its_status(image_in_memory: Path):
    async with serving(triton_shared_memory=PREFIX) as rig:
        triton = TritonStub(rig.channel)
        await triton.SystemSharedMemoryRegister(registration(image_in_memory))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await triton.SystemSharedMemoryRegister(registration(image_in_memory))
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
