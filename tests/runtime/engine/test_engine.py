"""The engine on a small reference model: answers depend on no other request, finished requests hold no page."""

import asyncio
import contextlib
import gc
import random
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.deadlines import deadline_in
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    ImageError,
    InternalError,
    KestrelError,
    ModelNotFound,
    Overloaded,
    QueueBound,
    QueueTimeout,
    SkillUnsupported,
)
from kestrel_runtime.api.events import Finished, FinishReason, Started, TextDelta
from kestrel_runtime.api.images import PixelFormat, RawImage
from kestrel_runtime.api.requests import (
    Caption,
    Detect,
    Priority,
    Query,
    Request,
    RequestOptions,
    SamplingParams,
    Segment,
)
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.execution.step_runner import StepRunner
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.reference_fixtures import MD3_SMALL

SMALL_IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()
IMAGE_OF_SEVERAL_CROPS = (MD3_SMALL / "image_0_500x400.png").read_bytes()


def endless(seed: int = 14) -> Query:
    """A question whose answer has 3,000 tokens, whatever is drawn: the token that ends it cannot be."""
    sampling = SamplingParams(temperature=5.0, top_p=1.0, max_tokens=3000, seed=seed, logit_bias=((0, -100.0),))
    return Query("hello", sampling=sampling)


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": ((17, 3.0), (0, -5.0)),
}


async def settled(engine: LocalEngine) -> None:
    """Return after the engine has run a whole request that arrived after all others."""
    await engine.submit(Query("hi", sampling=SamplingParams(max_tokens=1))).result()


async def began(streams: list[Stream], count: int = 1) -> None:
    """Return after `count` of the streams brought an event. Several threads prepare requests: any may be first."""
    first_events = [asyncio.ensure_future(anext(stream)) for stream in streams]
    for _, first_event in zip(range(count), asyncio.as_completed(first_events), strict=False):
        await first_event
    for first_event in first_events:
        first_event.cancel()


async def error_of(stream: Stream) -> KestrelError:
    with pytest.raises(KestrelError) as caught:
        await stream.result()
    return caught.value


async def test_a_stream_starts_tells_and_finishes_in_that_order(engine: LocalEngine) -> None:
    query = Query("license", SMALL_IMAGE, reasoning=True, sampling=SamplingParams(max_tokens=40))
    events = [event async for event in engine.submit(query)]
    assert isinstance(events[0], Started)
    assert len(events) > 3
    assert all(isinstance(event, TextDelta) for event in events[1:-1])
    assert isinstance(events[-1], Finished)


async def test_nothing_of_a_request_waits_for_the_garbage_collector(engine: LocalEngine) -> None:
    gc.collect()
    gc.disable()
    try:
        stream = engine.submit(Query("hi", SMALL_IMAGE, sampling=SamplingParams(max_tokens=1)))
        await stream.result()
        await settled(engine)
        gone = weakref.ref(stream)
        del stream
        await settled(engine)
        assert gone() is None
    finally:
        gc.enable()


async def test_a_cache_too_small_for_all_sequences_changes_no_answer(
    loaded: LoadedModel, engine: LocalEngine
) -> None:
    drawn = [SamplingParams(temperature=1, max_tokens=90, seed=n) for n in range(6)]
    drawn = [replace(params, **PENALTIES) if params.seed in (1, 4) else params for params in drawn]
    requests = [Caption(SMALL_IMAGE, sampling=params) for params in drawn]
    roomy = [(await engine.submit(request).result()).output for request in requests]
    # Two prompts fit with a page to spare; both cannot grow to their end, so one must go back and start over.
    tight = LocalEngine(loaded, EngineConfig(model="", max_batch_size=6, num_kv_pages=96, prefix_cache=False))
    try:
        finished = await asyncio.gather(*(tight.submit(request).result() for request in requests))
        assert [item.output for item in finished] == roomy
        assert tight.load().num_used_pages == 0
    finally:
        tight.close()


async def test_an_answer_is_the_same_wherever_its_image_is_cut(loaded: LoadedModel, engine: LocalEngine) -> None:
    requests = [
        Caption(image, sampling=SamplingParams(temperature=0.0, max_tokens=5))
        for image in (SMALL_IMAGE, IMAGE_OF_SEVERAL_CROPS)
    ]
    cut_by_workers = [(await engine.submit(request).result()).output for request in requests]
    on_device = LocalEngine(
        loaded, EngineConfig(model="", max_batch_size=3, max_crops_per_step=2, resize_on_device=True)
    )
    try:
        # Another sequence decodes meanwhile, so that crops are encoded a few at a time.
        company = on_device.submit(endless())
        await anext(aiter(company))
        finished = await asyncio.gather(*(on_device.submit(request).result() for request in requests))
        assert [item.output for item in finished] == cut_by_workers
        company.cancel()
    finally:
        on_device.close()


async def test_samples_of_one_request_share_its_image(loaded: LoadedModel) -> None:
    query = Query("license", SMALL_IMAGE, sampling=SamplingParams(temperature=1.0, seed=3, max_tokens=5, n=4))
    own = LocalEngine(loaded, EngineConfig(model="", num_kv_pages=300))
    try:
        samples = [replace(query, sampling=sampling) for sampling in query.sampling.samples()]
        finished = await asyncio.gather(*(own.submit(sample).result() for sample in samples))
        # Whichever is prepared first computes it.
        first, *others = sorted(item.usage.num_cached_tokens for item in finished)
        assert first == 0
        assert min(others) >= finished[0].usage.num_image_tokens
    finally:
        own.close()


async def test_several_objects_share_their_image_and_are_answered_as_single_ones(
    loaded: LoadedModel,
) -> None:
    names = ("license", "copy", "a", "hello")
    own = LocalEngine(loaded, EngineConfig(model="", num_kv_pages=300))
    try:
        streams = own.submit_samples(Detect("", SMALL_IMAGE, max_objects=3, objects=names))
        together = [await stream.result() for stream in streams]
        first, *others = sorted(item.usage.num_cached_tokens for item in together)
        assert first == 0
        assert min(others) >= together[0].usage.num_image_tokens
        assert own.load().prefix_cache.num_hits == len(names) - 1
        await own.clear_cache()
        for name, answer in zip(names, together, strict=True):
            alone = await own.submit(Detect(name, SMALL_IMAGE, max_objects=3)).result()
            assert (alone.output, alone.finish_reason) == (answer.output, answer.finish_reason)
    finally:
        own.close()


async def test_transient_requests_compute_an_image_once_and_leave_the_entries_of_others_in_the_caches(
    loaded: LoadedModel,
) -> None:
    lasting = Detect("hello", IMAGE_OF_SEVERAL_CROPS, max_objects=3)
    names, options = ("license", "copy", "a"), RequestOptions(is_transient=True)
    own = LocalEngine(loaded, EngineConfig(model="", num_kv_pages=200, image_cache_bytes=1))
    try:
        before = await own.submit(lasting).result()
        for number in range(10):  # more than fit into the pages
            frame = RawImage(bytes([number]) * 12, 2, 2, PixelFormat.RGB8, 6)
            streams = own.submit_samples(Detect("", frame, max_objects=3, objects=names, options=options))
            finished = [await stream.result() for stream in streams]
            first, *others = sorted(item.usage.num_cached_tokens for item in finished)
            assert first == 0
            assert min(others) >= finished[0].usage.num_image_tokens
        after = await own.submit(lasting).result()
        assert after.usage.num_cached_tokens >= after.usage.num_image_tokens > before.usage.num_cached_tokens == 0
        assert after.output == before.output
        load = own.load()
        assert load.num_used_pages == 0
        assert (load.prefix_cache.num_evictions, load.image_cache.num_evictions) == (0, 0)
    finally:
        own.close()


async def test_the_text_of_one_object_fails_alone_and_an_image_fails_for_all(engine: LocalEngine) -> None:
    async def outcomes(image: bytes, *names: str) -> list[type[object]]:
        streams = engine.submit_samples(Detect("", image, max_objects=1, objects=names))
        found = await asyncio.gather(*(stream.result() for stream in streams), return_exceptions=True)
        return [type(item) for item in found]

    too_long = "license " * 5000
    assert await outcomes(SMALL_IMAGE, too_long, "a", "b") == [ContextLengthExceeded, Finished, Finished]
    assert await outcomes(SMALL_IMAGE, "a", too_long, "b") == [Finished, ContextLengthExceeded, Finished]
    assert await outcomes(b"no image", "a", "b") == [ImageError, ImageError]


async def test_two_hundred_cancellations_under_load_leave_no_page_behind(engine: LocalEngine) -> None:
    chance = random.Random(1)
    background = [engine.submit(endless(seed)) for seed in range(3)]

    async def leave_midway(number: int) -> None:
        with_image: Request = Detect("copy", SMALL_IMAGE) if number % 2 else Caption(SMALL_IMAGE)
        request = endless(number) if number % 5 else with_image
        stream = engine.submit(request)
        with contextlib.suppress(StopAsyncIteration):
            for _ in range(chance.randrange(6)):  # 0: cancelled while it is still being prepared
                await anext(stream)
        stream.cancel()
        stream.cancel()

    for batch in range(20):
        await asyncio.gather(*(leave_midway(10 * batch + number) for number in range(10)))
    for stream in background:
        stream.cancel()
    await settled(engine)
    load = engine.load()
    assert (load.num_used_pages, load.num_running, load.num_waiting, load.num_preprocessing) == (0, 0, 0, 0)


async def test_a_cancelled_stream_ends_and_its_pages_are_back_within_a_step(engine: LocalEngine) -> None:
    stream = engine.submit(endless())
    async for event in stream:
        if isinstance(event, TextDelta):
            stream.cancel()
    await settled(engine)
    assert engine.load().num_used_pages == 0


async def test_a_deadline_ends_a_running_request_and_frees_its_pages(engine: LocalEngine) -> None:
    streams = [engine.submit(endless(seed), deadline=deadline_in(0.05 + 0.01 * seed)) for seed in range(20)]
    errors = await asyncio.gather(*map(error_of, streams))
    assert {type(error) for error in errors} == {DeadlineExceeded}
    await settled(engine)
    assert engine.load().num_used_pages == 0


async def test_who_waits_longer_than_allowed_is_told_so(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=1))
    try:
        running = engine.submit(endless())
        await anext(running)
        patient = Query("hello", options=RequestOptions(max_queue_s=0.05))
        assert isinstance(await error_of(engine.submit(patient)), QueueTimeout)
        running.cancel()
        await settled(engine)
        assert engine.load().num_used_pages == 0
    finally:
        engine.close()


async def test_a_full_queue_refuses_at_once(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=1, max_queued_requests=3))
    try:
        running = engine.submit(endless())
        await anext(running)
        waiting = [engine.submit(endless()) for _ in range(3)]
        with pytest.raises(Overloaded) as caught:
            await engine.submit(endless()).result()
        assert (caught.value.bound, caught.value.limit) == (QueueBound.REQUESTS, 3)
        running.cancel()
        await began(waiting)  # a free place in the queue, for a moment
        assert not engine.submit(endless()).over.done()
    finally:
        engine.close()


async def test_queues_of_images_and_of_words_are_bounded_too(loaded: LoadedModel) -> None:
    config = EngineConfig(
        model="", max_batch_size=1, max_queued_image_bytes=len(SMALL_IMAGE) + 10, max_queued_tokens=1000
    )
    engine = LocalEngine(loaded, config)
    try:
        running = engine.submit(endless())
        await anext(running)
        engine.submit(Caption(SMALL_IMAGE))
        with pytest.raises(Overloaded) as caught:
            await engine.submit(Caption(SMALL_IMAGE)).result()
        assert caught.value.bound is QueueBound.IMAGE_BYTES
        with pytest.raises(Overloaded) as caught:
            await engine.submit(Query("ä" * 140)).result()  # 280 bytes beside the 729 tokens of the image
        assert caught.value.bound is QueueBound.TOKENS
        assert not engine.submit(Query("ä" * 130)).over.done()
    finally:
        engine.close()


async def test_a_tenant_that_floods_the_queue_leaves_room_for_another(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=1, max_queued_requests=4))
    try:
        running = engine.submit(endless(), tenant="flood")
        await anext(running)
        for _ in range(2):
            engine.submit(endless(), tenant="flood")
        with pytest.raises(Overloaded) as caught:
            await engine.submit(endless(), tenant="flood").result()
        assert caught.value.is_tenant_share
        other = engine.submit(Query("hi", sampling=SamplingParams(max_tokens=1)), tenant="other")
        running.cancel()
        assert isinstance(await other.result(), Finished)  # before the flood, which has been served more
    finally:
        engine.close()


async def test_a_tenant_is_answered_while_another_has_requests_for_all_rows(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=3))
    try:
        flood = [engine.submit(endless(), tenant="flood") for _ in range(5)]
        await began(flood, 3)
        for _ in range(4):
            await engine.submit(Query("hi", sampling=SamplingParams(max_tokens=2)), tenant="modest").result()
        assert not any(stream.over.done() for stream in flood)
    finally:
        engine.close()


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["waiting for steps", "looking ahead"])
async def test_requests_that_yield_are_answered_as_they_are_alone(
    loaded: LoadedModel, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, is_asynchronous: bool
) -> None:
    drawn = [SamplingParams(temperature=1.0, max_tokens=40, seed=n) for n in range(6)]
    drawn = [replace(params, **PENALTIES) if params.seed in (1, 4) else params for params in drawn]
    requests = [
        *(Query(f"why {params.seed}?", sampling=params) for params in drawn),
        Caption(SMALL_IMAGE, "short", sampling=SamplingParams(temperature=0.0, max_tokens=12)),
        Caption(IMAGE_OF_SEVERAL_CROPS, "long", sampling=replace(drawn[2], top_p=0.9, max_tokens=12)),
        Detect("License", SMALL_IMAGE, max_objects=4),
    ]
    alone = [(await engine.submit(request).result()).output for request in requests]
    monkeypatch.setattr(StepRunner, "is_asynchronous", is_asynchronous)
    crowded = LocalEngine(loaded, EngineConfig(model="", max_batch_size=4, num_kv_pages=150))
    try:
        flood = [asyncio.ensure_future(crowded.submit(request, tenant="flood").result()) for request in requests]
        while not all(item.done() for item in flood):
            short = Query("hi", sampling=SamplingParams(max_tokens=2))
            await asyncio.gather(*(crowded.submit(short, tenant="modest").result() for _ in range(2)))
        assert [(await item).output for item in flood] == alone
        assert crowded.load().num_used_pages == 0
    finally:
        crowded.close()


async def test_the_urgent_are_answered_before_those_that_came_earlier(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=1))
    order: list[Priority] = []

    async def ask(priority: Priority) -> None:
        options = RequestOptions(priority=priority)
        await engine.submit(Query("hi", sampling=SamplingParams(max_tokens=2), options=options)).result()
        order.append(priority)

    try:
        running = engine.submit(endless())
        await anext(running)
        asking = [asyncio.ensure_future(ask(priority)) for priority in reversed(Priority)]
        while engine.load().num_waiting < 3:
            await anext(running)
        running.cancel()
        await asyncio.gather(*asking)
        assert order == list(Priority)
    finally:
        engine.close()


async def test_who_would_wait_too_long_is_told_at_once(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=1))
    try:
        short = SamplingParams(temperature=50.0, max_tokens=5, seed=1)
        waiting = [engine.submit(Query("hello", sampling=short)) for _ in range(80)]
        for stream in waiting[:12]:
            await stream.result()
        with pytest.raises(Overloaded) as caught:
            await engine.submit(endless(), deadline=deadline_in(0.001)).result()
        assert caught.value.bound is QueueBound.WAIT
        assert 0.001 < caught.value.retry_after_s < 60
        assert not engine.submit(endless(), deadline=deadline_in(3600.0)).over.done()
    finally:
        engine.close()


async def test_a_deadline_that_has_passed_before_the_queue_is_asked_is_no_full_queue(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=1))
    try:
        short = SamplingParams(temperature=50.0, max_tokens=5, seed=1)
        waiting = [engine.submit(Query("hello", sampling=short)) for _ in range(80)]
        for stream in waiting[:12]:
            await stream.result()
        assert isinstance(await error_of(engine.submit(endless(), deadline=deadline_in(0.0))), DeadlineExceeded)
        with pytest.raises(DeadlineExceeded):
            async with engine.expecting(endless(), deadline=deadline_in(0.0)):
                pass
    finally:
        engine.close()


@pytest.mark.parametrize("limit", ["deadline", "max_queue_s"])
async def test_patience_ends_while_no_worker_is_free(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    is_blocked = threading.Event()

    def blocking(*_: object, **__: object) -> None:
        is_blocked.wait()
        raise RuntimeError("never mind")

    monkeypatch.setattr("kestrel_runtime.engine.preprocessing.decode_image", blocking)
    engine = LocalEngine(loaded, EngineConfig(model="", num_preprocess_threads=1))
    try:
        blocked = engine.submit(Caption(SMALL_IMAGE))
        if limit == "deadline":
            error = await error_of(engine.submit(Query("hi"), deadline=deadline_in(0.02)))
            assert isinstance(error, DeadlineExceeded)
        else:
            query = Query("hi", options=RequestOptions(max_queue_s=0.02))
            assert isinstance(await error_of(engine.submit(query)), QueueTimeout)
        assert not blocked.over.done()
        assert engine.load().num_preprocessing == 1
    finally:
        is_blocked.set()
        engine.close()


async def test_an_answer_ends_where_the_context_does(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", num_kv_pages=48, page_size=16))
    try:
        assert engine.info.max_context_tokens == 768
        endless_after_much = replace(endless(), question="word " * 230)
        finished = await engine.submit(endless_after_much).result()
        assert finished.finish_reason is FinishReason.LENGTH
        assert finished.usage.num_input_tokens + finished.usage.num_output_tokens == 768
    finally:
        engine.close()


async def test_a_prompt_longer_than_the_context_is_refused(engine: LocalEngine) -> None:
    error = await error_of(engine.submit(Query("word " * 5000)))
    assert isinstance(error, ContextLengthExceeded)
    assert error.num_prompt_tokens > error.max_context_tokens == 4096
    assert error.violations[0].field == "question"


async def test_bad_images_fail_alone(engine: LocalEngine) -> None:
    good = engine.submit(Caption(SMALL_IMAGE, sampling=SamplingParams(max_tokens=5)))
    assert isinstance(await error_of(engine.submit(Caption(SMALL_IMAGE[:100]))), ImageError)
    with pytest.raises(ImageError) as caught:
        await engine.submit(Caption(b"x" * (33 * 2**20))).result()
    assert caught.value.too_large
    assert isinstance(await good.result(), Finished)


async def test_an_unknown_model_and_a_missing_skill_are_refused(engine: LocalEngine) -> None:
    with pytest.raises(ModelNotFound):
        await engine.submit(Query("hi", options=RequestOptions(model="another"))).result()
    with pytest.raises(SkillUnsupported):
        await engine.submit(Segment("cat", SMALL_IMAGE)).result()


async def test_the_served_model_may_be_named(engine: LocalEngine) -> None:
    named = Query("hi", sampling=SamplingParams(max_tokens=1), options=RequestOptions(model=engine.info.model))
    assert isinstance(await engine.submit(named).result(), Finished)


async def test_draining_refuses_newcomers_and_lets_the_rest_finish(engine: LocalEngine) -> None:
    running = engine.submit(Query("hello", sampling=SamplingParams(temperature=50.0, max_tokens=200, seed=1)))
    await anext(running)
    draining = asyncio.ensure_future(engine.drain())
    finished = await running.result()
    assert finished.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    await draining
    assert engine.status is EngineStatus.DRAINING
    with pytest.raises(EngineUnavailable):
        await engine.submit(endless()).result()


async def test_if_one_of_several_samples_is_refused_none_runs(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=1, max_queued_requests=2))
    try:
        running = engine.submit(endless())
        await anext(running)
        three = engine.submit_samples(Query("hi", sampling=SamplingParams(n=3)))
        errors = [await error_of(stream) for stream in three]
        assert [type(error) for error in errors] == [Overloaded] * 3
        waiting = [engine.submit(endless()) for _ in range(2)]
        assert not any(stream.over.done() for stream in waiting), "the refused samples hold no place in the queue"
        running.cancel()
        await began(waiting)
    finally:
        engine.close()


async def test_closing_ends_every_stream_with_an_error(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=2))
    streams = [engine.submit(endless(seed)) for seed in range(8)]
    await began(streams)
    await asyncio.to_thread(engine.close)
    errors = await asyncio.gather(*map(error_of, streams))
    assert {type(error) for error in errors} == {EngineUnavailable}
    assert engine.load().num_used_pages == 0


async def test_an_engine_whose_model_breaks_says_so_and_refuses(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = LocalEngine(loaded, EngineConfig(model=""))
    died = threading.Event()
    engine.on_status_change(lambda status: died.set() if status is EngineStatus.DEAD else None)

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(loaded.model, "attended", broken)
    assert isinstance(await error_of(engine.submit(endless())), EngineUnavailable)
    await asyncio.to_thread(died.wait)
    assert "the device is gone" in caplog.text
    with pytest.raises(EngineUnavailable):
        await engine.submit(endless()).result()
    engine.close()


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, KeyboardInterrupt, SystemExit])
async def test_what_raises_in_preparing_a_request_fails_that_request_alone(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise kind("secret")

    with monkeypatch.context() as patched:
        patched.setattr("kestrel_runtime.engine.preprocessing.decode_image", broken)
        error = await error_of(engine.submit(Caption(SMALL_IMAGE)))
    assert isinstance(error, InternalError)
    assert "secret" not in str(error)
    assert isinstance(await engine.submit(Caption(SMALL_IMAGE)).result(), Finished)


async def test_callers_whose_event_loop_is_gone_leave_nothing_behind(engine: LocalEngine) -> None:
    async def ask_and_leave() -> None:
        for seed in range(4):
            await anext(engine.submit(Query("hello", sampling=SamplingParams(max_tokens=40, seed=seed))))

    await asyncio.to_thread(asyncio.run, ask_and_leave())
    while engine.load().num_used_pages:
        await settled(engine)
    assert engine.load().num_running == 0


async def test_a_request_whose_image_is_still_to_come_counts_as_waiting(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=1, max_queued_requests=2))
    try:
        running = engine.submit(endless())
        await anext(running)
        async with engine.expecting(Caption(b"?")), engine.expecting(Caption(b"?"), tenant="another"):
            with pytest.raises(Overloaded) as caught:
                await engine.submit(endless()).result()
            assert (caught.value.bound, caught.value.limit) == (QueueBound.REQUESTS, 2)
            with pytest.raises(Overloaded):
                await engine.expecting(Caption(b"?")).__aenter__()
        assert not engine.submit(endless()).over.done()
    finally:
        engine.close()


async def test_what_cannot_be_submitted_is_not_waited_for(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model=""))
    with pytest.raises(ModelNotFound):
        await engine.expecting(Caption(b"?", options=RequestOptions(model="another"))).__aenter__()
    engine.close()
    with pytest.raises(EngineUnavailable):
        await engine.expecting(Caption(b"?")).__aenter__()
