"""The engine on a small Moondream 3: all skills together answer as they do alone."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, repeat
from typing import Any

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import SkillUnsupported
from kestrel_runtime.api.events import Event, Finished, QueryOutput, TextChannel, TextDelta
from kestrel_runtime.api.requests import (
    CachePolicy,
    Caption,
    Detect,
    Point,
    PointRef,
    Query,
    Request,
    RequestOptions,
    SamplingParams,
    Segment,
)
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.engine.warm_up import warm_up
from kestrel_runtime.execution.step_runner import StepHandle, StepRunner
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.reference_fixtures import MD3_SMALL
from tests.runtime.engine.test_warm_up import RecordingEngine

SMALL_IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()
IMAGE_OF_SEVERAL_CROPS = (MD3_SMALL / "image_0_500x400.png").read_bytes()
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": ((17, 3.0), (0, -5.0)),
}


@pytest.fixture
def engine(shallow3: LoadedModel) -> Iterator[LocalEngine]:
    engine = LocalEngine(shallow3, EngineConfig(model="", max_batch_size=8))
    yield engine
    engine.close()


def text_of(events: list[Event], channel: TextChannel) -> str:
    return "".join(item.text for item in events if isinstance(item, TextDelta) and item.channel is channel)


async def test_the_deltas_of_each_channel_add_up_to_the_final_text(engine: LocalEngine):
    for seed in range(3):
        sampling = SamplingParams(temperature=2.0, max_tokens=30, seed=seed)
        query = Query("license", SMALL_IMAGE, reasoning=True, sampling=sampling)
        events = [event async for event in engine.submit(query)]
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert isinstance(finished.output, QueryOutput)
        assert finished.output.reasoning is not None
        assert text_of(events, TextChannel.REASONING) == finished.output.reasoning.text != ""
        assert text_of(events, TextChannel.ANSWER) == finished.output.answer


async def test_usage_and_timing_tell_what_was_spent(engine: LocalEngine):
    finished = await engine.submit(
        Caption(SMALL_IMAGE, sampling=SamplingParams(temperature=0, max_tokens=5))
    ).result()
    assert finished.usage.num_image_tokens == 81
    assert finished.usage.num_input_tokens == 1 + 81 + 7  # BOS, image, the caption's template
    assert finished.usage.num_output_tokens == 5
    timing = finished.timing
    parts = timing.queue_s + timing.preprocess_s + timing.prefill_s
    assert timing.time_to_first_token_s == pytest.approx(parts)
    assert min(timing.queue_s, timing.preprocess_s, timing.prefill_s, timing.decode_s) >= 0


def mixed_requests() -> list[Request]:
    """Thirty-two requests: every skill, with and without image, greedy and drawn."""
    drawn = [SamplingParams(temperature=1.0, top_p=0.9, max_tokens=8, seed=seed) for seed in range(4)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    kinds: list[Request] = [
        Query("What is in this image?", SMALL_IMAGE, sampling=greedy),
        Query("license", SMALL_IMAGE, reasoning=True, sampling=drawn[0]),
        Query("Tell me about the oceans.", sampling=drawn[1]),
        Query("Here?", SMALL_IMAGE, spatial_refs=(PointRef(0.25, 0.75),), sampling=greedy),
        Caption(SMALL_IMAGE, "short", sampling=greedy),
        Caption(IMAGE_OF_SEVERAL_CROPS, "long", sampling=drawn[2]),
        Point("copy", SMALL_IMAGE, max_objects=5),
        Detect("License", SMALL_IMAGE, max_objects=4),
        Segment("copy", SMALL_IMAGE, sampling=drawn[3]),
        Query("GNU", reasoning=True, sampling=replace(drawn[3], top_k=50, min_p=0.001, top_p=1.0, **PENALTIES)),
        Caption(SMALL_IMAGE, sampling=replace(greedy, **PENALTIES)),
    ]
    return [kinds[place % len(kinds)] for place in range(32)]


async def test_the_warm_up_asks_for_every_skill_once_and_leaves_nothing_behind(
    shallow2: LoadedModel, shallow3: LoadedModel
):
    for loaded in (shallow2, shallow3):
        engine = RecordingEngine(loaded, EngineConfig(model="", max_queued_requests=1))
        await warm_up(engine)
        assert sorted(engine.skills_asked) == sorted(engine.info.skills)
        engine.close()
        assert engine.load().num_used_pages == 0


async def test_moondream_2_refuses_to_segment(shallow2: LoadedModel):
    engine = LocalEngine(shallow2, EngineConfig(model=""))
    try:
        with pytest.raises(SkillUnsupported):
            await engine.submit(Segment("cat", SMALL_IMAGE)).result()
    finally:
        engine.close()


async def test_thirty_two_mixed_requests_answer_as_they_do_alone(engine: LocalEngine):
    requests = mixed_requests()
    alone = {id(request): (await engine.submit(request).result()).output for request in set(requests)}
    together = await asyncio.gather(*(engine.submit(request).result() for request in requests))
    assert [finished.output for finished in together] == [alone[id(request)] for request in requests]


def requests_without_cache() -> list[Request]:
    requests = [
        *mixed_requests()[:11],
        Query("why?", reasoning=True, sampling=SamplingParams(max_tokens=4, seed=5)),
    ]
    return [replace(item, options=RequestOptions(cache=CachePolicy.BYPASS)) for item in requests]


@pytest.fixture(scope="module")
def one_by_one(shallow3: LoadedModel) -> list[Finished]:
    """What `requests_without_cache` get where each step is waited for, one request after the other."""

    async def ask(engine: LocalEngine) -> list[Finished]:
        return [await engine.submit(request).result() for request in requests_without_cache()]

    engine = LocalEngine(shallow3, EngineConfig(model=""))
    try:
        return asyncio.run(ask(engine))
    finally:
        engine.close()


@pytest.mark.parametrize(
    "is_complete", [repeat(True), repeat(False), cycle([False, False, True])], ids=["soon", "late", "now and then"]
)
async def test_looking_ahead_changes_no_answer(
    shallow3: LoadedModel, one_by_one: list[Finished], monkeypatch: pytest.MonkeyPatch, is_complete: Iterator[bool]
):
    monkeypatch.setattr(StepRunner, "is_asynchronous", True)
    monkeypatch.setattr(StepHandle, "is_complete", lambda _: next(is_complete))
    # Pages for a few at a time, so that some are preempted while others decode ahead; prompts are chunked.
    ahead = LocalEngine(shallow3, EngineConfig(model="", num_kv_pages=54, page_size=4, max_prefill_tokens=40))
    try:
        overlapped = await asyncio.gather(*(ahead.submit(request).result() for request in requests_without_cache()))
        assert [finished.output for finished in overlapped] == [finished.output for finished in one_by_one]
        assert [finished.usage for finished in overlapped] == [finished.usage for finished in one_by_one]
        assert ahead.load().num_used_pages == 0
    finally:
        ahead.close()


async def test_logprobs_come_with_each_token_and_change_no_answer(engine: LocalEngine):
    sampling = SamplingParams(temperature=0.0, max_tokens=20, logprobs=4)
    query = Query("license", SMALL_IMAGE, reasoning=True, sampling=sampling)
    plain = await engine.submit(replace(query, sampling=replace(sampling, logprobs=None))).result()
    events = [event async for event in engine.submit(query)]
    finished = events[-1]
    assert isinstance(finished, Finished)
    output = finished.output
    assert isinstance(plain.output, QueryOutput)
    assert isinstance(output, QueryOutput)
    assert output.reasoning is not None
    assert (output.answer, plain.output.logprobs) == (plain.output.answer, None)
    for channel, told in (
        (TextChannel.REASONING, output.reasoning.logprobs),
        (TextChannel.ANSWER, output.logprobs),
    ):
        deltas = [event for event in events if isinstance(event, TextDelta) and event.channel is channel]
        assert told == tuple(item for delta in deltas for item in delta.logprobs)
        assert told
        for item in told:
            logprobs = [top.logprob for top in item.top]
            assert len(logprobs) == 4
            assert logprobs == sorted(logprobs, reverse=True)
            assert item.logprob <= logprobs[0] < 0
            assert item.logprob in (*logprobs, min(item.logprob, logprobs[-1]))
    answer = output.logprobs or ()
    assert b"".join(item.bytes for item in answer).decode(errors="replace") == output.answer
    company = mixed_requests()[:6]
    together, *_ = await asyncio.gather(*(engine.submit(request).result() for request in (query, *company)))
    assert isinstance(together.output, QueryOutput)
    assert [item.id for item in together.output.logprobs or ()] == [item.id for item in answer]
    for one, other in zip(together.output.logprobs or (), answer, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
