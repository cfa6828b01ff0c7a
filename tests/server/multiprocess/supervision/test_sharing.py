"""Two front ends hold as one what callers may use, store and ask for."""

import asyncio
import hashlib
import os
import random
import struct
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kestrel_client.v1 import engine_service_pb2, image_service_pb2, media_pb2, vision_service_pb2
from kestrel_grpc.access.limits import RateLimited, TokenLimit, TokenLimits
from kestrel_grpc.access.token_file import Scope, line_for
from kestrel_grpc.frontends.triton.v2 import grpc_service_pb2 as triton_wire
from kestrel_grpc.images.stored_images import ImageHandle, ImageNotFound, ImageStoreFull, Retention, StoredImage
from kestrel_grpc.multiprocess.protocol.errors import SupervisorUnavailable
from kestrel_grpc.multiprocess.protocol.messages import AskOne, EnterCall, FindImage, LeaveCall
from kestrel_grpc.multiprocess.supervision import frontend_questions as front_ends
from kestrel_grpc.multiprocess.supervision import stored_images
from kestrel_grpc.multiprocess.supervision.stored_images import SharedImages
from kestrel_grpc.multiprocess.supervision.token_limits import SharedLimits
from kestrel_runtime.api.engine import ImageInfo
from kestrel_runtime.api.images import HashedImage
from tests.fakes import HOLD, answers
from tests.server.certificates import replace
from tests.server.multiprocess.supervision.sharing import Core, Rig, linked, sharing
from tests.server.serving import Serving, reason_of
from tests.server.triton_calls import TritonStub, query

Code = grpc.StatusCode
SECRETS = {"alice": "kestrel_alice", "bob": "kestrel_bob"}
ALICE = (("authorization", f"Bearer {SECRETS['alice']}"),)
BOB = (("authorization", f"Bearer {SECRETS['bob']}"),)
ALL_SCOPES = frozenset(Scope)
DATA = b"\x89PNG\r\n\x1a\n" + b"an encoded image"
HANDLE = ImageHandle(hashlib.sha256(DATA).hexdigest())
IMAGE_ID = str(HANDLE)
QUERY = vision_service_pb2.CompleteQueryRequest(question="?")
LIMIT = TokenLimit("alice", bytes(32), None, 1, 1)
INFO = ImageInfo("image/png", 4, 3)


def write_tokens(path: Path, limits: str = "", names: Sequence[str] = tuple(SECRETS)) -> None:
    lines = (line_for(name, SECRETS[name], ALL_SCOPES).replace(" }", f"{limits} }}") for name in names)
    replace(path, "\n".join(lines).encode())


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    write_tokens(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "private"
    path.mkdir(mode=0o700)
    return path


def waits(request: Any) -> list[object]:
    """A script that answers once the engine is released."""
    return [HOLD, *answers(request)]


async def outcome(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return reason_of(error)
    return "OK"


async def store(server: Serving, metadata: Any = (), **fields: Any) -> str:
    return await outcome(
        server.images.PutImage(image_service_pb2.PutImageRequest(data=DATA, **fields), metadata=metadata)
    )


async def ask_about_image(server: Serving, metadata: Any = ()) -> str:
    request = vision_service_pb2.CompleteQueryRequest(question="?", image=media_pb2.Image(image_id=IMAGE_ID))
    return await outcome(server.vision.CompleteQuery(request, metadata=metadata))


# Limits of tokens


async def test_a_rate_holds_exactly_for_all_front_ends_together(tokens: Path, folder: Path) -> None:
    write_tokens(tokens, ", rate = 0.001, burst = 25")
    async with sharing(folder, tokens=str(tokens)) as rig:
        calls = [outcome(rig.servers[n % 2].vision.CompleteQuery(QUERY, metadata=ALICE)) for n in range(60)]
        assert Counter(await asyncio.gather(*calls)) == {"OK": 25, "RATE_LIMITED": 35}
        # Another token has its own.
        assert await outcome(rig.servers[0].vision.CompleteQuery(QUERY, metadata=BOB)) == "OK"


async def test_calls_at_a_time_hold_exactly_for_all_front_ends_together(tokens: Path, folder: Path) -> None:
    write_tokens(tokens, ", concurrency = 6")
    engine = Core(waits)
    async with sharing(folder, engine, tokens=str(tokens)) as rig:
        calls = [
            asyncio.ensure_future(outcome(rig.servers[n % 2].vision.CompleteQuery(QUERY, metadata=ALICE)))
            for n in range(20)
        ]
        refused: list[str] = []
        for call in asyncio.as_completed(calls):
            refused.append(await call)
            if len(refused) == 14:
                break
        assert refused == ["RATE_LIMITED"] * 14
        assert len(engine.requests) == 6
        engine.release()
        await asyncio.gather(*calls)
        # The ends of calls are told, not asked: the owner has heard of them before the next question.
        assert [await admitted(rig, n % 2) for n in range(6)] == [True] * 6


async def reload(rig: Rig) -> None:
    """All front ends read the file of tokens."""
    for server in rig.servers:
        access: Any = server.server._access
        await access.reload()


async def admitted(rig: Rig, index: int) -> bool:
    return await outcome(rig.servers[index].vision.CompleteQuery(QUERY, metadata=ALICE)) == "OK"


async def test_a_front_end_that_dies_gives_its_places_back(tokens: Path, folder: Path) -> None:
    write_tokens(tokens, ", concurrency = 2")
    engine = Core(waits)
    async with sharing(folder, engine, tokens=str(tokens)) as rig:
        calls = [
            asyncio.ensure_future(outcome(rig.servers[0].vision.CompleteQuery(QUERY, metadata=ALICE))) for _ in "ab"
        ]
        for _ in calls:
            await engine.num_submitted.acquire()
        assert await outcome(rig.servers[1].vision.CompleteQuery(QUERY, metadata=ALICE)) == "RATE_LIMITED"
        rig.end(0)
        last = asyncio.ensure_future(outcome(rig.servers[1].vision.CompleteQuery(QUERY, metadata=ALICE)))
        await engine.num_submitted.acquire()
        engine.release()
        await last
        await asyncio.gather(*calls)


@pytest.mark.parametrize("seed", range(4))
async def test_whoever_gives_up_dies_or_leaves_no_place_is_lost_and_none_is_given_twice(
    tokens: Path, folder: Path, seed: int
) -> None:
    chance = random.Random(seed)
    limit = TokenLimit("alice", bytes(32), None, 1, 5)
    held: Counter[int] = Counter()

    async def turns(most: int) -> None:
        for _ in range(chance.randrange(most)):
            await asyncio.sleep(0)

    async def call(index: int, limits: SharedLimits) -> None:
        await turns(200)
        try:
            place = await limits.enter(limit)
        except RateLimited:
            return
        held[index] += 1
        assert sum(held.values()) <= 5
        try:
            await turns(20)
        finally:
            held[index] -= 1
            place.leave()

    async with sharing(folder, num=3, tokens=str(tokens)) as rig:
        calls = [asyncio.ensure_future(call(n % 3, rig.hosts[n % 3].limits)) for n in range(300)]
        for one in calls[::4]:
            await turns(10)
            one.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert not [error for error in ended if isinstance(error, Exception)]
        for _ in range(5):
            await rig.hosts[0].limits.enter(limit)
        for host in rig.hosts:
            with pytest.raises(RateLimited):
                await host.limits.enter(limit)
        rig.end(0)
        for _ in range(5):
            await rig.hosts[1].limits.enter(limit)
        with pytest.raises(RateLimited):
            await rig.hosts[2].limits.enter(limit)


async def test_what_a_front_end_asked_before_its_end_takes_no_place_after_it(tokens: Path, folder: Path) -> None:
    async with sharing(folder, tokens=str(tokens)) as rig:
        rig.owner.drop(rig.hosts[0].identity)
        with pytest.raises(RateLimited):
            await rig.hosts[0].limits.enter(LIMIT)
        rig.hosts[0].limits.adopt(LIMIT)
        rig.hosts[0].peers.take_part()
        with pytest.raises(ImageNotFound):  # what was told before is done when a question is answered
            await rig.hosts[0].images.find("", HANDLE)
        (await rig.hosts[1].limits.enter(LIMIT)).leave()
        assert await rig.hosts[1].peers.ask("cancel requests", b"") == []


async def test_nobody_is_admitted_where_the_supervisor_is_gone_and_tokens_without_limits_are(
    tokens: Path, folder: Path
) -> None:
    alice = line_for("alice", SECRETS["alice"], ALL_SCOPES).replace(" }", ", rate = 1000 }")
    replace(tokens, f"{alice}\n{line_for('bob', SECRETS['bob'], ALL_SCOPES)}".encode())
    async with sharing(folder, tokens=str(tokens)) as rig:
        rig.hosts[0].owners_link.close()
        await asyncio.shield(rig.hosts[0].link.closed)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.servers[0].vision.CompleteQuery(QUERY, metadata=ALICE)
        assert (caught.value.code(), reason_of(caught.value)) == (Code.UNAVAILABLE, "ENGINE_UNAVAILABLE")
        assert await outcome(rig.servers[0].vision.CompleteQuery(QUERY, metadata=BOB)) == "OK"
        assert await outcome(rig.servers[1].vision.CompleteQuery(QUERY, metadata=ALICE)) == "OK"


async def test_a_call_that_gave_up_waiting_for_an_answer_has_no_place(folder: Path) -> None:
    async with linked("frontend-0.1", "the supervisor") as (ours, theirs, start):
        taken, left = asyncio.Event(), asyncio.Event()
        limits = TokenLimits()
        places: dict[int, Any] = {}

        async def enter_late(question: EnterCall) -> None:
            places[question.number] = limits.take(question.limit)
            taken.set()
            return await asyncio.get_running_loop().create_future()

        def leave(note: LeaveCall) -> None:
            places.pop(note.number).leave()
            left.set()

        ours.on(EnterCall, enter_late)
        ours.on(LeaveCall, leave)
        await start()
        began = time.monotonic()
        with pytest.raises(SupervisorUnavailable):
            await SharedLimits(theirs).enter(LIMIT)
        assert time.monotonic() - began < 60
        await left.wait()
        assert limits.take(LIMIT)


async def test_a_call_that_is_cancelled_while_it_asks_has_no_place(tokens: Path, folder: Path) -> None:
    async with sharing(folder, tokens=str(tokens)) as rig:
        limits = rig.hosts[0].limits
        asking = asyncio.ensure_future(limits.enter(LIMIT))
        await asyncio.sleep(0)  # the question is on its way, and cannot be answered yet
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        place = await limits.enter(LIMIT)
        place.leave()
        other = await rig.hosts[1].limits.enter(LIMIT)
        other.leave()


async def test_a_new_limit_counts_the_calls_that_run_on_all_front_ends(tokens: Path, folder: Path) -> None:
    engine = Core(waits)
    async with sharing(folder, engine, tokens=str(tokens)) as rig:
        calls = [
            asyncio.ensure_future(outcome(server.vision.CompleteQuery(QUERY, metadata=ALICE)))
            for server in rig.servers
        ]
        for _ in calls:
            await engine.num_submitted.acquire()
        write_tokens(tokens, ", concurrency = 2")
        await reload(rig)
        assert [await admitted(rig, n) for n in range(2)] == [False] * 2
        engine.release()
        await asyncio.gather(*calls)
        assert await admitted(rig, 0)


# Load


async def test_the_load_lists_every_front_end_with_the_requests_that_it_has_open(folder: Path) -> None:
    async with sharing(folder, Core(waits), num=3) as rig:
        call = asyncio.ensure_future(outcome(rig.servers[1].vision.CompleteQuery(QUERY)))
        await rig.core.num_submitted.acquire()
        for server in rig.servers:
            told = await server.engine_service.GetLoad(engine_service_pb2.GetLoadRequest())
            assert [(one.name, one.open_request_count) for one in told.frontends] == [
                *(("frontend-0", 0), ("frontend-1", 1), ("frontend-2", 0))
            ]
            info = await server.engine_service.GetServerInfo(engine_service_pb2.GetServerInfoRequest())
            assert info.frontend_count == 3
        rig.core.release()
        assert await call == "OK"


async def test_the_load_lists_the_front_ends_that_answer_where_another_cannot(folder: Path) -> None:
    async with sharing(folder, num=3) as rig:
        rig.hosts[1].peers.answer("load", lambda _: bytes(1 // 0))
        told = await rig.servers[0].engine_service.GetLoad(engine_service_pb2.GetLoadRequest())
        assert told.load.page_count == rig.core.load().num_pages
        assert [one.name for one in told.frontends] == ["frontend-0", "frontend-2"]


async def test_usage_is_the_sum_of_all_front_ends(tokens: Path, folder: Path) -> None:
    async with sharing(folder, num=3, tokens=str(tokens)) as rig:
        for server in (*rig.servers, rig.servers[0]):
            assert await outcome(server.vision.CompleteQuery(QUERY, metadata=ALICE)) == "OK"
        assert await outcome(rig.servers[2].vision.CompleteQuery(QUERY)) == "TOKEN_INVALID"
        for server in rig.servers:
            told = await server.engine_service.GetUsage(engine_service_pb2.GetUsageRequest(), metadata=BOB)
            counted = [(one.token, one.answered_request_count, one.refused_request_count) for one in told.callers]
            assert counted == [("", 0, 1), ("alice", 4, 0)]
            assert told.callers[1].output_token_count == 4 * 3


async def usage_of_alice(server: Serving) -> int:
    told = await server.engine_service.GetUsage(engine_service_pb2.GetUsageRequest(), metadata=BOB)
    return {one.token: one.answered_request_count for one in told.callers}["alice"]


async def test_usage_outlives_the_front_end_that_counted_it(tokens: Path, folder: Path) -> None:
    async with sharing(folder, num=3, tokens=str(tokens)) as rig:
        for server in rig.servers:
            assert await outcome(server.vision.CompleteQuery(QUERY, metadata=ALICE)) == "OK"
        assert await usage_of_alice(rig.servers[2]) == 3
        # Nothing has reported this one when its front end dies.
        assert await outcome(rig.servers[0].vision.CompleteQuery(QUERY, metadata=ALICE)) == "OK"
        for index in range(2):
            rig.end(index)
            assert await usage_of_alice(rig.servers[2]) == 3


async def test_the_supervisor_asks_for_usage_by_itself(
    tokens: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_ends, "KEEP_INTERVAL_S", 0.001)
    async with sharing(folder, tokens=str(tokens)) as rig:
        assert await outcome(rig.servers[0].vision.CompleteQuery(QUERY, metadata=ALICE)) == "OK"
        num_asked = asyncio.Semaphore(0)
        answer = rig.hosts[0].peers._answers["usage"]

        def counted(question: bytes) -> bytes:
            num_asked.release()
            return answer(question)

        rig.hosts[0].peers.answer("usage", counted)
        watching = asyncio.create_task(rig.owner.front_ends.watch())
        for _ in range(2):  # the first answer has arrived when the second question is asked
            await num_asked.acquire()
        watching.cancel()
        rig.end(0)
        assert await usage_of_alice(rig.servers[1]) == 1


async def test_usage_that_is_asked_for_while_a_front_end_dies_counts_once(tokens: Path, folder: Path) -> None:
    async with sharing(folder, tokens=str(tokens)) as rig:
        assert await outcome(rig.servers[0].vision.CompleteQuery(QUERY, metadata=ALICE)) == "OK"
        assert await usage_of_alice(rig.servers[1]) == 1
        answer = rig.hosts[0].peers._answers["usage"]

        def dies(question: bytes) -> bytes:
            rig.end(0)
            return answer(question)

        rig.hosts[0].peers.answer("usage", dies)
        assert await usage_of_alice(rig.servers[1]) == 1
        assert await usage_of_alice(rig.servers[1]) == 1


# Stored images


async def test_an_image_that_one_front_end_stores_is_used_by_the_other(folder: Path) -> None:
    async with sharing(folder) as rig:
        one, other = rig.servers
        assert await store(one) == "OK"
        assert await ask_about_image(other) == "OK"
        assert rig.core.requests[-1].images == (DATA,)
        answer = await other.images.GetImage(
            image_service_pb2.GetImageRequest(image_id=IMAGE_ID, include_data=True)
        )
        assert (answer.data, answer.image.size_bytes) == (DATA, len(DATA))
        assert rig.owner.images.load().num_hits == 2


async def test_an_image_that_is_deleted_is_gone_on_every_front_end_at_once(folder: Path) -> None:
    async with sharing(folder) as rig:
        one, other = rig.servers
        await store(one)
        assert await ask_about_image(other) == "OK"
        await other.images.DeleteImage(image_service_pb2.DeleteImageRequest(image_id=IMAGE_ID))
        assert [await ask_about_image(server) for server in rig.servers] == ["IMAGE_NOT_FOUND"] * 2
        assert rig.core.cleared == [("", bytes.fromhex(HANDLE.sha256))]
        assert list((folder / "images").iterdir()) == []


async def test_an_image_that_expires_is_gone_on_every_front_end_and_forgotten_by_the_cores(folder: Path) -> None:
    async with sharing(folder) as rig:
        await store(rig.servers[0], ttl=Duration(nanos=1))
        assert [await ask_about_image(server) for server in rig.servers] == ["IMAGE_NOT_FOUND"] * 2
        await rig.core.has_cleared.wait()
        assert rig.core.cleared == [("", bytes.fromhex(HANDLE.sha256))]
        assert list((folder / "images").iterdir()) == []


async def test_namespaces_share_nothing_on_any_front_end(tokens: Path, folder: Path) -> None:
    async with sharing(folder, tokens=str(tokens)) as rig:
        one, other = rig.servers
        assert await store(one, ALICE) == "OK"
        for server in rig.servers:
            assert await ask_about_image(server, BOB) == "IMAGE_NOT_FOUND"
        assert await store(other, BOB) == "OK"
        request = image_service_pb2.DeleteImageRequest(image_id=IMAGE_ID)
        assert await outcome(one.images.DeleteImage(request, metadata=BOB)) == "OK"
        for server in rig.servers:
            assert await ask_about_image(server, BOB) == "IMAGE_NOT_FOUND"
            assert await ask_about_image(server, ALICE) == "OK"


async def test_the_quota_of_a_namespace_holds_for_all_front_ends_together(folder: Path) -> None:
    kib = 1024
    async with sharing(folder, max_stored_image_bytes=64 * kib, image_quota_bytes=20 * kib) as rig:

        async def put(index: int) -> str:
            data = DATA + struct.pack(">I", index).ljust(3 * kib)
            request = image_service_pb2.PutImageRequest(data=data, pin=True)
            return await outcome(rig.servers[index % 2].images.PutImage(request))

        found = Counter(await asyncio.gather(*(put(index) for index in range(12))))
        assert found == {"OK": 4, "IMAGE_QUOTA_EXCEEDED": 8}
        assert len(list((folder / "images").iterdir())) == 4
        assert list((folder / "incoming").iterdir()) == []
        assert rig.owner.images.load().used_bytes <= 20 * kib


async def test_front_ends_that_store_one_image_at_once_store_one_file(folder: Path) -> None:
    async with sharing(folder) as rig:
        assert await asyncio.gather(*(store(rig.servers[n % 2], pin=n == 3) for n in range(8))) == ["OK"] * 8
        assert len(list((folder / "images").iterdir())) == 1
        request = image_service_pb2.GetImageRequest(image_id=IMAGE_ID)
        answers = [await server.images.GetImage(request) for server in rig.servers]
        assert [answer.image.pinned for answer in answers] == [True, True]


async def test_files_can_be_read_by_their_owner_alone(folder: Path) -> None:
    async with sharing(folder) as rig:
        await store(rig.servers[0])
        for path in (folder / "images", folder / "incoming"):
            assert path.stat().st_mode & 0o777 == 0o700


async def test_a_large_image_is_read_as_it_was_stored(folder: Path) -> None:
    data = DATA + bytes(range(256)) * 8192
    handle = ImageHandle(hashlib.sha256(data).hexdigest())
    async with sharing(folder) as rig:
        one, other = (host.images for host in rig.hosts)
        await one.put("a", handle, data, INFO, Retention())
        file = await other.read("a", await other.find("a", handle))
        assert (bytes(file), file.sha256.hex()) == (data, handle.sha256)


async def test_requests_about_one_image_share_its_bytes_while_it_is_stored(folder: Path) -> None:
    data = DATA + bytes(2**20)
    handle = ImageHandle(hashlib.sha256(data).hexdigest())
    async with sharing(folder) as rig:
        one, other = (host.images for host in rig.hosts)
        image = await one.put("a", handle, data, INFO, Retention())
        files = await asyncio.gather(*(other.read("a", image) for _ in range(8)))
        assert {id(file) for file in files} == {id(await other.read("a", image))}
        await one.delete("a", handle)
        with pytest.raises(ImageNotFound):  # it has been told before that the image has left
            await other.find("a", handle)
        with pytest.raises(ImageNotFound):
            await other.read("a", image)


async def test_an_image_that_leaves_while_it_is_read_is_not_kept(folder: Path) -> None:
    data = DATA + bytes(2**20)
    handle = ImageHandle(hashlib.sha256(data).hexdigest())
    async with sharing(folder) as rig:
        one, other = (host.images for host in rig.hosts)
        image = await one.put("a", handle, data, INFO, Retention())
        found, _ = await asyncio.gather(other.read("a", image), one.delete("a", handle), return_exceptions=True)
        assert found == data or isinstance(found, ImageNotFound)
        with pytest.raises(ImageNotFound):  # it has been told before that the image has left
            await other.find("a", handle)
        with pytest.raises(ImageNotFound):
            await other.read("a", image)


async def test_a_front_end_keeps_a_bounded_number_of_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_images, "MAX_RECENT_BYTES", 3000)
    async with sharing(folder) as rig:
        images = rig.hosts[0].images

        async def new_file(index: int) -> tuple[StoredImage, HashedImage]:
            data = DATA.ljust(1000) + bytes([index])
            handle = ImageHandle(hashlib.sha256(data).hexdigest())
            image = await images.put("a", handle, data, INFO, Retention())
            return image, await images.read("a", image)

        kept = [await new_file(index) for index in range(3)]
        assert await images.read("a", kept[1][0]) is kept[1][1]
        assert await images.read("a", kept[0][0]) is not kept[0][1]  # two fit


async def test_a_front_end_that_dies_while_it_writes_leaves_no_file(folder: Path) -> None:
    async with sharing(folder) as rig:
        (folder / "incoming" / "frontend-0.1-7").write_bytes(b"half")
        (folder / "incoming" / "frontend-0.12-7").write_bytes(b"of another process")
        rig.end(0)
        assert [path.name for path in (folder / "incoming").iterdir()] == ["frontend-0.12-7"]


async def test_a_folder_that_cannot_be_written_fails_the_call_and_nothing_is_stored(folder: Path) -> None:
    async with sharing(folder) as rig:
        (folder / "incoming").rmdir()
        (folder / "incoming").touch()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.servers[0].images.PutImage(image_service_pb2.PutImageRequest(data=DATA))
        assert caught.value.code() is Code.UNAVAILABLE
        assert await ask_about_image(rig.servers[1]) == "IMAGE_NOT_FOUND"
        assert rig.owner.images.load().used_bytes == 0


async def test_images_are_stored_after_a_cleaner_has_removed_empty_folders(folder: Path) -> None:
    async with sharing(folder) as rig:
        for name in ("images", "incoming"):
            (folder / name).rmdir()
        assert await store(rig.servers[0]) == "OK"
        assert await ask_about_image(rig.servers[1]) == "OK"
        assert [path.stat().st_mode & 0o777 for path in (folder / "images", folder / "incoming")] == [0o700] * 2


async def test_an_image_whose_file_a_cleaner_has_removed_is_not_found_and_can_be_stored_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sharing(folder) as rig:
        assert await store(rig.servers[0]) == "OK"
        (file,) = (folder / "images").iterdir()
        file.unlink()
        assert await ask_about_image(rig.servers[1]) == "IMAGE_NOT_FOUND"
        assert await store(rig.servers[1]) == "OK"
        file.unlink()
        assert await store(rig.servers[0]) == "OK"  # without a question between
        assert await ask_about_image(rig.servers[1]) == "OK"
        assert sum("the file of a stored image was removed" in line for line in caplog.messages) == 2


async def test_a_file_that_is_removed_before_it_is_stored_fails_the_call_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_lose(path: Path, data: bytes) -> None:
        path.write_bytes(data)
        path.unlink()

    async with sharing(folder) as rig:
        with monkeypatch.context() as cleaner:
            cleaner.setattr(stored_images, "_write", write_and_lose)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.servers[0].images.PutImage(image_service_pb2.PutImageRequest(data=DATA))
            assert caught.value.code() is Code.UNAVAILABLE
        assert await store(rig.servers[0]) == "OK"


@pytest.mark.parametrize("lacks", ["blocks", "names"])
async def test_stored_images_take_no_more_than_the_space_that_there_is(
    folder: Path, lacks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free_bytes = 64 * 2**20

    def measure(_: Path) -> os.statvfs_result:
        files = (0, 0, 0) if lacks == "blocks" else (1000, min(free_bytes, 1), min(free_bytes, 1))
        blocks = free_bytes if lacks == "blocks" else 2**40
        return os.statvfs_result((1, 1, blocks, blocks, blocks, *files, 0, 255))

    monkeypatch.setattr(os, "statvfs", measure)
    async with sharing(folder) as rig:
        images, owner = rig.hosts[0].images, rig.owner.images
        (line,) = [line for line in caplog.messages if "stored images take" in line] or [""]
        if lacks == "blocks":
            assert line.startswith("stored images take at most 56 MiB instead of 256")
            assert owner.load().total_bytes == 56 * 2**20
        else:
            assert line == ""
        other = ImageHandle(hashlib.sha256(DATA + b"2").hexdigest())
        assert await store(rig.servers[0]) == "OK"
        free_bytes = 0  # others have filled the file system
        with pytest.raises(ImageStoreFull):
            await images.put("", other, DATA + b"2", INFO, Retention())
        assert owner.load().used_bytes == 0, "images that may leave do so before one is refused"
        free_bytes = 64 * 2**20
        await images.put("", other, DATA + b"2", INFO, Retention(is_pinned=True))
        free_bytes = 0
        assert await store(rig.servers[0]) == "IMAGE_STORE_FULL"
        assert (await images.find("", other)).is_pinned


async def test_a_supervisor_that_does_not_answer_fails_the_use_of_a_handle_in_time(folder: Path) -> None:
    async with linked("frontend-0.1", "the supervisor") as (ours, theirs, start):

        async def never(_: FindImage) -> None:
            await asyncio.get_running_loop().create_future()

        ours.on(FindImage, never)
        await start()
        with pytest.raises(SupervisorUnavailable):
            await SharedImages(theirs, folder, "frontend-0.1").find("", HANDLE)


async def test_images_of_a_namespace_go_with_its_last_token(tokens: Path, folder: Path) -> None:
    async with sharing(folder, tokens=str(tokens)) as rig:
        assert await store(rig.servers[0], ALICE) == "OK"
        write_tokens(tokens, names=("bob",))
        await reload(rig)
        assert [await ask_about_image(server, ALICE) for server in rig.servers] == ["TOKEN_INVALID"] * 2
        for host in rig.hosts:  # what was told before is done when a question is answered
            assert await host.images.renew("token:alice", HANDLE, Retention()) is None
        assert list((folder / "images").iterdir()) == []


# Operators


@pytest.mark.parametrize("selection", [{"request_id": "mine"}, {"token": "alice"}])
async def test_operators_cancel_requests_of_every_front_end(tokens: Path, folder: Path, selection: Any) -> None:
    engine = Core(waits)
    async with sharing(folder, engine, num=3, tokens=str(tokens)) as rig:
        calls = [
            asyncio.ensure_future(
                outcome(server.vision.CompleteQuery(QUERY, metadata=(*ALICE, ("x-request-id", "mine"))))
            )
            for server in rig.servers
        ]
        for _ in calls:
            await engine.num_submitted.acquire()
        request = engine_service_pb2.CancelRequestsRequest(**selection)
        answer = await rig.servers[1].engine_service.CancelRequests(request, metadata=BOB)
        assert answer.cancelled_request_count == 3
        assert await asyncio.gather(*calls) == ["REQUEST_CANCELLED"] * 3


async def test_a_front_end_that_has_died_keeps_no_operator_waiting(folder: Path) -> None:
    async with sharing(folder, num=3) as rig:
        rig.end(0)
        request = engine_service_pb2.CancelRequestsRequest(request_id="mine")
        answer = await rig.servers[1].engine_service.CancelRequests(request)
        assert answer.cancelled_request_count == 0


async def test_a_front_end_that_does_not_answer_fails_the_operator_and_hides_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_ends, "ANSWER_TIMEOUT_S", 0.05)
    async with sharing(folder) as rig:

        async def never(_: AskOne) -> None:
            await asyncio.get_running_loop().create_future()

        rig.hosts[0].link.on(AskOne, never)
        request = engine_service_pb2.CancelRequestsRequest(request_id="mine")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.servers[1].engine_service.CancelRequests(request)
        assert caught.value.code() is Code.UNAVAILABLE


async def test_statistics_of_the_model_are_those_of_all_front_ends(folder: Path) -> None:
    async with sharing(folder, num=3, triton=True) as rig:
        for server in (rig.servers[0], *rig.servers):
            await TritonStub(server.channel).ModelInfer(query())
        for server in rig.servers:
            answer = await TritonStub(server.channel).ModelStatistics(triton_wire.ModelStatisticsRequest())
            (stats,) = answer.model_stats
            assert (stats.name, stats.inference_count, stats.inference_stats.success.count) == ("moondream", 4, 4)
            assert stats.inference_stats.queue.ns == 4_000_000
            assert stats.last_inference > 0
