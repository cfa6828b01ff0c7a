"""Engines behind sockets answer as an engine does, and lose nothing when one of them goes."""

import asyncio
import errno
import hashlib
import io
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from PIL import Image

from kestrel_grpc.multiprocess.engine_channel import core_server as core_module
from kestrel_grpc.multiprocess.engine_channel import engine_client as client_module
from kestrel_grpc.multiprocess.engine_channel.core_connection import BuildMismatch
from kestrel_grpc.multiprocess.engine_channel.core_server import CoreServer
from kestrel_grpc.multiprocess.engine_channel.endpoint import CoreEndpoint
from kestrel_grpc.multiprocess.engine_channel.engine_client import EngineClient
from kestrel_grpc.multiprocess.engine_channel.routing import home_order
from kestrel_grpc.multiprocess.protocol import connection as connection_module
from kestrel_grpc.multiprocess.protocol import messages
from kestrel_grpc.multiprocess.protocol.messages import CODEC, Events
from kestrel_grpc.multiprocess.protocol.questions import Message
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.deadlines import deadline_in
from kestrel_runtime.api.engine import CoreReading, EngineStatus, ImageInfo
from kestrel_runtime.api.errors import (
    AdapterNotFound,
    DeadlineExceeded,
    EngineUnavailable,
    ImageError,
    InternalError,
    KestrelError,
    ModelNotFound,
    Overloaded,
    RequestRefused,
    SkillUnsupported,
)
from kestrel_runtime.api.events import Finished, Started, TextDelta
from kestrel_runtime.api.requests import (
    CachePolicy,
    Chat,
    ChatMessage,
    Gaze,
    PointRef,
    Query,
    Request,
    RequestOptions,
    Role,
    SamplingParams,
)
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.engine.poison_requests import fingerprint_of
from kestrel_runtime.execution.step_runner import StepRunner
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.batch import Batch
from tests import hostile_images
from tests.reference_fixtures import MD3_SMALL

SMALL_IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()
IMAGE_OF_SEVERAL_CROPS = (MD3_SMALL / "image_0_500x400.png").read_bytes()
GREEDY = SamplingParams(temperature=0.0, max_tokens=9)
MAX_WAIT_S = 60.0
ENDLESS = Query("hello", sampling=SamplingParams(temperature=5.0, max_tokens=3000, logit_bias=((0, -100.0),)))
"""Its answer has 3,000 tokens: the token that ends it cannot be drawn."""


class Cores:
    """Engines behind sockets, and a client of theirs."""

    def __init__(self, loaded: LoadedModel, folder: Path, configs: list[EngineConfig]) -> None:
        self.endpoints = [CoreEndpoint(folder, index) for index in range(len(configs))]
        self.engines = [
            LocalEngine(loaded, config, flight_record=endpoint.flight_record)
            for config, endpoint in zip(configs, self.endpoints, strict=True)
        ]
        self.servers = [CoreServer(*each) for each in zip(self.engines, self.endpoints, strict=True)]
        self.client: EngineClient

    async def lose(self, index: int, *, is_fault: bool = True) -> None:
        """As if the process of a core had ended by itself, or had been killed."""
        await self.servers[index].close()
        self.client.core_gone(index, is_fault=is_fault)

    async def replace(self, index: int) -> None:
        """As if a new process of a core that was lost were ready."""
        self.servers[index] = CoreServer(self.engines[index], self.endpoints[index])
        await self.servers[index].start()
        await self.client.core_ready(index)


@asynccontextmanager
async def cores(loaded: LoadedModel, folder: Path, *configs: EngineConfig) -> AsyncIterator[Cores]:
    served = Cores(loaded, folder, list(configs))
    for server in served.servers:
        await server.start()
    served.client = await EngineClient.connect(served.endpoints, "frontend-0.1")
    try:
        yield served
    finally:
        served.client.close()
        for server, engine in zip(served.servers, served.engines, strict=True):
            await server.close()
            await asyncio.to_thread(engine.close)


CONFIG = EngineConfig(model="", max_batch_size=8)


@pytest.fixture
async def one(loaded: LoadedModel, tmp_path: Path) -> AsyncIterator[Cores]:
    async with cores(loaded, tmp_path, CONFIG) as served:
        yield served


@pytest.fixture
async def two(loaded: LoadedModel, tmp_path: Path) -> AsyncIterator[Cores]:
    async with cores(loaded, tmp_path, CONFIG, CONFIG) as served:
        yield served


def submit(client: EngineClient, request: Request, deadline: float | None = None, namespace: str = "") -> Stream:
    (stream,) = client.submit_samples(request, deadline=deadline, namespace=namespace)
    return stream


async def error_of(stream: Stream) -> KestrelError:
    with pytest.raises(KestrelError) as caught:
        await stream.result()
    return caught.value


def picture(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (37, 41), (number, 7 * number % 256, 99)).save(file, "PNG")
    return file.getvalue()


async def until_idle(engine: LocalEngine) -> None:
    """Return after the engine has run a request that came after all others."""
    await engine.submit(Query("hi", sampling=SamplingParams(max_tokens=1))).result()


@pytest.mark.parametrize("image", [None, SMALL_IMAGE, IMAGE_OF_SEVERAL_CROPS])
async def test_events_are_those_of_the_engine_with_a_new_image_and_with_a_known_one(
    one: Cores, image: bytes | None
) -> None:
    request = Query("license", image, reasoning=True, sampling=replace(GREEDY, max_tokens=40))
    bypassing = replace(request, options=RequestOptions(cache=CachePolicy.BYPASS))
    expected = await one.engines[0].submit(bypassing).result()
    for _ in range(2):
        events = [event async for event in submit(one.client, request)]
        assert isinstance(events[0], Started)
        assert all(isinstance(event, TextDelta) for event in events[1:-1])
        assert isinstance(last := events[-1], Finished)
        assert (last.output, last.image_size_px) == (expected.output, expected.image_size_px)


async def test_a_caller_that_waits_for_the_end_gets_it(one: Cores) -> None:
    request = Query("what?", SMALL_IMAGE, sampling=GREEDY)
    assert (await submit(one.client, request).result()).output == (
        await one.engines[0].submit(request).result()
    ).output


async def test_the_core_gets_each_image_of_a_conversation_in_its_place(one: Cores) -> None:
    messages = (
        ChatMessage(Role.USER, "what?", (IMAGE_OF_SEVERAL_CROPS, picture(1))),
        ChatMessage(Role.ASSISTANT, "that"),
        ChatMessage(Role.USER, "and here?", (picture(2),)),
    )
    request = Chat(messages, sampling=GREEDY)
    here = await one.engines[0].submit(replace(request, options=RequestOptions(cache=CachePolicy.BYPASS))).result()
    there = await submit(one.client, request).result()
    assert there.output == here.output
    assert there.usage.num_image_tokens == here.usage.num_image_tokens == 3 * 729


async def test_requests_of_one_route_go_to_one_core_whatever_their_images(
    two: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[LocalEngine] = []
    submit_to = LocalEngine.submit_to
    monkeypatch.setattr(
        LocalEngine, "submit_to", lambda engine, *all, **how: asked.append(engine) or submit_to(engine, *all, **how)
    )
    for route in ("one", "another", "a third", "a fourth"):
        asked.clear()
        for number in range(4):
            (stream,) = two.client.submit_samples(Query("what?", picture(number), sampling=GREEDY), route=route)
            await stream.result()
        assert len(asked) == 4
        assert len({*map(id, asked)}) == 1


async def test_samples_have_their_seeds_and_share_the_image(one: Cores) -> None:
    sampling = SamplingParams(temperature=2.0, max_tokens=9, seed=5, n=3)
    request = Query("what?", IMAGE_OF_SEVERAL_CROPS, sampling=sampling)
    here = [(await stream.result()).output for stream in one.engines[0].submit_samples(request)]
    there = [(await stream.result()).output for stream in one.client.submit_samples(request)]
    assert there == here


async def test_a_large_answer_comes_in_a_message_of_its_own(one: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    num_ends: list[int] = []
    send = CoreServer.send

    def note(server: CoreServer, frontend: Any, message: Any) -> bool:
        if isinstance(message, Events):
            events = [event for item in message.of_requests for event in item.events]
            num_ends.append(sum(isinstance(event, Finished) for event in events))
        return send(server, frontend, message)

    monkeypatch.setattr(CoreServer, "send", note)
    sampling = replace(ENDLESS.sampling, max_tokens=20, n=3)
    monkeypatch.setattr(Finished, "is_large", True)
    for stream in one.client.submit_samples(replace(ENDLESS, sampling=sampling)):
        await stream.result()
    assert [count for count in num_ends if count] == [1, 1, 1]


async def test_a_known_image_is_not_decoded_again(one: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Query("what?", SMALL_IMAGE, sampling=GREEDY)
    first = await submit(one.client, request).result()
    monkeypatch.setattr(client_module, "decode_image", lambda *_, **__: pytest.fail("decoded"))
    second = await submit(one.client, request).result()
    assert second.output == first.output
    assert second.usage.num_cached_tokens > 700


async def test_errors_are_those_of_the_engine(one: Cores) -> None:
    broken = Query("what?", IMAGE_OF_SEVERAL_CROPS[: len(IMAGE_OF_SEVERAL_CROPS) // 2], sampling=GREEDY)
    for request, kind in (
        (Query("what?", b"no picture"), ImageError),
        (broken, ImageError),
        (Query("what?", options=RequestOptions(model="other")), ModelNotFound),
        (Gaze(SMALL_IMAGE, PointRef(0.5, 0.5)), SkillUnsupported),
        (Query("what?", options=RequestOptions(adapter="none")), AdapterNotFound),
    ):
        (here,), (there,) = one.engines[0].submit_samples(request), one.client.submit_samples(request)
        errors = await error_of(here), await error_of(there)
        assert [type(error) for error in errors] == [kind, kind]
        assert str(errors[0]) == str(errors[1])


@pytest.mark.parametrize(
    ("data", "is_taken"),
    [(hostile_images.png(8000, 8000, colour_type=2), True), (hostile_images.png(9000, 9000, colour_type=2), False)],
    ids=["the largest", "a larger one"],
)
async def test_a_front_end_takes_images_of_the_sizes_that_one_process_takes(
    one: Cores, data: bytes, is_taken: bool
) -> None:
    outcomes: list[object] = []
    for engine in (one.engines[0], one.client):
        try:
            outcomes.append(engine.inspect_image(data))
        except ImageError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    assert isinstance(outcomes[0], ImageInfo) is is_taken


async def test_a_deadline_ends_a_request(one: Cores) -> None:
    assert type(await error_of(submit(one.client, ENDLESS, deadline=deadline_in(0.3)))) is DeadlineExceeded


async def test_a_deadline_that_has_passed_before_a_thread_has_time_is_told_as_such(one: Cores) -> None:
    streams = [submit(one.client, Query(f"question {number}"), deadline=deadline_in(-1.0)) for number in range(20)]
    assert {type(await error_of(stream)) for stream in streams} == {DeadlineExceeded}


async def test_a_cancelled_request_returns_its_pages(one: Cores) -> None:
    stream = submit(one.client, ENDLESS)
    await anext(stream)
    stream.cancel()
    await until_idle(one.engines[0])
    await submit(one.client, Query("hi", sampling=SamplingParams(max_tokens=1))).result()
    assert one.engines[0].load().num_used_pages == 0


async def test_requests_of_a_front_end_that_has_died_are_cancelled(one: Cores) -> None:
    await anext(submit(one.client, ENDLESS))
    one.servers[0].drop_frontend("frontend-0.1")
    await until_idle(one.engines[0])
    assert one.engines[0].load().num_used_pages == 0


async def test_requests_of_a_front_end_that_does_not_read_are_cancelled(
    one: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    await anext(submit(one.client, ENDLESS))
    monkeypatch.setattr(connection_module, "MAX_UNSENT_BYTES", -1)
    while one.engines[0].load().num_running:
        await until_idle(one.engines[0])
    assert one.engines[0].load().num_used_pages == 0


async def test_requests_to_a_core_that_does_not_read_are_refused(
    one: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "MAX_UNSENT_BYTES", -1)
    assert type(await error_of(submit(one.client, ENDLESS))) is EngineUnavailable
    with pytest.raises(EngineUnavailable):
        await one.client.adapter_names()


async def test_requests_of_one_turn_travel_together_and_each_is_answered(
    one: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    decode = CODEC.decode

    def counting(data: bytes) -> list[Message]:
        received = decode(data)
        batches.append(len(received))
        return received

    monkeypatch.setattr(CODEC, "decode", counting)
    streams = [submit(one.client, Query(f"what {number}?", sampling=GREEDY)) for number in range(5)]
    assert len(await asyncio.gather(*(stream.result() for stream in streams))) == 5
    assert batches[0] == 5


async def test_a_request_that_a_core_cannot_read_ends_with_an_error(
    one: Cores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a secret")

    with monkeypatch.context() as broken:
        broken.setattr(core_module, "decode_request", fail)
        error = await error_of(submit(one.client, Query("what?", SMALL_IMAGE)))
    assert type(error) is InternalError
    assert "a secret" not in str(error)
    assert "a secret" in caplog.text
    assert (await submit(one.client, Query("what?", SMALL_IMAGE, sampling=GREEDY)).result()).output


async def test_an_operation_that_fails_inside_a_core_is_an_internal_error_and_ends_no_other(
    one: Cores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise ValueError("a secret")

    with monkeypatch.context() as broken:
        broken.setattr(one.engines[0], "adapter_names", fail)
        with pytest.raises(InternalError):
            await one.client.adapter_names()
    assert "a AdapterNames from frontend-0.1 could not be handled" in caplog.text
    assert await one.client.adapter_names() == []


async def test_pixels_of_a_front_end_that_has_died_are_not_waited_for(
    one: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    monkeypatch.setattr(EngineClient, "_give_pixels", lambda *_: asked.set())
    submit(one.client, Query("what?", SMALL_IMAGE))
    await asked.wait()
    one.servers[0].drop_frontend("frontend-0.1")
    await asyncio.to_thread(one.engines[0].close)
    assert one.engines[0].load().num_preprocessing == 0


class Decoded:
    """The images that a front end decodes, and the files in which it shares them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_begun = 0
        self.begun, self.may_go_on = asyncio.Event(), threading.Event()
        self.may_go_on.set()
        self.files: list[BinaryIO] = []
        loop, decode, share = asyncio.get_running_loop(), client_module.decode_image, client_module.shared_file

        def decoding(*given: Any, **named: Any) -> Image.Image:
            self.num_begun += 1
            loop.call_soon_threadsafe(self.begun.set)
            assert self.may_go_on.wait(MAX_WAIT_S)
            return decode(*given, **named)

        def sharing(parts: Iterable[memoryview]) -> BinaryIO:
            self.files.append(share(parts))
            return self.files[-1]

        monkeypatch.setattr(client_module, "decode_image", decoding)
        monkeypatch.setattr(client_module, "shared_file", sharing)


async def test_a_new_image_is_decoded_before_a_core_asks_for_it_and_once(
    one: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = Decoded(monkeypatch)
    give = EngineClient._give_pixels
    asked = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(EngineClient, "_give_pixels", lambda *message: asked.set_result(message))
    stream = submit(one.client, Query("what?", SMALL_IMAGE, sampling=GREEDY))
    await decoded.begun.wait()
    give(*await asked)
    expected = (await one.engines[0].submit(Query("what?", SMALL_IMAGE, sampling=GREEDY)).result()).output
    assert (await stream.result()).output == expected
    assert (decoded.num_begun, [file.closed for file in decoded.files]) == (1, [True])


async def test_what_was_decoded_ahead_of_an_image_that_the_core_knows_is_freed(
    one: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Query("what?", SMALL_IMAGE, sampling=GREEDY)
    expected = (await one.engines[0].submit(request).result()).output
    decoded = Decoded(monkeypatch)
    decoded.may_go_on.clear()  # until the answer is complete
    assert (await submit(one.client, request).result()).output == expected
    decoded.may_go_on.set()
    assert (await submit(one.client, request).result()).output == expected
    assert decoded.num_begun <= 1, "the second time it is no new image"
    await asyncio.to_thread(one.client._workers.close)
    assert all(file.closed for file in decoded.files)


async def test_a_caller_who_leaves_and_a_busy_core_have_nothing_decoded_ahead(
    one: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = Decoded(monkeypatch)
    monkeypatch.setattr(EngineClient, "_give_pixels", lambda *_: None)
    decoded.may_go_on.clear()
    stream = submit(one.client, Query("what?", picture(1)))
    await decoded.begun.wait()
    stream.cancel()
    decoded.may_go_on.set()
    running = [submit(one.client, ENDLESS) for _ in range(5)]
    await asyncio.gather(*map(anext, running))
    while one.client.load().num_running < 5:
        await until_idle(one.engines[0])
    submit(one.client, Query("what?", picture(2)))
    await asyncio.to_thread(one.client._workers.close)
    assert decoded.num_begun == 1
    assert all(file.closed for file in decoded.files)


@pytest.mark.parametrize("end", ["front end", "core"])
async def test_an_image_that_no_descriptor_is_left_for_is_refused_alone(
    one: Cores, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    with monkeypatch.context() as full:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        full.setattr(*((os, "memfd_create") if end == "front end" else (core_module.mmap, "mmap")), refuse)
        error = await error_of(submit(one.client, Query("what?", SMALL_IMAGE, sampling=GREEDY)))
    assert type(error) is EngineUnavailable
    assert str(error) == "an image cannot be shared: Too many open files"
    request = Query("what?", SMALL_IMAGE, sampling=GREEDY)
    wanted = (await one.engines[0].submit(request).result()).output
    assert (await submit(one.client, request).result()).output == wanted


async def test_the_queue_refuses_as_the_engine_does(loaded: LoadedModel, tmp_path: Path) -> None:
    config = replace(CONFIG, max_batch_size=1, max_queued_requests=1)
    async with cores(loaded, tmp_path, config) as served:
        await anext(submit(served.client, ENDLESS))
        streams = [submit(served.client, ENDLESS) for _ in range(3)]
        errors = [await error_of(stream) for stream in streams[1:]]
        assert {type(error) for error in errors} == {Overloaded}


async def test_a_place_is_held_while_an_image_is_fetched(loaded: LoadedModel, tmp_path: Path) -> None:
    config = replace(CONFIG, max_batch_size=1, max_queued_requests=1)
    async with cores(loaded, tmp_path, config) as served:
        running = submit(served.client, ENDLESS)
        await anext(running)
        async with served.client.expecting(ENDLESS):
            with pytest.raises(Overloaded):
                async with served.client.expecting(ENDLESS):
                    pytest.fail("there is one place")
        async with served.client.expecting(ENDLESS):
            pass


async def test_a_place_that_is_given_up_before_the_core_has_read_the_question_is_free(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    config = replace(CONFIG, max_batch_size=1, max_queued_requests=1)
    async with cores(loaded, tmp_path, config) as served:
        await anext(submit(served.client, ENDLESS))
        for _ in range(3):
            asking = asyncio.ensure_future(served.client.expecting(ENDLESS).__aenter__())
            await asyncio.sleep(0)  # the question is on its way, and the core reads it together with the release
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert asking.cancelled()
        async with served.client.expecting(ENDLESS):
            pass


async def test_each_core_tells_of_itself_and_has_no_load_while_it_is_gone(two: Cores) -> None:
    first, second = two.client.cores()
    for index, core in enumerate((first, second)):
        assert core.load is not None
        assert (core.index, core.status, core.process_id) == (index, EngineStatus.SERVING, os.getpid())
        assert (core.info, core.load.num_pages) == (two.engines[index].info, two.engines[index].load().num_pages)
    stream = submit(two.client, ENDLESS)
    async for _ in stream:
        if any(core.load and core.load.num_running for core in two.client.cores()):
            break
    assert sorted(core.load.num_running for core in two.client.cores() if core.load) == [0, 1]
    assert two.client.load().num_running == 1
    stream.cancel()
    await two.lose(0)
    assert two.client.cores()[0] == CoreReading(0, EngineStatus.RECOVERING, first.info, None, None)
    assert two.client.cores()[1].status is EngineStatus.SERVING
    assert two.client.load().num_pages == two.engines[1].load().num_pages
    two.servers[0] = CoreServer(two.engines[0], two.endpoints[0])
    await two.servers[0].start()
    await two.client.core_ready(0)
    assert (two.client.cores()[0].load, two.client.cores()[0].process_id) != (None, None)


async def test_caches_are_cleared_in_every_core(two: Cores) -> None:
    for number in range(8):
        await submit(two.client, Query("what?", picture(number), sampling=GREEDY)).result()
    assert all(engine.load().prefix_cache.used_bytes for engine in two.engines)
    forgotten = await two.client.forget_image(hashlib.sha256(picture(3)).digest())
    assert forgotten.num_pages
    assert (await two.client.clear_cache()).num_pages == 7 * forgotten.num_pages
    assert not any(engine.load().prefix_cache.used_bytes for engine in two.engines)


async def test_images_meet_their_caches_and_answers_do_not_depend_on_the_core(two: Cores) -> None:
    requests = [Query("what?", picture(number), sampling=GREEDY) for number in range(12)]
    for _ in range(3):
        streams = [submit(two.client, request) for request in requests]
        outputs = [(await stream.result()).output for stream in streams]
        assert outputs == [(await two.engines[0].submit(request).result()).output for request in requests]
    loads = [engine.load().prefix_cache for engine in two.engines]
    homes = [home_order(hashlib.sha256(picture(number)).digest(), (0, 1))[0] for number in range(12)]
    assert loads[1].num_lookups == 3 * homes.count(1)
    assert loads[1].num_hits == 2 * homes.count(1)


async def test_requests_that_were_not_answered_go_to_another_core(two: Cores) -> None:
    request = next(
        Query("what?", picture(number), sampling=GREEDY)
        for number in range(99)
        if home_order(hashlib.sha256(picture(number)).digest(), (0, 1))[0] == 0
    )
    two.engines[0].close()  # it answers nothing more; its status has not arrived yet
    await two.servers[0].close()
    begun = submit(two.client, request)
    two.client.core_gone(0)
    assert (await begun.result()).output == (await two.engines[1].submit(request).result()).output
    assert two.client.status is EngineStatus.SERVING


async def test_a_core_that_has_stopped_gets_no_share_while_another_answers(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "_STATE_INTERVAL_S", 0.004)
    monkeypatch.setattr(client_module, "_LOOK_INTERVAL_S", 0.04)
    images = [picture(number) for number in range(24)]
    at_first = [image for image in images if home_order(hashlib.sha256(image).digest(), (0, 1))[0] == 0]
    request = Query("what?", at_first[0], sampling=GREEDY)
    async with cores(loaded, tmp_path, CONFIG, CONFIG) as served, asyncio.timeout(MAX_WAIT_S):
        expected = await served.engines[1].submit(request).result()
        stopped, unread = served.servers[0], list[bytes]()
        with monkeypatch.context() as stop:
            stop.setattr(stopped, "receive", lambda frontend, data, file: unread.append(data))
            stop.setattr(stopped, "send", lambda *_: True)
            # What it was sent before anything noticed is answered by the other, like all that follows.
            async with served.client.expecting(request):
                pass
            assert (await submit(served.client, request).result()).output == expected.output
            num_unread = len(unread)
            for image in at_first:
                await submit(served.client, Query("what?", image, sampling=GREEDY)).result()
                await submit(served.client, Query("hello", sampling=GREEDY)).result()
                async with served.client.expecting(request):
                    pass
            assert len(unread) == num_unread
            assert served.client.status is EngineStatus.SERVING
        with monkeypatch.context() as watch:
            has_share = asyncio.Event()
            receive = stopped.receive
            watch.setattr(stopped, "receive", lambda *message: (has_share.set(), receive(*message)))
            while not has_share.is_set():
                await submit(served.client, Query("what?", at_first[1], sampling=GREEDY)).result()


async def test_a_front_end_starts_while_a_core_has_stopped_and_uses_it_later(
    two: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_LATE_S", 0.0)
    stopped = two.servers[0]
    async with asyncio.timeout(MAX_WAIT_S):
        with monkeypatch.context() as stop:
            greetings: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
            stop.setattr(stopped, "receive", lambda *message: greetings.put_nowait(message))
            first, second = [await EngineClient.connect(two.endpoints, f"frontend-{number}.1") for number in (1, 2)]
            for client in (first, second):
                assert (await submit(client, Query("hello", sampling=GREEDY)).result()).output
                assert [core.info is not None for core in client.cores()] == [False, True]
        used = asyncio.Event()
        monkeypatch.setattr(client_module.EngineClient, "_send_quarantine", lambda client, core: used.set())
        stopped.receive(*await greetings.get())  # it goes on
        await used.wait()
        assert [core.info is not None for core in first.cores()] == [True, True]
        second.core_gone(0)  # it was killed, and there is a new one
        await second.core_ready(0)
        assert [core.info is not None for core in second.cores()] == [True, True]
    first.close()
    second.close()


async def test_a_core_whose_socket_was_removed_listens_again(
    one: Cores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core_module, "_LISTENS", 1)
    one.endpoints[0].path.unlink()
    async with asyncio.timeout(MAX_WAIT_S):
        other = await EngineClient.connect(one.endpoints, "frontend-1.1")
        assert (await submit(other, Query("hello", sampling=GREEDY)).result()).output
    other.close()
    await submit(one.client, Query("hello", sampling=GREEDY)).result()
    assert sum("was removed; there is a new one" in line for line in caplog.messages) == 1


async def test_streams_that_had_begun_end_when_their_core_goes(two: Cores) -> None:
    streams = [submit(two.client, ENDLESS) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    await two.lose(0)
    ended = [stream for stream in streams if stream.over.done()]
    assert len(ended) == 1
    assert type(await error_of(ended[0])) is EngineUnavailable


async def test_without_a_core_requests_are_refused_until_one_is_back(
    one: Cores, loaded: LoadedModel, tmp_path: Path
) -> None:
    seen: list[EngineStatus] = []
    one.client.on_status_change(seen.append)
    waiting = submit(one.client, Query("what?", SMALL_IMAGE))
    await one.lose(0)
    assert type(await error_of(waiting)) is EngineUnavailable
    assert type(await error_of(submit(one.client, ENDLESS))) is EngineUnavailable
    with pytest.raises(EngineUnavailable):
        await one.client.clear_cache()
    await one.replace(0)
    await submit(one.client, Query("what?", SMALL_IMAGE, sampling=GREEDY)).result()
    assert seen == [EngineStatus.RECOVERING, EngineStatus.SERVING]


async def test_a_request_that_ends_two_processes_is_refused_and_no_other(
    two: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = next(
        picture(number)
        for number in range(99)
        if home_order(hashlib.sha256(picture(number)).digest(), (0, 1))[0] == 0
    )
    poison = Query("poison", image, sampling=GREEDY)
    others = [Query(f"question {number}", image, sampling=GREEDY) for number in range(5)]
    fingerprint = fingerprint_of(poison)
    launch, holds = StepRunner.launch, threading.Event()
    reached: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def launch_unless_poisoned(runner: StepRunner, batch: Batch, *others: Any) -> Any:
        if any(sequence.request.fingerprint == fingerprint for sequence in batch.sequences):
            loop.call_soon_threadsafe(reached.put_nowait, len(batch.sequences))
            holds.wait()  # a process that is killed now is in the middle of this step
        return launch(runner, batch, *others)

    monkeypatch.setattr(StepRunner, "launch", launch_unless_poisoned)
    try:
        calls = [submit(two.client, request) for request in (*others[:3], poison, *others[3:])]
        await reached.get()
        await two.lose(0)
        assert await reached.get() == 1, "an isolated request runs alone"
        await two.lose(1)
        refused = await asyncio.gather(*(stream.result() for stream in calls), return_exceptions=True)
        assert type(refused.pop(3)) is RequestRefused
        assert {type(end) for end in refused} <= {Finished, EngineUnavailable}
    finally:
        monkeypatch.setattr(StepRunner, "launch", launch)
        holds.set()
    await two.replace(1)
    assert type(await error_of(submit(two.client, poison))) is RequestRefused
    for request in others:
        await submit(two.client, request).result()


async def test_a_request_that_completes_alone_is_isolated_no_more(
    two: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Query("what?", sampling=GREEDY)
    launch, holds, reached = StepRunner.launch, threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def launch_and_wait(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(reached.set)
        holds.wait()
        return launch(*arguments)

    for _ in range(2):  # twice it was in flight alone when its core was killed
        monkeypatch.setattr(StepRunner, "launch", launch_and_wait)
        held = submit(two.client, request)
        await reached.wait()
        await two.lose(0)
        monkeypatch.setattr(StepRunner, "launch", launch)
        holds.set()
        await held.result()
        await two.replace(0)
        holds.clear()
        reached.clear()


async def test_a_request_is_refused_once_its_core_was_killed_four_times_without_an_end_between(
    two: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Query("what?", sampling=GREEDY)
    launch, held = StepRunner.launch, asyncio.Queue[threading.Event]()
    loop = asyncio.get_running_loop()

    def launch_when_let(*arguments: Any) -> Any:
        let = threading.Event()
        loop.call_soon_threadsafe(held.put_nowait, let)
        assert let.wait(MAX_WAIT_S)
        return launch(*arguments)

    async def kill(index: int) -> None:
        """Have a core killed that has the request in a step; it goes to the other one."""
        let = await asyncio.wait_for(held.get(), MAX_WAIT_S)
        await two.lose(index, is_fault=False)
        await two.replace(index)
        let.set()

    monkeypatch.setattr(StepRunner, "launch", launch_when_let)
    stream = submit(two.client, request)
    for index in (0, 1, 0):
        await kill(index)
    let = await asyncio.wait_for(held.get(), MAX_WAIT_S)
    monkeypatch.setattr(StepRunner, "launch", launch)
    let.set()
    await stream.result()  # an end: what was held against it is forgotten
    monkeypatch.setattr(StepRunner, "launch", launch_when_let)
    stream = submit(two.client, request)
    for index in (0, 1, 0, 1):
        assert not stream.over.done()
        await kill(index)
    assert type(await error_of(stream)) is RequestRefused


async def test_draining_waits_for_requests_and_takes_no_more(one: Cores) -> None:
    running = submit(one.client, Query("what?", SMALL_IMAGE, sampling=GREEDY))
    draining = asyncio.ensure_future(one.client.drain())
    await asyncio.sleep(0)
    assert type(await error_of(submit(one.client, ENDLESS))) is EngineUnavailable
    await draining
    assert running.over.done()


async def test_another_build_is_refused(one: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "build_id", lambda: "another")
    with pytest.raises(BuildMismatch):
        await EngineClient.connect(one.endpoints, "frontend-1.1")


async def test_what_is_cached_for_a_namespace_is_found_in_it_alone(one: Cores) -> None:
    request = Query("what?", SMALL_IMAGE, sampling=GREEDY)
    cached = [
        (await submit(one.client, request, namespace=name).result()).usage.num_cached_tokens for name in "abab"
    ]
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 700


def test_a_front_end_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import kestrel_grpc.multiprocess.engine_channel.engine_client"
    subprocess.run((sys.executable, "-c", code), check=True)


async def test_the_header_of_an_image_is_read_once_in_each_namespace(
    one: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect, read = client_module.inspect_image, list[object]()

    def inspecting(image: Any, **limits: Any) -> Any:
        read.append(image)
        return inspect(image, **limits)

    monkeypatch.setattr(client_module, "inspect_image", inspecting)
    for namespace, num_read in (("a", 1), ("a", 1), ("b", 2)):
        await submit(one.client, Query("what?", SMALL_IMAGE, sampling=GREEDY), namespace=namespace).result()
        assert len(read) == num_read
