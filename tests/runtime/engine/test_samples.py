"""Samples of one request (`n`): each waits, runs and ends by itself, and they decode their image once."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import EngineUnavailable, ImageError, Overloaded, QueueTimeout
from kestrel_runtime.api.events import Finished, Started
from kestrel_runtime.api.requests import CachePolicy, Caption, Query, RequestOptions, SamplingParams
from kestrel_runtime.engine import preprocessing
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.runtime.engine.test_engine import SMALL_IMAGE, began, endless, error_of, settled

FOUR = SamplingParams(temperature=1.0, max_tokens=3, n=4)


class Decodings:
    """Counts how often an image is decoded; a decoding waits while `may_go_on` is clear."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        self._decode = preprocessing.decode_image
        monkeypatch.setattr(preprocessing, "decode_image", self._counted)

    def _counted(self, *arguments: Any, check_wanted: Callable[[], None], **options: Any) -> Any:
        self.count += 1
        self.has_begun.set()
        self.may_go_on.wait()
        return self._decode(*arguments, check_wanted=check_wanted, **options)


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> Decodings:
    return Decodings(monkeypatch)


def samples_of(query: Query, num_samples: int) -> Query:
    return replace(query, sampling=replace(query.sampling, n=num_samples))


async def test_running_samples_leave_their_places_in_the_queue(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=3, max_queued_requests=3))
    try:
        running = engine.submit_samples(samples_of(endless(), 3))
        await began(running, 3)
        waiting = [engine.submit(endless(seed)) for seed in range(3)]
        assert not any(stream.over.done() for stream in waiting), "nothing else is in the queue"
        for stream in running:
            stream.cancel()
        await began(waiting, 3)
    finally:
        engine.close()


async def test_the_image_of_samples_counts_once_in_the_queue(loaded: LoadedModel) -> None:
    limit_bytes = 2 * len(SMALL_IMAGE)
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=1, max_queued_image_bytes=limit_bytes))
    try:
        running = engine.submit(endless())
        await anext(running)
        samples = engine.submit_samples(Caption(SMALL_IMAGE, sampling=FOUR))
        another = engine.submit(Caption(SMALL_IMAGE, sampling=SamplingParams(max_tokens=1)))
        too_many = engine.submit(Caption(SMALL_IMAGE))
        assert isinstance(await error_of(too_many), Overloaded)
        running.cancel()
        finished = await asyncio.gather(*(stream.result() for stream in (*samples, another)))
        assert len(finished) == 5
    finally:
        engine.close()


async def test_a_sample_that_is_prepared_late_has_waited_for_no_negative_time(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_is_over, fingerprint_of = threading.Event(), preprocessing.fingerprint_of
    calls: list[object] = []

    def take_long(*arguments: Any) -> str:
        calls.append(None)
        if len(calls) > 1:
            first_is_over.wait()
        return fingerprint_of(*arguments)

    monkeypatch.setattr(preprocessing, "fingerprint_of", take_long)
    streams = engine.submit_samples(Query("hello", sampling=SamplingParams(temperature=1.0, max_tokens=3, n=2)))
    results = [asyncio.ensure_future(stream.result()) for stream in streams]
    await asyncio.wait(results, return_when=asyncio.FIRST_COMPLETED)
    first_is_over.set()
    for finished in await asyncio.gather(*results):
        timing = finished.timing
        durations = (timing.queue_s, timing.preprocess_s, timing.prefill_s, timing.decode_s)
        assert min(durations) >= 0.0


async def test_each_sample_starts_in_the_time_that_its_caller_allows_or_not_at_all(loaded: LoadedModel) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", max_batch_size=1))
    try:
        both = samples_of(replace(endless(), options=RequestOptions(max_queue_s=0.1)), 2)
        streams = engine.submit_samples(both)
        ends = [asyncio.ensure_future(error_of(stream)) for stream in streams]
        done, (running,) = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        assert [type(each.result()) for each in done] == [QueueTimeout]
        running.cancel()
    finally:
        engine.close()


@pytest.mark.parametrize("policy", CachePolicy)
@pytest.mark.parametrize("caches", [True, False], ids=["cached", "no caches"])
async def test_samples_decode_their_image_once(
    loaded: LoadedModel, decodings: Decodings, policy: CachePolicy, caches: bool
) -> None:
    config = EngineConfig(model="", num_kv_pages=300, prefix_cache=caches)
    if not caches:
        config = replace(config, image_cache_bytes=0)
    engine = LocalEngine(loaded, config)
    try:
        query = Query("license", SMALL_IMAGE, sampling=FOUR, options=RequestOptions(cache=policy))
        await asyncio.gather(*(stream.result() for stream in engine.submit_samples(query)))
        assert decodings.count == 1
        await settled(engine)
        assert engine.load().num_preprocessing == 0
    finally:
        engine.close()


async def test_a_damaged_image_is_refused_for_all_samples(engine: LocalEngine, decodings: Decodings) -> None:
    streams = engine.submit_samples(Caption(SMALL_IMAGE[: len(SMALL_IMAGE) // 2], sampling=FOUR))
    errors = await asyncio.gather(*map(error_of, streams))
    assert [type(error) for error in errors] == [ImageError] * 4
    assert len({id(error) for error in errors}) == 4
    assert decodings.count == 1


async def test_samples_are_answered_where_the_one_that_decodes_is_cancelled(
    engine: LocalEngine, decodings: Decodings
) -> None:
    decodings.may_go_on.clear()
    first, *others = engine.submit_samples(Caption(SMALL_IMAGE, sampling=FOUR))
    await asyncio.to_thread(decodings.has_begun.wait)
    first.cancel()
    decodings.may_go_on.set()
    finished = await asyncio.gather(*(stream.result() for stream in others))
    assert all(isinstance(each, Finished) for each in finished)
    assert decodings.count == 2, "the next sample has decoded it for the others"


async def test_cancelled_samples_leave_nothing_behind(engine: LocalEngine, decodings: Decodings) -> None:
    decodings.may_go_on.clear()
    streams = engine.submit_samples(Caption(SMALL_IMAGE, sampling=FOUR))
    await asyncio.to_thread(decodings.has_begun.wait)
    for stream in streams:
        stream.cancel()
    decodings.may_go_on.set()
    await settled(engine)
    await asyncio.gather(
        *(stream.result() for stream in engine.submit_samples(Caption(SMALL_IMAGE, sampling=FOUR)))
    )
    await settled(engine)
    assert (engine.load().num_preprocessing, engine.load().num_waiting) == (0, 0)


async def test_samples_that_wait_for_a_decoding_end_with_the_engine(
    loaded: LoadedModel, decodings: Decodings
) -> None:
    engine = LocalEngine(loaded, EngineConfig(model=""))
    decodings.may_go_on.clear()
    streams = engine.submit_samples(Caption(SMALL_IMAGE, sampling=FOUR))
    try:
        await asyncio.to_thread(decodings.has_begun.wait)
        await asyncio.to_thread(engine.close)
        assert [type(await error_of(stream)) for stream in streams] == [EngineUnavailable] * 4
    finally:
        decodings.may_go_on.set()


async def test_a_stream_starts_with_no_token_counted(engine: LocalEngine) -> None:
    started = await anext(stream := engine.submit(endless()))
    stream.cancel()
    assert isinstance(started, Started)
    assert started.usage.num_output_tokens == 0
    assert started.usage.num_input_tokens > 0
