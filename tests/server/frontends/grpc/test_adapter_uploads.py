"""`UploadAdapter` and `DeleteAdapter` over the wire.

What is complete and good gets its name, and what fails leaves nothing behind; a removed adapter is gone as a whole.
"""

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kestrel_client import AdapterExists, AsyncClient, ServerError
from kestrel_client.v1 import engine_service_pb2 as wire
from kestrel_client.v1 import vision_service_pb2 as vision_wire
from kestrel_client.v1.engine_service_pb2_grpc import EngineServiceStub
from kestrel_grpc import adapter_folder
from kestrel_grpc.access.token_file import Scope, line_for
from kestrel_grpc.calls.call_groups import MAX_UPLOADS
from tests.fakes import FakeEngine
from tests.journey.http2 import Http2Client, framed
from tests.server.serving import Serving, details_of, reason_of, serving

Code = grpc.StatusCode
MIB = 2**20
WEIGHTS = bytes(range(251)) * 10_007
UPLOAD = "/kestrel.v1.EngineService/UploadAdapter"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters"
    folder.mkdir()
    return folder


@asynccontextmanager
async def with_folder(root: Path | None, **options: Any) -> AsyncIterator[Serving]:
    engine = FakeEngine()
    config = replace(
        engine.info.config,
        adapters=None if root is None else str(root),
        adapter_repositories=options.pop("adapter_repositories", ()),
    )
    engine.info = replace(engine.info, config=config)
    async with serving(engine, **options) as rig:
        yield rig


def parts(name: str = "a", data: bytes = WEIGHTS, *, chunk_bytes: int = MIB, **header: Any) -> Iterator[Any]:
    """The messages of an upload; `header` replaces what would be true."""
    values: dict[str, Any] = {
        "name": name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "size_bytes": len(data),
        **header,
    }
    yield wire.UploadAdapterRequest(header=wire.AdapterHeader(**values))
    for start in range(0, len(data), chunk_bytes):
        yield wire.UploadAdapterRequest(chunk=data[start : start + chunk_bytes])


async def upload(rig: Serving, messages: Iterable[Any], token: str | None = None) -> wire.UploadAdapterResponse:
    """Asks by the blocking stub: that of asyncio may lose the status of an early refusal."""
    metadata = () if token is None else (("authorization", f"Bearer kestrel_{token}"),)

    def send() -> wire.UploadAdapterResponse:
        with grpc.insecure_channel(rig.address) as channel:
            stub: Any = EngineServiceStub(channel)
            return stub.UploadAdapter(iter(messages), metadata=metadata)

    return await asyncio.to_thread(send)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    error: Any = caught.value
    return error.code(), reason_of(error)


async def text_of(call: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    error: Any = caught.value
    return str(error.details())


async def no_open_calls(rig: Serving) -> None:
    """Wait until the server has noticed that its calls have ended."""
    async with asyncio.timeout(60):
        await rig.server._groups.ended()


async def until(holds: Callable[[], bool]) -> None:
    def wait() -> None:
        end = time.monotonic() + 60.0
        while not holds():
            assert time.monotonic() < end
            threading.Event().wait(0.001)

    await asyncio.to_thread(wait)


def files_in(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


async def test_an_upload_gets_its_name_and_the_engine_hears_of_it(root: Path):
    async with with_folder(root) as rig:
        stored = await upload(rig, parts("team/colours@200", config=b"{}"))
    assert stored == wire.UploadAdapterResponse(
        name="team/colours@200", digest=hashlib.sha256(WEIGHTS).hexdigest(), replaced=False
    )
    folder = "team/colours@200"
    assert files_in(root) == {
        f"{folder}/adapter_config.json": b"{}",
        f"{folder}/adapter_model.safetensors": WEIGHTS,
    }
    assert rig.engine.changed_adapters == ["team/colours@200"]


async def test_a_name_is_replaced_on_request_alone(root: Path):
    async with with_folder(root) as rig:
        await upload(rig, parts(config=b"{}"))
        assert await refusal(upload(rig, parts(data=b"new"))) == (Code.ALREADY_EXISTS, "ADAPTER_EXISTS")
        assert "exists already" in await text_of(upload(rig, parts(data=b"new")))
        assert files_in(root)["a/adapter_model.safetensors"] == WEIGHTS
        assert (await upload(rig, parts(data=b"new", replace=True))).replaced
        assert not (await upload(rig, parts("b", replace=True))).replaced
    assert files_in(root) == {"a/adapter_model.safetensors": b"new", "b/adapter_model.safetensors": WEIGHTS}


async def test_a_step_replaces_the_folder_that_its_name_means(root: Path):
    folder = root / "a" / "checkpoint-200"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"old")
    async with with_folder(root) as rig:
        assert await refusal(upload(rig, parts("a@200"))) == (Code.ALREADY_EXISTS, "ADAPTER_EXISTS")
        assert (await upload(rig, parts("a@200", replace=True))).replaced
    assert files_in(root) == {"a/checkpoint-200/adapter_model.safetensors": WEIGHTS}


async def test_nothing_but_the_files_of_an_adapter_is_ever_lost(root: Path):
    for name, inner in (("trained", "optimizer.pt"), ("team", "colours/adapter_model.safetensors")):
        (root / name / inner).parent.mkdir(parents=True)
        (root / name / inner).write_bytes(b"kept")
    (root / "file").write_bytes(b"kept")
    before = files_in(root)
    async with with_folder(root) as rig:
        for name in ("trained", "team", "file"):
            assert await refusal(upload(rig, parts(name, replace=True))) == (Code.ALREADY_EXISTS, "ADAPTER_EXISTS")
        assert "'optimizer.pt'" in await text_of(upload(rig, parts("trained", replace=True)))
        assert await refusal(upload(rig, parts("file/a"))) == (Code.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert files_in(root) == before


async def test_a_link_is_replaced_and_not_what_it_leads_to(root: Path):
    (root / "run-7").mkdir()
    (root / "run-7" / "adapter_model.safetensors").write_bytes(b"seven")
    (root / "latest").symlink_to("run-7")
    async with with_folder(root) as rig:
        assert (await upload(rig, parts("latest", replace=True))).replaced
    assert files_in(root) == {
        "latest/adapter_model.safetensors": WEIGHTS,
        "run-7/adapter_model.safetensors": b"seven",
    }
    assert not (root / "latest").is_symlink()
    assert sorted(os.listdir(root)) == ["latest", "run-7"]


async def test_a_repository_on_the_hub_is_hidden_on_request_alone(root: Path):
    async with with_folder(root, adapter_repositories=("org/name",)) as rig:
        assert await refusal(upload(rig, parts("org/name"))) == (Code.ALREADY_EXISTS, "ADAPTER_EXISTS")
        assert (await upload(rig, parts("org/name", replace=True))).replaced


@pytest.mark.parametrize(
    "name",
    [
        *("", "..", "../a", "a/../b", "/a", "a//b", "a/b/c/d/e", ".a", ".upload-a", "a\\b", "a\x00b", "a\n", "é"),
        *("a@", "@1", "a@1/2", "a" * 129, "a.safetensors", "a/adapter_config.json", "a@1.safetensors"),
    ],
)
async def test_a_name_that_is_none_is_refused_with_every_other_violation(root: Path, name: str):
    async with with_folder(root) as rig:
        with pytest.raises(grpc.RpcError) as caught:
            await upload(rig, parts(name, size_bytes=0, sha256="AB"))
    error: Any = caught.value
    found: Any = details_of(error)["BadRequest"]
    fields = [violation.field for violation in found.field_violations]
    assert fields == ["header.name", "header.size_bytes", "header.sha256"]
    assert os.listdir(root) == []


async def test_a_name_that_leads_out_of_the_folder_is_refused(root: Path, tmp_path: Path):
    (tmp_path / "outside").mkdir()
    (root / "out").symlink_to(tmp_path / "outside")
    async with with_folder(root) as rig:
        found = await refusal(upload(rig, parts("out/a")))
    assert found == (Code.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert os.listdir(tmp_path / "outside") == []
    assert os.listdir(root) == ["out"]


@pytest.mark.parametrize(
    ("messages", "code", "reason"),
    [
        (lambda: iter(()), Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (lambda: iter([wire.UploadAdapterRequest()]), Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (lambda: list(parts())[1:], Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (lambda: [next(parts()), next(parts())], Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (lambda: [next(parts()), wire.UploadAdapterRequest(chunk=b"")], Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (lambda: list(parts())[:2], Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (lambda: parts(size_bytes=len(WEIGHTS) - 1), Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (lambda: parts(size_bytes=2**62), Code.INVALID_ARGUMENT, "ADAPTER_TOO_LARGE"),
        (lambda: parts(size_bytes=-1), Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (lambda: parts(sha256="0" * 64), Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (lambda: parts(chunk_bytes=MIB + 1), Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (lambda: parts(config=bytes(MIB + 1)), Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (lambda: parts(data=b"broken"), Code.FAILED_PRECONDITION, "ADAPTER_INVALID"),
        (lambda: parts("team/a", data=b"broken"), Code.FAILED_PRECONDITION, "ADAPTER_INVALID"),
    ],
    ids=[
        *("nothing", "no part", "no header", "two headers", "an empty chunk", "too few bytes", "too many bytes"),
        *(
            "beyond the limit",
            "negative",
            "damaged",
            "a long chunk",
            "a long configuration",
            "unusable",
            "in a team",
        ),
    ],
)
async def test_what_is_refused_leaves_nothing(root: Path, messages: Any, code: Any, reason: str):
    async with with_folder(root, max_adapter_bytes=4 * MIB) as rig:
        assert await refusal(upload(rig, messages())) == (code, reason)
        await no_open_calls(rig)
        assert os.listdir(root) == []
        assert rig.engine.changed_adapters == []
        await upload(rig, parts())


@pytest.mark.parametrize(
    ("has_folder", "options", "text"),
    [
        (False, {}, "started without --adapters"),
        (True, {"max_adapter_bytes": 0}, "started with --max-adapter-bytes 0"),
    ],
)
async def test_a_server_without_uploads_says_why(root: Path, has_folder: bool, options: dict[str, Any], text: str):
    async with with_folder(root if has_folder else None, **options) as rig:
        assert await refusal(upload(rig, parts())) == (Code.FAILED_PRECONDITION, "ADAPTER_FOLDER_UNWRITABLE")
        assert text in await text_of(upload(rig, parts()))


async def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    folder = Path("/sys/kernel")  # not even root can make a folder there
    async with with_folder(folder) as rig:
        assert await refusal(upload(rig, parts())) == (Code.FAILED_PRECONDITION, "ADAPTER_FOLDER_UNWRITABLE")
        assert "cannot write to the folder of --adapters" in await text_of(upload(rig, parts()))


async def test_an_upload_that_does_not_fit_the_disk_is_refused_from_its_header(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    true = os.statvfs(root)
    free = true.f_bavail * true.f_frsize
    monkeypatch.setattr(adapter_folder, "_KEPT_FREE_BYTES", free)
    async with with_folder(root) as rig:
        assert await refusal(upload(rig, parts())) == (Code.RESOURCE_EXHAUSTED, "ADAPTER_DISK_FULL")
        await no_open_calls(rig)
        assert os.listdir(root) == []


async def test_an_upload_whose_client_hangs_up_leaves_nothing(root: Path):
    async with with_folder(root) as rig:
        call = rig.engine_service.UploadAdapter()
        for part in list(parts())[:2]:
            await call.write(part)
        call.cancel()
        async with Http2Client.connected(rig.address) as client:
            stream = await client.begin(UPLOAD)
            await client.send(stream, framed(next(parts("b"))))
            await client.send(stream, framed(wire.UploadAdapterRequest(chunk=WEIGHTS[:10_000])))
        await no_open_calls(rig)
        assert os.listdir(root) == []


async def test_a_caller_that_hangs_up_during_the_check_leaves_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    is_checking, may_end = asyncio.Event(), asyncio.Event()

    async def check(self: FakeEngine, folder: str, name: str) -> str:
        is_checking.set()
        await may_end.wait()
        return "ab"

    monkeypatch.setattr(FakeEngine, "check_adapter", check)
    async with with_folder(root) as rig:
        call = rig.engine_service.UploadAdapter(iter(list(parts())))
        await is_checking.wait()
        call.cancel()
        await no_open_calls(rig)
        assert os.listdir(root) == []
        is_checking.clear()
        (tmp_path / "a.safetensors").write_bytes(WEIGHTS)
        async with AsyncClient(rig.address) as client:
            task = asyncio.ensure_future(client.upload_adapter("a", tmp_path / "a.safetensors"))
            await is_checking.wait()
            task.cancel()
            await no_open_calls(rig)
        assert os.listdir(root) == []
        may_end.set()
        assert (await upload(rig, parts())).name == "a"


async def test_an_upload_that_stalls_or_trickles_is_ended(root: Path):
    def trickle() -> Iterator[Any]:
        yield next(parts("b"))
        for byte in WEIGHTS:
            time.sleep(0.01)
            yield wire.UploadAdapterRequest(chunk=bytes([byte]))

    async with with_folder(root, receive_timeout=0.5) as rig:
        call = rig.engine_service.UploadAdapter()
        for part in list(parts())[:2]:
            await call.write(part)
        late = (Code.DEADLINE_EXCEEDED, "MESSAGE_TIMEOUT")
        assert await asyncio.gather(refusal(call), refusal(upload(rig, trickle()))) == [late, late]
        await no_open_calls(rig)
        assert os.listdir(root) == []


async def test_uploads_that_stall_delay_no_other_call_and_further_ones_are_refused(root: Path):
    async with with_folder(root) as rig, Http2Client.connected(rig.address) as client:
        for number in range(MAX_UPLOADS):
            stream = await client.begin(UPLOAD)
            await client.send(stream, framed(next(parts(f"a{number}"))))
        async with asyncio.timeout(60):
            await until(lambda: len(os.listdir(root)) == MAX_UPLOADS)
            assert await refusal(upload(rig, parts("b"))) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
            await rig.engine_service.GetLoad(wire.GetLoadRequest())
            response = await rig.vision.CompleteQuery(vision_wire.CompleteQueryRequest(question="?"))
            assert response.result.answer == "a kestrel"


async def test_of_many_uploads_of_a_name_one_is_stored(root: Path):
    async with with_folder(root) as rig:
        contents = [WEIGHTS[number:] for number in range(MAX_UPLOADS)]
        found = await asyncio.gather(*(upload(rig, parts(data=data)) for data in contents), return_exceptions=True)
        stored = [data for data, outcome in zip(contents, found, strict=True) if not isinstance(outcome, Exception)]
        assert len(stored) == 1
        refused: list[Any] = [outcome for outcome in found if isinstance(outcome, Exception)]
        assert {reason_of(error) for error in refused} == {"ADAPTER_EXISTS"}
        await no_open_calls(rig)
    assert files_in(root) == {"a/adapter_model.safetensors": stored[0]}


async def test_a_server_that_drains_ends_uploads_and_leaves_nothing(root: Path):
    async with with_folder(root, drain_timeout=30.0) as rig:
        call = rig.engine_service.UploadAdapter()
        await call.write(next(parts()))
        await until(lambda: bool(os.listdir(root)))
        draining = asyncio.ensure_future(rig.server.drain())
        assert (await refusal(call))[0] is Code.UNAVAILABLE
        assert await draining
        assert os.listdir(root) == []


async def test_uploads_take_the_scope_of_operators_and_are_logged_with_their_digest(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    tokens = tmp_path / "tokens.toml"
    scopes = {"alice": Scope.INFER, "operator": Scope.ADMIN}
    tokens.write_text("\n".join(line_for(name, f"kestrel_{name}", frozenset({scopes[name]})) for name in scopes))
    caplog.set_level("INFO", "kestrel_grpc")
    async with with_folder(root, tokens=str(tokens)) as rig:
        assert await refusal(upload(rig, parts(), "alice")) == (Code.PERMISSION_DENIED, "SCOPE_REQUIRED")
        assert await refusal(upload(rig, parts())) == (Code.UNAUTHENTICATED, "TOKEN_INVALID")
        assert os.listdir(root) == []
        await upload(rig, parts(), "operator")
        await refusal(upload(rig, parts(), "operator"))
    lines: list[Any] = [record.args for record in caplog.records if record.name == "kestrel_grpc.audit"]
    facts = [tuple(line.get(name) for name in ("tenant", "outcome", "adapter", "digest")) for line in lines]
    assert facts == [
        ("alice", "SCOPE_REQUIRED", None, None),
        (None, "TOKEN_INVALID", None, None),
        ("operator", "OK", "a", hashlib.sha256(WEIGHTS).hexdigest()),
        ("operator", "ADAPTER_EXISTS", "a", None),
    ]


async def test_with_an_admin_port_uploads_are_taken_there_alone(root: Path):
    async with with_folder(root, admin_port=0) as rig:
        with pytest.raises(grpc.RpcError) as caught:
            await upload(rig, parts())
        error: Any = caught.value
        assert error.code() is Code.UNIMPLEMENTED
        async with AsyncClient(rig.address) as client:
            with pytest.raises(ServerError, match="with --admin-port a server takes calls of operators there"):
                await client.list_adapters()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.server.admin_port}") as channel:
            stub: Any = EngineServiceStub(channel)
            assert (await stub.UploadAdapter(iter(list(parts())))).name == "a"


async def test_the_awaiting_client_reports_an_early_refusal(root: Path, tmp_path: Path):
    (tmp_path / "a.safetensors").write_bytes(bytes(24 * MIB))
    async with with_folder(root) as rig, AsyncClient(rig.address) as client:
        await upload(rig, parts())
        with pytest.raises(AdapterExists, match="exists already"):
            await client.upload_adapter("a", tmp_path / "a.safetensors")


async def test_what_killed_processes_have_left_is_removed_at_the_start(root: Path):
    left = root / ".upload-0123456789abcdef"
    left.mkdir()
    (left / "adapter_model.safetensors").write_bytes(b"half")
    async with with_folder(root):
        await until(lambda: not left.exists())


def test_uploads_of_other_processes_and_other_folders_are_not_removed(root: Path):
    (root / ".git").mkdir()
    (root / "a").mkdir()
    folder = adapter_folder.AdapterFolder(str(root), (), MIB)
    name = adapter_folder.AdapterName("a")
    running = folder.staged(adapter_folder.AnnouncedAdapter(name, 3, replaces=True))
    running.open()
    (root / ".upload-00").mkdir()
    (root / ".upload-11").symlink_to("a")
    adapter_folder.AdapterFolder(str(root), (), MIB).remove_left_behind()
    assert sorted(os.listdir(root)) == sorted([".git", "a", running.folder])
    running.write(b"abc")
    running.finish()
    assert running.publish()
    running.discard()
    assert files_in(root) == {"a/adapter_model.safetensors": b"abc"}


def test_a_replaced_adapter_is_never_missing(root: Path):
    """Readers see the old or the new folder at every moment."""
    folder = adapter_folder.AdapterFolder(str(root), (), MIB)
    is_over, missing = threading.Event(), list[bool]()

    def publish(content: bytes) -> None:
        staged = folder.staged(
            adapter_folder.AnnouncedAdapter(adapter_folder.AdapterName("a"), len(content), replaces=True)
        )
        staged.open()
        staged.write(content)
        staged.finish()
        staged.publish()
        staged.discard()

    def watch() -> None:
        while not is_over.is_set():
            missing.append(not (root / "a").is_dir())

    publish(b"0")
    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(50):
        publish(b"%d" % number)
    is_over.set()
    watcher.join()
    assert missing
    assert not any(missing)
    assert files_in(root) == {"a/adapter_model.safetensors": b"49"}


# Removing


async def remove(rig: Serving, name: str, token: str | None = None) -> wire.DeleteAdapterResponse:
    metadata = () if token is None else (("authorization", f"Bearer kestrel_{token}"),)
    return await rig.engine_service.DeleteAdapter(wire.DeleteAdapterRequest(name=name), metadata=metadata)


def put_adapter(folder: Path, *files: str) -> None:
    folder.mkdir(parents=True)
    for name in files or ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).write_bytes(WEIGHTS)


@pytest.mark.parametrize(
    ("name", "folder", "gone"),
    [
        ("colours", "colours", "colours"),
        ("team/colours", "team/colours", "team"),
        ("a/b/c@200", "a/b/c@200", "a"),
        ("team/colours@200", "team/colours/200", "team"),
        ("team/colours@200", "team/colours/checkpoint-200", "team"),
    ],
)
async def test_a_removed_adapter_leaves_nothing_and_the_engine_hears_of_it(
    root: Path, name: str, folder: str, gone: str
):
    put_adapter(root / folder)
    put_adapter(root / "other", "x.safetensors")
    async with with_folder(root) as rig:
        removed = await remove(rig, name)
        assert await refusal(remove(rig, name)) == (Code.NOT_FOUND, "ADAPTER_NOT_FOUND")
        assert rig.engine.changed_adapters == [name]
    assert removed.request_count == (2 if name == "colours" else 0)
    assert os.listdir(root) == ["other"]
    assert not (root / gone).exists()


async def test_neighbours_of_a_removed_adapter_stay(root: Path):
    for folder in ("team/a", "team/b", "run/7", "run/checkpoint-7"):
        put_adapter(root / folder, "x.safetensors")
    async with with_folder(root) as rig:
        await remove(rig, "team/a")
        await remove(rig, "run@7")  # the first folder that the name may mean
    assert sorted(files_in(root)) == ["run/checkpoint-7/x.safetensors", "team/b/x.safetensors"]


async def test_a_link_is_removed_and_not_what_it_leads_to(root: Path, tmp_path: Path):
    put_adapter(root / "run-7")
    put_adapter(tmp_path / "outside")
    (root / "latest").symlink_to("run-7")
    (root / "elsewhere").symlink_to(tmp_path / "outside")
    before = files_in(root / "run-7")
    async with with_folder(root) as rig:
        await remove(rig, "latest")
        await remove(rig, "elsewhere")
    assert os.listdir(root) == ["run-7"]
    assert files_in(root / "run-7") == files_in(tmp_path / "outside") == before


@pytest.mark.parametrize(
    ("name", "code", "reason", "text"),
    [
        ("absent", Code.NOT_FOUND, "ADAPTER_NOT_FOUND", "no adapter named 'absent' in the folder of --adapters"),
        ("file", Code.NOT_FOUND, "ADAPTER_NOT_FOUND", "no adapter named"),
        ("out/a", Code.NOT_FOUND, "ADAPTER_NOT_FOUND", "no adapter named"),
        ("org/name", Code.NOT_FOUND, "ADAPTER_NOT_FOUND", "a repository on the hub"),
        ("team", Code.FAILED_PRECONDITION, "ADAPTER_FOLDER_UNWRITABLE", "has 'a' in it, which would be lost"),
        ("notes", Code.FAILED_PRECONDITION, "ADAPTER_FOLDER_UNWRITABLE", "has 'notes.txt' in it"),
        *(
            (name, Code.INVALID_ARGUMENT, "INVALID_REQUEST", "must be the name of an adapter")
            for name in ("", "..", "../a", "team/../a", "/a", ".upload-00", "a@", "a\x00b", "a" * 129)
        ),
    ],
)
async def test_what_is_no_adapter_of_the_folder_is_not_removed(
    root: Path, tmp_path: Path, name: str, code: Any, reason: str, text: str
):
    put_adapter(tmp_path / "outside" / "a")
    (root / "out").symlink_to(tmp_path / "outside")
    put_adapter(root / "team" / "a")
    put_adapter(root / "notes", "x.safetensors", "notes.txt")
    put_adapter(root / ".upload-11", "x.txt")
    (root / "file").write_bytes(b"x")
    before = files_in(root), files_in(tmp_path / "outside")
    async with with_folder(root, adapter_repositories=("org/name",)) as rig:
        await until(lambda: not (root / ".upload-11").exists())
        assert await refusal(remove(rig, name)) == (code, reason)
        assert text in await text_of(remove(rig, name))
        assert rig.engine.changed_adapters == []
    before[0].pop(".upload-11/x.txt")
    assert (files_in(root), files_in(tmp_path / "outside")) == before


@pytest.mark.parametrize(
    ("folder", "options", "text"),
    [
        (None, {}, "started without --adapters"),
        ("/sys", {}, "cannot write to the folder of --adapters"),
        ("/sys", {"max_adapter_bytes": 0}, "started with --max-adapter-bytes 0"),
    ],
)
async def test_a_server_that_cannot_remove_adapters_says_why(
    folder: str | None, options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(adapter_folder, "_other_entry", lambda folder: None)  # else it is refused for its content
    async with with_folder(None if folder is None else Path(folder), **options) as rig:
        found = await refusal(remove(rig, "kernel"))
        assert found == (Code.FAILED_PRECONDITION, "ADAPTER_FOLDER_UNWRITABLE")
        assert text in await text_of(remove(rig, "kernel"))
        assert rig.engine.changed_adapters == []


async def test_of_many_removals_of_a_name_one_succeeds_while_uploads_around_it_go_on(root: Path):
    put_adapter(root / "team" / "a")
    async with with_folder(root) as rig:
        removals = asyncio.gather(*(remove(rig, "team/a") for _ in range(8)), return_exceptions=True)
        uploads = asyncio.gather(*(upload(rig, parts(f"team/{name}")) for name in "bcd"))
        found = await removals
        await uploads
    refused: list[Any] = [outcome for outcome in found if isinstance(outcome, Exception)]
    assert [reason_of(error) for error in refused] == ["ADAPTER_NOT_FOUND"] * 7
    assert sorted(os.listdir(root / "team")) == ["b", "c", "d"]


async def test_removals_take_the_scope_of_operators_and_are_logged(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    put_adapter(root / "a")
    tokens = tmp_path / "tokens.toml"
    scopes = {"alice": Scope.INFER, "operator": Scope.ADMIN}
    tokens.write_text("\n".join(line_for(name, f"kestrel_{name}", frozenset({scopes[name]})) for name in scopes))
    caplog.set_level("INFO", "kestrel_grpc")
    async with with_folder(root, tokens=str(tokens)) as rig:
        assert await refusal(remove(rig, "a", "alice")) == (Code.PERMISSION_DENIED, "SCOPE_REQUIRED")
        assert await refusal(remove(rig, "a")) == (Code.UNAUTHENTICATED, "TOKEN_INVALID")
        assert os.listdir(root) == ["a"]
        await remove(rig, "a", "operator")
        await refusal(remove(rig, "a", "operator"))
    lines: list[Any] = [record.args for record in caplog.records if record.name == "kestrel_grpc.audit"]
    assert [tuple(line.get(name) for name in ("tenant", "outcome", "adapter")) for line in lines] == [
        ("alice", "SCOPE_REQUIRED", None),
        (None, "TOKEN_INVALID", None),
        ("operator", "OK", "a"),
        ("operator", "ADAPTER_NOT_FOUND", "a"),
    ]


async def test_with_an_admin_port_removals_are_taken_there_alone(root: Path):
    put_adapter(root / "a")
    async with with_folder(root, admin_port=0) as rig:
        with pytest.raises(grpc.RpcError) as caught:
            await remove(rig, "a")
        error: Any = caught.value
        assert error.code() is Code.UNIMPLEMENTED
        async with AsyncClient(f"127.0.0.1:{rig.server.admin_port}") as client:
            assert await client.delete_adapter("a") == 0
    assert os.listdir(root) == []


async def test_a_caller_that_hangs_up_during_a_removal_leaves_the_engines_informed(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    is_removing, may_end = threading.Event(), threading.Event()
    true = adapter_folder.AdapterFolder.remove

    def held(self: Any, name: Any) -> None:
        is_removing.set()
        may_end.wait()
        true(self, name)

    monkeypatch.setattr(adapter_folder.AdapterFolder, "remove", held)
    put_adapter(root / "a")
    async with with_folder(root) as rig:
        call = rig.engine_service.DeleteAdapter(wire.DeleteAdapterRequest(name="a"))
        await asyncio.to_thread(is_removing.wait)
        call.cancel()
        may_end.set()
        await until(lambda: rig.engine.changed_adapters == ["a"])
    assert os.listdir(root) == []
