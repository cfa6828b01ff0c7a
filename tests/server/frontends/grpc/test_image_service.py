"""`ImageService` over the wire: what is stored can be named, and what fails leaves nothing behind."""

import asyncio
import hashlib
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kestrel_client.v1 import engine_service_pb2, image_service_pb2
from kestrel_client.v1 import vision_service_pb2 as vision_wire
from kestrel_client.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_grpc.access.token_file import Scope, line_for
from kestrel_grpc.images.image_index import BOOKKEEPING_BYTES
from tests.fakes import HOLD, FakeEngine, answers
from tests.journey.http2 import Http2Client, framed
from tests.server.serving import Serving, details_of, reason_of, serving

wire: Any = image_service_pb2
Code = grpc.StatusCode
MIB = 2**20
DATA = bytes(range(256)) * 10_000
UPLOAD, PUT = "/kestrel.v1.ImageService/UploadImage", "/kestrel.v1.ImageService/PutImage"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def id_of(data: bytes) -> str:
    return f"sha256:{digest(data)}"


def parts(data: bytes = DATA, *, chunk_bytes: int = MIB, **header: Any) -> Iterator[Any]:
    """The messages of an upload; `header` replaces what would be true."""
    values = {"sha256": digest(data), "size_bytes": len(data), **header}
    yield wire.UploadImageRequest(header=values)
    for start in range(0, len(data), chunk_bytes):
        yield wire.UploadImageRequest(chunk=data[start : start + chunk_bytes])


def stored(rig: Serving) -> tuple[int, int]:
    """Images in the store of a server, and the bytes that they count for."""
    store: Any = rig.server._store
    return store.index.usage.num_images, store.index.usage.num_bytes


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    error: Any = caught.value
    return error.code(), reason_of(error)


async def upload(rig: Serving, messages: Iterable[Any], name: str | None = None) -> Any:
    """What is stored by an upload. Asked by the blocking stub: where the server refuses while messages are still
    being written, that of asyncio loses the status."""

    def send() -> Any:
        with grpc.insecure_channel(rig.address) as channel:
            stub: Any = ImageServiceStub(channel)
            return stub.UploadImage(iter(messages), metadata=() if name is None else bearing(name)).image

    return await asyncio.to_thread(send)


async def ask(rig: Serving, image_id: str, **options: Any) -> Any:
    request = vision_wire.CompleteQueryRequest(question="?", image={"image_id": image_id})
    return await rig.vision.CompleteQuery(request, **options)


@pytest.mark.parametrize("chunk_bytes", [MIB, 1000])
async def test_an_upload_can_be_named_in_requests(chunk_bytes: int):
    async with serving() as rig:
        image = await upload(rig, parts(chunk_bytes=chunk_bytes))
        assert (image.image_id, image.size_bytes, image.pinned) == (id_of(DATA), len(DATA), False)
        assert (image.media_type, image.width_px, image.height_px) == ("image/png", 4, 3)
        assert (await ask(rig, image.image_id)).result.answer == "a kestrel"
        assert [request.images for request in rig.engine.requests] == [(DATA,)]


async def test_an_image_in_one_message_can_be_named_in_every_request():
    source = {"image_id": id_of(DATA)}
    async with serving() as rig:
        response = await rig.images.PutImage(wire.PutImageRequest(data=DATA, sha256=digest(DATA)))
        assert response.image.image_id == source["image_id"]
        await rig.vision.CompleteQuery(vision_wire.CompleteQueryRequest(question="?", image=source))
        await rig.vision.CompleteCaption(vision_wire.CompleteCaptionRequest(image=source))
        assert [event async for event in rig.vision.Query(vision_wire.QueryRequest(question="?", image=source))]
        assert [event async for event in rig.vision.Caption(vision_wire.CaptionRequest(image=source))]
        await rig.vision.Point(vision_wire.PointRequest(object="bird", image=source))
        await rig.vision.Detect(vision_wire.DetectRequest(object="bird", image=source))
        await rig.vision.Segment(vision_wire.SegmentRequest(object="bird", image=source))
        await rig.vision.Gaze(vision_wire.GazeRequest(eye={"x": 0.5, "y": 0.5}, image=source))
        assert [request.images for request in rig.engine.requests] == [(DATA,)] * 8


async def test_the_metadata_tells_what_is_stored_and_the_file_only_on_request():
    async with serving() as rig:
        put = await rig.images.PutImage(wire.PutImageRequest(data=DATA, ttl=Duration(seconds=120), pin=True))
        got = await rig.images.GetImage(wire.GetImageRequest(image_id=id_of(DATA)))
        assert got.data == b""
        assert got.image.pinned
        lifetime_s = got.image.expire_time.ToMilliseconds() / 1000
        assert abs(lifetime_s - put.image.expire_time.ToMilliseconds() / 1000) < 1.0
        got = await rig.images.GetImage(wire.GetImageRequest(image_id=id_of(DATA), include_data=True))
        assert got.data == DATA


@pytest.mark.parametrize("limit", [0, 1])
async def test_files_are_sent_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, limit: int):
    monkeypatch.setattr("kestrel_grpc.frontends.grpc.image_service._MAX_SENT_AT_ONCE", limit)
    request = wire.GetImageRequest(image_id=id_of(DATA), include_data=True)
    async with serving() as rig:
        await rig.images.PutImage(wire.PutImageRequest(data=DATA))
        assert (await rig.images.GetImage(wire.GetImageRequest(image_id=id_of(DATA)))).image.image_id
        if not limit:
            assert await refusal(rig.images.GetImage(request)) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
            return
        for _ in range(3):  # each gives back its place when its call is over
            assert (await rig.images.GetImage(request)).data == DATA
            await no_open_calls(rig)


async def test_a_deleted_image_is_gone():
    async with serving() as rig:
        await upload(rig, parts())
        await rig.images.DeleteImage(wire.DeleteImageRequest(image_id=id_of(DATA)))
        assert stored(rig) == (0, 0)
        assert rig.engine.cleared == [("", hashlib.sha256(DATA).digest())]
        for call in (
            ask(rig, id_of(DATA)),
            rig.images.GetImage(wire.GetImageRequest(image_id=id_of(DATA))),
            rig.images.DeleteImage(wire.DeleteImageRequest(image_id=id_of(DATA))),
        ):
            assert await refusal(call) == (Code.NOT_FOUND, "IMAGE_NOT_FOUND")


async def test_what_was_computed_from_an_image_can_be_deleted_though_it_is_not_stored():
    async with serving() as rig:
        call = rig.images.DeleteImage(wire.DeleteImageRequest(image_id=id_of(DATA)))
        assert await refusal(call) == (Code.NOT_FOUND, "IMAGE_NOT_FOUND")
        assert rig.engine.cleared == [("", hashlib.sha256(DATA).digest())]


async def test_a_miss_names_the_image():
    async with serving() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(rig, id_of(b"another"))
    resource: Any = details_of(caught.value)["ResourceInfo"]
    assert (resource.resource_type, resource.resource_name) == ("image", id_of(b"another"))


async def test_an_upload_of_a_stored_image_is_answered_from_its_header():
    async with serving() as rig:
        await upload(rig, parts())
        call = rig.images.UploadImage()
        await call.write(next(parts(pin=True)))
        image = (await call).image  # although no byte of it has been sent
        assert (image.image_id, image.pinned) == (id_of(DATA), True)
        assert stored(rig) == (1, len(DATA) + BOOKKEEPING_BYTES)


BROKEN = b"broken file"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (lambda: parts(sha256=digest(b"another")), "IMAGE_DIGEST_MISMATCH"),
        (lambda: parts(size_bytes=len(DATA) + 1), "IMAGE_SIZE_MISMATCH"),
        (lambda: parts(size_bytes=len(DATA) - 1), "IMAGE_SIZE_MISMATCH"),
        (lambda: parts(size_bytes=33 * MIB), "IMAGE_TOO_LARGE"),
        (lambda: parts(BROKEN), "IMAGE_DECODE_FAILED"),
        (lambda: parts(size_bytes=0), "INVALID_REQUEST"),
        (lambda: parts(sha256="ABC"), "INVALID_REQUEST"),
        (lambda: parts(ttl=Duration(seconds=-1)), "INVALID_REQUEST"),
        (lambda: parts(ttl=Duration(seconds=1, nanos=-1)), "INVALID_REQUEST"),
        (lambda: iter(list(parts())[1:]), "INVALID_REQUEST"),
        (lambda: iter([*parts(), next(parts())]), "INVALID_REQUEST"),
        (lambda: parts(chunk_bytes=2 * MIB), "INVALID_REQUEST"),
        (lambda: iter([next(parts()), wire.UploadImageRequest(chunk=b"")]), "INVALID_REQUEST"),
        (lambda: iter([next(parts()), wire.UploadImageRequest()]), "INVALID_REQUEST"),
        (lambda: iter([next(parts())]), "IMAGE_SIZE_MISMATCH"),
        (lambda: iter([]), "INVALID_REQUEST"),
    ],
)
async def test_a_wrong_upload_is_refused_as_documented_and_leaves_nothing(messages: Any, reason: str):
    async with serving() as rig:
        assert await refusal(upload(rig, messages())) == (Code.INVALID_ARGUMENT, reason)
        assert stored(rig) == (0, 0)


async def test_every_violation_of_a_header_is_told():
    async with serving() as rig:
        with pytest.raises(grpc.RpcError) as caught:
            await upload(rig, parts(sha256="", size_bytes=-1, ttl=Duration()))
    error: Any = caught.value
    found: Any = details_of(error)["BadRequest"]
    fields = [violation.field for violation in found.field_violations]
    assert fields == ["header.sha256", "header.size_bytes", "header.ttl"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"data": DATA, "sha256": digest(b"another")}, "IMAGE_DIGEST_MISMATCH"),
        ({"data": BROKEN}, "IMAGE_DECODE_FAILED"),
        ({"data": bytes(33 * MIB)}, "IMAGE_TOO_LARGE"),
        ({}, "INVALID_REQUEST"),
        ({"data": DATA, "sha256": "x"}, "INVALID_REQUEST"),
        ({"data": DATA, "ttl": Duration()}, "INVALID_REQUEST"),
    ],
)
async def test_a_wrong_image_in_one_message_is_refused_as_documented(fields: Any, reason: str):
    async with serving() as rig:
        call = rig.images.PutImage(wire.PutImageRequest(**fields))
        assert await refusal(call) == (Code.INVALID_ARGUMENT, reason)
        assert stored(rig) == (0, 0)


@pytest.mark.parametrize("image_id", ["", "sha256:", "sha256:abc", digest(DATA), f"SHA256:{digest(DATA)}"])
async def test_what_names_no_image_is_the_callers_fault(image_id: str):
    async with serving() as rig:
        for call in (
            ask(rig, image_id),
            rig.images.GetImage(wire.GetImageRequest(image_id=image_id)),
            rig.images.DeleteImage(wire.DeleteImageRequest(image_id=image_id)),
        ):
            assert await refusal(call) == (Code.INVALID_ARGUMENT, "INVALID_REQUEST")


async def test_a_malformed_image_id_is_told_with_every_other_violation():
    async with serving() as rig:
        request = vision_wire.CompleteQueryRequest(image={"image_id": "cat"}, sampling={"top_p": 7})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.vision.CompleteQuery(request)
    found: Any = details_of(caught.value)["BadRequest"]
    fields = {violation.field for violation in found.field_violations}
    assert fields == {"image.image_id", "question", "sampling.top_p"}


async def test_an_upload_beyond_the_quota_is_refused_from_its_header():
    async with serving(image_quota_bytes=MIB) as rig:
        call = rig.images.UploadImage()
        await call.write(next(parts()))
        assert await refusal(call) == (Code.RESOURCE_EXHAUSTED, "IMAGE_QUOTA_EXCEEDED")
        call = rig.images.PutImage(wire.PutImageRequest(data=DATA))
        assert await refusal(call) == (Code.RESOURCE_EXHAUSTED, "IMAGE_QUOTA_EXCEEDED")
        assert stored(rig) == (0, 0)


async def test_pinned_images_of_others_leave_no_room_and_the_caller_is_told_when_to_come_again():
    async with serving(max_stored_image_bytes=4 * MIB, image_quota_bytes=9 * MIB) as rig:
        await rig.images.PutImage(wire.PutImageRequest(data=DATA, pin=True))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.images.PutImage(wire.PutImageRequest(data=DATA[1:]))
        assert (caught.value.code(), reason_of(caught.value)) == (Code.RESOURCE_EXHAUSTED, "IMAGE_STORE_FULL")
        assert "RetryInfo" in details_of(caught.value)


async def test_an_upload_that_is_cancelled_leaves_nothing():
    async with serving() as rig:
        call = rig.images.UploadImage()
        for part in list(parts())[:2]:
            await call.write(part)
        call.cancel()
        await no_open_calls(rig)
        assert stored(rig) == (0, 0)


async def test_an_upload_whose_client_vanishes_leaves_nothing():
    async with serving() as rig:
        async with Http2Client.connected(rig.address) as client:
            stream = await client.begin(UPLOAD)
            await client.send(stream, b"".join(framed(part) for part in list(parts(DATA[:100_000]))[:1]))
            await client.send(stream, framed(wire.UploadImageRequest(chunk=DATA[:10_000])))
        await no_open_calls(rig)
        assert stored(rig) == (0, 0)


async def test_an_upload_that_does_not_end_is_ended():
    async with serving(receive_timeout=1.0) as rig:
        call = rig.images.UploadImage()
        for part in list(parts())[:2]:
            await call.write(part)
        assert await refusal(call) == (Code.DEADLINE_EXCEEDED, "MESSAGE_TIMEOUT")
        assert stored(rig) == (0, 0)


async def test_an_upload_that_comes_byte_by_byte_is_ended_all_the_same():
    def trickle() -> Iterator[Any]:
        yield next(parts())
        for byte in DATA:
            time.sleep(0.01)
            yield wire.UploadImageRequest(chunk=bytes([byte]))

    async with serving(receive_timeout=0.3) as rig:
        assert await refusal(upload(rig, trickle())) == (Code.DEADLINE_EXCEEDED, "MESSAGE_TIMEOUT")
        assert stored(rig) == (0, 0)


async def test_uploads_that_stall_delay_no_other_call():
    async with serving() as rig, Http2Client.connected(rig.address) as client:
        for _ in range(50):
            stream = await client.begin(UPLOAD)
            await client.send(stream, framed(next(parts())))
        async with asyncio.timeout(60):
            for _ in range(3):
                response = await rig.vision.CompleteQuery(vision_wire.CompleteQueryRequest(question="?"))
                assert response.result.answer == "a kestrel"
            assert (await rig.images.PutImage(wire.PutImageRequest(data=DATA))).image.image_id == id_of(DATA)


async def test_uploads_that_stall_while_others_wait_are_refused_as_documented():
    async with serving(receive_timeout=1.0) as rig, Http2Client.connected(rig.address) as client:
        streams = [await client.begin(UPLOAD) for _ in range(12)]
        for stream in streams:
            await client.send(stream, framed(next(parts())))
        found: dict[int, str] = {}
        async with asyncio.timeout(60):
            async for event in client.events():
                fields = dict(getattr(event, "headers", None) or ())
                if "grpc-status" in fields:
                    found[getattr(event, "stream_id", 0)] = fields["grpc-status"]
                if len(found) == len(streams):
                    break
        exhausted, exceeded = (str(code.value[0]) for code in (Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED))
        assert {exhausted} <= set(found.values()) <= {exhausted, exceeded}
        assert stored(rig) == (0, 0)


async def test_many_uploads_at_a_time_are_all_stored():
    images = [DATA[index:] for index in range(32)]
    async with serving() as rig:
        found = await asyncio.gather(*(upload(rig, parts(data)) for data in images))
        assert [image.image_id for image in found] == [id_of(data) for data in images]
        assert stored(rig) == (32, sum(map(len, images)) + 32 * BOOKKEEPING_BYTES)


async def purged(rig: Serving) -> None:
    """Wait until the engine has dropped all that it is to drop."""
    await rig.server._purges.done()


async def no_open_calls(rig: Serving) -> None:
    """Wait until the server has noticed that its calls have ended."""
    async with asyncio.timeout(60):
        await rig.server._groups.ended()


async def test_an_image_that_is_deleted_or_expires_while_its_request_waits_is_answered_about():
    def waits(request: Any) -> Sequence[object]:
        return [HOLD, *answers(request)]

    async with serving(FakeEngine(waits)) as rig:
        await rig.images.PutImage(wire.PutImageRequest(data=DATA))
        call = asyncio.ensure_future(ask(rig, id_of(DATA)))
        await rig.engine.num_submitted.acquire()
        await rig.images.DeleteImage(wire.DeleteImageRequest(image_id=id_of(DATA)))
        rig.engine.release()
        assert (await call).result.answer == "a kestrel"
        assert [request.images for request in rig.engine.requests] == [(DATA,)]


async def test_an_image_expires():
    async with serving() as rig:
        await rig.images.PutImage(wire.PutImageRequest(data=DATA, ttl=Duration(nanos=1)))
        assert await refusal(ask(rig, id_of(DATA))) == (Code.NOT_FOUND, "IMAGE_NOT_FOUND")
        store: Any = rig.server._store
        store.index.expire()
        await purged(rig)
        assert rig.engine.cleared == [("", hashlib.sha256(DATA).digest())]
        assert stored(rig) == (0, 0)


async def test_a_server_that_stores_no_images_says_so():
    async with serving(max_stored_image_bytes=0) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.images.PutImage(wire.PutImageRequest(data=DATA))
        assert caught.value.code() is Code.UNIMPLEMENTED
        assert await refusal(ask(rig, id_of(DATA))) == (Code.NOT_FOUND, "IMAGE_NOT_FOUND")
        info = await rig.engine_service.GetServerInfo(engine_service_pb2.GetServerInfoRequest())
        assert "images" not in info.capabilities


async def test_a_server_that_stores_images_says_so():
    async with serving() as rig:
        info = await rig.engine_service.GetServerInfo(engine_service_pb2.GetServerInfoRequest())
    assert "images" in info.capabilities


@pytest.mark.one_process("the test tells the engine, not the server's side of it")
async def test_a_server_that_drains_stores_nothing_more():
    async with serving() as rig:
        await rig.engine.drain()
        for call in (rig.images.PutImage(wire.PutImageRequest(data=DATA)), upload(rig, parts())):
            code, reason = await refusal(call)
            assert (code, reason) == (Code.UNAVAILABLE, "DRAINING")


SECRETS = {"alice": "kestrel_alice", "bob": "kestrel_bob", "carol": "kestrel_carol", "reader": "kestrel_reader"}


def bearing(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {SECRETS[name]}"),)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    write_tokens(path, "alice", "bob", "carol", "reader")
    return path


def write_tokens(path: Path, *names: str) -> None:
    """Carol and the reader share a namespace, and the reader may not store."""
    lines: list[str] = []
    for name in names:
        scopes = {Scope.INFER} if name == "reader" else {Scope.INFER, Scope.IMAGES}
        shared = ', namespace = "cameras" }' if name in ("carol", "reader") else " }"
        lines.append(line_for(name, SECRETS[name], frozenset(scopes)).replace(" }", shared))
    path.write_text("\n".join(lines))


async def test_the_image_of_another_token_does_not_exist(tokens: Path):
    async with serving(tokens=str(tokens)) as rig:
        await rig.images.PutImage(wire.PutImageRequest(data=DATA), metadata=bearing("alice"))
        assert (await ask(rig, id_of(DATA), metadata=bearing("alice"))).result.answer
        for call in (
            ask(rig, id_of(DATA), metadata=bearing("bob")),
            rig.images.GetImage(wire.GetImageRequest(image_id=id_of(DATA)), metadata=bearing("bob")),
            rig.images.DeleteImage(wire.DeleteImageRequest(image_id=id_of(DATA)), metadata=bearing("bob")),
        ):
            assert await refusal(call) == (Code.NOT_FOUND, "IMAGE_NOT_FOUND")
        # The header of an upload does not tell either whether others have stored the image.
        assert await refusal(upload(rig, [next(parts())], "bob")) == (Code.INVALID_ARGUMENT, "IMAGE_SIZE_MISMATCH")


async def test_tokens_of_one_namespace_share_images(tokens: Path):
    async with serving(tokens=str(tokens)) as rig:
        await rig.images.PutImage(wire.PutImageRequest(data=DATA), metadata=bearing("carol"))
        assert (await ask(rig, id_of(DATA), metadata=bearing("reader"))).result.answer


async def test_storing_takes_its_own_scope(tokens: Path):
    async with serving(tokens=str(tokens)) as rig:
        call = rig.images.PutImage(wire.PutImageRequest(data=DATA), metadata=bearing("reader"))
        assert await refusal(call) == (Code.PERMISSION_DENIED, "SCOPE_REQUIRED")


@pytest.mark.parametrize("method", [UPLOAD, PUT])
@pytest.mark.parametrize(("bearer", "code"), [("kestrel_eve", 16), ("kestrel_reader", 7)])
async def test_who_may_not_store_is_refused_before_anything_is_received(
    tokens: Path, method: str, bearer: str, code: int
):
    async with serving(tokens=str(tokens)) as rig, Http2Client.connected(rig.address) as client:
        stream = await client.begin(method, authorization=f"Bearer {bearer}")
        await client.send(stream, struct.pack(">BI", 0, 40 * MIB))
        _, trailers = await client.read(stream)
    assert int(trailers["grpc-status"]) == code


async def test_images_of_a_token_that_is_taken_back_are_dropped(tokens: Path):
    async with serving(tokens=str(tokens)) as rig:
        for name in ("alice", "bob", "carol"):
            await rig.images.PutImage(wire.PutImageRequest(data=DATA), metadata=bearing(name))
        write_tokens(tokens, "bob", "reader")
        access: Any = rig.server._access
        await access.reload()
        await purged(rig)
        assert rig.engine.cleared == [("token:alice", None)]
        assert stored(rig)[0] == 2  # Bob's, and Carol's for the reader, who shares her namespace
        assert (await ask(rig, id_of(DATA), metadata=bearing("reader"))).result.answer


async def test_one_token_gets_half_of_the_memory(tokens: Path):
    async with serving(tokens=str(tokens), max_stored_image_bytes=4 * MIB) as rig:
        call = rig.images.PutImage(wire.PutImageRequest(data=DATA), metadata=bearing("alice"))
        assert await refusal(call) == (Code.RESOURCE_EXHAUSTED, "IMAGE_QUOTA_EXCEEDED")
