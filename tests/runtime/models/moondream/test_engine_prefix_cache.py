"""Answers with the prefix cache are those without it, and only what is complete is shared."""

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kestrel_runtime.api.events import Finished
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
)
from kestrel_runtime.engine import preprocessing
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.execution.step_runner import StepHandle, StepRunner
from kestrel_runtime.imaging.decoding import decode_image
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.batch import Batch
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL
from tests.runtime.models.moondream.engines import served

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
IMAGES = [path.read_bytes() for path in sorted(MD3_SMALL.glob("image_*.png"))][:2]
LONG = "Tell me all about the oceans, the rivers, the lakes and what lives in each of them. " * 2
PREFIX = 82
"""Positions of the first token and of an image of the shallow models."""
WHOLE_PAGES = 96
"""Positions of "What is in this image?" about an image that fill pages."""
MAX_WAIT_S = 30.0


def questions() -> list[Request]:
    """Every way in which prompts begin alike: images, questions, values of tokens, texts."""
    drawn = SamplingParams(temperature=1.0, max_tokens=6, seed=3)
    first, second = IMAGES
    return [
        Query("What is in this image?", first, sampling=GREEDY),
        Query("What is in this image, and where?", first, sampling=GREEDY),
        Query("license", first, reasoning=True, sampling=drawn),
        Query("Here?", first, spatial_refs=(PointRef(0.25, 0.75),), sampling=GREEDY),
        Query("Here?", first, spatial_refs=(PointRef(0.25, 0.5),), sampling=GREEDY),
        Caption(first, "short", sampling=GREEDY),
        Point("copy", first, max_objects=2),
        Detect("License", first, max_objects=2),
        Query("What is in this image?", second, sampling=GREEDY),
        Query("Here?", second, spatial_refs=(PointRef(0.25, 0.75),), sampling=GREEDY),
        Point("copy", second, max_objects=2),
        Query(LONG, sampling=GREEDY),
        Query(f"{LONG}And why?", sampling=drawn),
    ]


async def answer(engine: LocalEngine, request: Request, **caller: Any) -> Finished:
    return await engine.submit(request, **caller).result()


async def wanted(loaded: LoadedModel, requests: Sequence[Request]) -> list[object]:
    """The answers of an engine without a cache, one after the other."""
    async with served(loaded, prefix_cache=False, image_cache_bytes=0) as engine:
        return [(await answer(engine, request)).output for request in requests]


def with_policy(request: Request, policy: CachePolicy) -> Request:
    return replace(request, options=RequestOptions(cache=policy))


@pytest.fixture(scope="module", params=[MD2_SMALL, MD3_SMALL], ids=lambda folder: folder.name)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return request.getfixturevalue("shallow2" if request.param is MD2_SMALL else "shallow3")


@pytest.fixture(scope="module")
def known() -> dict[int, list[object]]:
    """What `expected` has found, by model: tests that share one need not come one after the other."""
    return {}


@pytest.fixture
def expected(loaded: LoadedModel, known: dict[int, list[object]]) -> list[object]:
    """The answers to `questions` of an engine without a cache."""
    if id(loaded) not in known:
        known[id(loaded)] = asyncio.run(wanted(loaded, questions()))
    return known[id(loaded)]


async def test_hits_and_misses_answer_as_an_engine_without_a_cache(loaded: LoadedModel, expected: list[object]):
    requests, one = questions(), embedding_bytes(loaded)
    async with served(loaded, image_cache_bytes=2 * one) as engine:
        first = [await answer(engine, request) for request in requests]
        again = [await answer(engine, request) for request in requests]
        load = engine.load()
    assert [finished.output for finished in first] == expected
    assert [finished.output for finished in again] == expected
    assert all(finished.usage.num_cached_tokens >= PREFIX for finished in again[:-2])
    assert all(finished.usage.num_cached_tokens >= 16 for finished in again[-2:]), "of text too"
    for finished in again:
        assert finished.usage.num_cached_tokens < finished.usage.num_input_tokens, "the last position is computed"
    assert load.prefix_cache.num_lookups == 2 * len(requests)
    assert load.prefix_cache.num_hits >= 2 * len(requests) - 4
    assert load.num_used_pages == 0, "what is cached is available"
    assert 0 < load.prefix_cache.used_bytes <= load.prefix_cache.total_bytes
    assert (load.image_cache.used_bytes, load.image_cache.num_evictions) == (2 * one, 0)


# Which pages and embeddings are evicted does not depend on the model, so each case has one of the two.
@pytest.mark.parametrize(("loaded", "num_kv_pages"), [(MD3_SMALL, 10), (MD2_SMALL, 18)], indirect=["loaded"])
async def test_mixed_load_that_forces_evictions_changes_no_answer(
    loaded: LoadedModel, expected: list[object], num_kv_pages: int
):
    requests = questions()
    async with served(loaded, num_kv_pages=num_kv_pages, max_batch_size=4, max_prefill_tokens=64) as engine:
        for _ in range(2):
            finished = await asyncio.gather(*(answer(engine, request) for request in requests))
            assert [item.output for item in finished] == expected
        load = engine.load()
    assert load.prefix_cache.num_evictions > 0
    assert load.num_used_pages == 0


async def test_the_first_of_two_identical_questions_is_cancelled_while_its_prompt_is_computed(
    shallow3: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    request = Query("What is in this image?", IMAGES[0], sampling=GREEDY)
    expected = await wanted(shallow3, [request])
    began, may_go_on, launch = threading.Event(), threading.Event(), StepRunner.launch

    def launch_once_told(runner: StepRunner, batch: Batch, *waits: Any) -> StepHandle:
        began.set()
        may_go_on.wait(MAX_WAIT_S)
        return launch(runner, batch, *waits)

    # Prompts are computed in many steps, because an image has more positions than a step may carry.
    async with served(shallow3, max_prefill_tokens=8) as engine:
        monkeypatch.setattr(StepRunner, "launch", launch_once_told)
        first, second = engine.submit(request), engine.submit(request)
        assert await asyncio.to_thread(began.wait, MAX_WAIT_S)
        first.cancel()
        may_go_on.set()
        assert (await second.result()).output == expected[0]


async def test_two_first_questions_about_an_image_compute_it_once(shallow3: LoadedModel):
    requests = [Query(text, IMAGES[0], sampling=GREEDY) for text in ("What is it?", "Where is it?", "Is it new?")]
    expected = await wanted(shallow3, requests)
    async with served(shallow3) as engine:
        finished = await asyncio.gather(*(answer(engine, request) for request in requests))
        load = engine.load()
    assert [item.output for item in finished] == expected
    found = sorted(item.usage.num_cached_tokens for item in finished)
    assert found[0] == 0
    assert found[1] >= PREFIX
    assert load.num_waiting == 0


async def test_a_request_can_compute_anew_or_bypass_the_cache(shallow3: LoadedModel):
    use = Query("What is in this image?", IMAGES[0], sampling=GREEDY)
    refresh, bypass = with_policy(use, CachePolicy.REFRESH), with_policy(use, CachePolicy.BYPASS)
    async with served(shallow3) as engine:
        cached = [
            (await answer(engine, item)).usage.num_cached_tokens for item in (bypass, use, refresh, bypass, use)
        ]
    assert cached == [0, 0, 0, 0, WHOLE_PAGES]


async def test_namespaces_share_nothing(shallow3: LoadedModel):
    request = Query("What is in this image?", IMAGES[0], sampling=GREEDY)
    async with served(shallow3) as engine:
        await answer(engine, request, namespace="mine")
        assert (await answer(engine, request, namespace="yours")).usage.num_cached_tokens == 0
        assert (await answer(engine, request, namespace="mine")).usage.num_cached_tokens == WHOLE_PAGES


async def test_what_is_removed_is_computed_again(shallow3: LoadedModel):
    first, second = (Query("What is in this image?", image, sampling=GREEDY) for image in IMAGES)
    async with served(shallow3) as engine:

        async def cached() -> list[int]:
            return [
                (await answer(engine, request, namespace=namespace)).usage.num_cached_tokens
                for namespace in ("mine", "yours")
                for request in (first, second)
            ]

        assert await cached() == [0] * 4
        assert await cached() == [WHOLE_PAGES] * 4
        removed = await engine.forget_image(hashlib.sha256(IMAGES[0]).digest(), "mine")
        assert removed.num_pages > 5
        assert await cached() == [0, *[WHOLE_PAGES] * 3]
        await engine.clear_cache("yours")
        assert await cached() == [WHOLE_PAGES, WHOLE_PAGES, 0, 0]
        await engine.clear_cache()
        assert engine.load().prefix_cache.used_bytes == 0
        assert await cached() == [0] * 4


async def test_a_step_that_fails_publishes_nothing_and_forgets_what_is_cached(
    shallow3: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    request = Query("What is in this image?", IMAGES[0], sampling=GREEDY)
    other = Query("What is in this image?", IMAGES[1], sampling=GREEDY)
    expected = await wanted(shallow3, [request, other])
    wait, failures = StepHandle.wait, [RuntimeError("the device failed, once")]

    def fails_once(handle: StepHandle) -> Any:
        if failures:
            raise failures.pop()
        return wait(handle)

    async with served(shallow3) as engine:
        await answer(engine, other)
        monkeypatch.setattr(StepHandle, "wait", fails_once)
        finished = await answer(engine, request)
        assert not failures
        assert finished.output == expected[0]
        assert finished.usage.num_cached_tokens == 0
        again = await answer(engine, other)
        assert (again.output, again.usage.num_cached_tokens) == (expected[1], 0)


async def test_a_known_image_is_decoded_only_where_its_pages_are_gone_when_it_starts(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    requests = [Query(text, IMAGES[0], sampling=GREEDY) for text in ("What is it?", "Where is it?", "Is it new?")]
    expected = await wanted(loaded, requests)
    decoded: list[object] = []

    def counting(image: Any, **settings: Any) -> Any:
        decoded.append(image)
        return decode_image(image, **settings)

    monkeypatch.setattr(preprocessing, "decode_image", counting)
    async with served(loaded, image_cache_bytes=0) as engine:
        assert (await answer(engine, requests[0])).output == expected[0]
        assert (await answer(engine, requests[1])).output == expected[1]
        assert len(decoded) == 1
        # It is found by the worker, and removed before the sequence starts.
        start = vars(engine)["_scheduler"].add
        monkeypatch.setattr(
            vars(engine)["_scheduler"], "add", lambda item: (vars(engine)["_pages"].forget_cached(), start(item))
        )
        last = await answer(engine, requests[2])
        assert (last.output, last.usage.num_cached_tokens) == (expected[2], 0)
        assert len(decoded) == 2


def embedding_bytes(loaded: LoadedModel) -> int:
    config = loaded.model.config
    return config.vision.num_image_tokens * config.text.dim * loaded.model.dtype.itemsize


async def test_embeddings_that_are_found_answer_as_those_that_are_encoded(
    loaded: LoadedModel, expected: list[object]
):
    requests = questions()
    one = embedding_bytes(loaded)
    async with served(loaded, prefix_cache=False, image_cache_bytes=2 * one) as engine:
        for _ in range(2):
            assert [(await answer(engine, request)).output for request in requests] == expected
        load = engine.load().image_cache
    assert load.used_bytes == 2 * one
    assert load.num_evictions == 0
    num_with_image = sum(bool(request.images) for request in requests)
    assert (load.num_lookups, load.num_hits) == (2 * num_with_image, 2 * num_with_image - 2)


@pytest.mark.parametrize(
    ("loaded", "prefix_cache", "num_kept"),
    [(MD2_SMALL, False, 1), (MD3_SMALL, True, 1), (MD3_SMALL, False, 2)],
    indirect=["loaded"],
)
async def test_mixed_load_that_evicts_embeddings_changes_no_answer(
    loaded: LoadedModel, expected: list[object], num_kept: int, *, prefix_cache: bool
):
    requests = questions()
    one = embedding_bytes(loaded)
    settings = {"num_kv_pages": 18, "max_batch_size": 4, "max_prefill_tokens": 64, "max_crops_per_step": 1}
    async with served(loaded, prefix_cache=prefix_cache, image_cache_bytes=num_kept * one, **settings) as engine:
        for _ in range(2):
            finished = await asyncio.gather(*(answer(engine, request) for request in requests))
            assert [item.output for item in finished] == expected
        load = engine.load()
    assert load.image_cache.num_hits > 0 or prefix_cache
    assert load.image_cache.num_evictions > 0 or num_kept > 1 or prefix_cache
    assert load.num_used_pages == 0


async def test_an_image_with_embeddings_is_decoded_only_where_they_are_gone_when_it_starts(
    shallow3: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    requests = [Query(text, IMAGES[0], sampling=GREEDY) for text in ("What is it?", "Where is it?", "Is it new?")]
    expected = await wanted(shallow3, requests)
    decoded: list[object] = []

    def counting(image: Any, **settings: Any) -> Any:
        decoded.append(image)
        return decode_image(image, **settings)

    monkeypatch.setattr(preprocessing, "decode_image", counting)
    async with served(shallow3, prefix_cache=False) as engine:
        assert (await answer(engine, requests[0])).output == expected[0]
        assert (await answer(engine, requests[1])).output == expected[1]
        assert len(decoded) == 1
        start, embeddings = vars(engine)["_scheduler"].add, vars(engine)["_embeddings"]
        monkeypatch.setattr(vars(engine)["_scheduler"], "add", lambda item: (embeddings.forget(), start(item)))
        assert (await answer(engine, requests[2])).output == expected[2]
        assert len(decoded) == 2


async def test_embeddings_are_removed_bypassed_and_encoded_anew(shallow3: LoadedModel):
    use = Query("What is in this image?", IMAGES[0], sampling=GREEDY)
    refresh, bypass = with_policy(use, CachePolicy.REFRESH), with_policy(use, CachePolicy.BYPASS)
    async with served(shallow3, prefix_cache=False) as engine:

        async def hits(request: Request, namespace: str = "") -> int:
            before = engine.load().image_cache.num_hits
            await answer(engine, request, namespace=namespace)
            return engine.load().image_cache.num_hits - before

        assert [await hits(item) for item in (bypass, use, refresh, bypass, use)] == [0, 0, 0, 0, 1]
        assert await hits(use, "another") == 0
        removed = await engine.forget_image(hashlib.sha256(IMAGES[0]).digest(), "")
        assert (removed.num_pages, removed.num_images) == (0, 1)
        assert [await hits(use), await hits(use, "another")] == [0, 1]
        assert (await engine.clear_cache()).num_images == 2
        assert engine.load().image_cache.used_bytes == 0


async def test_a_request_that_is_prepared_while_its_image_is_removed_publishes_nothing(
    shallow3: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    request = Query("What is in this image?", IMAGES[0], sampling=GREEDY)
    began, may_go_on = threading.Event(), threading.Event()

    def decode_when_told(image: Any, **settings: Any) -> Any:
        began.set()
        may_go_on.wait(MAX_WAIT_S)
        return decode_image(image, **settings)

    monkeypatch.setattr(preprocessing, "decode_image", decode_when_told)
    async with served(shallow3) as engine:
        stream = engine.submit(request)
        assert await asyncio.to_thread(began.wait, MAX_WAIT_S)
        await engine.clear_cache("another")
        await engine.forget_image(hashlib.sha256(IMAGES[0]).digest())
        may_go_on.set()
        await stream.result()
        load = engine.load()
        assert (load.image_cache.used_bytes, load.prefix_cache.used_bytes) == (0, 0)


async def test_a_failed_step_leaves_no_embeddings(shallow3: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    requests = [Query("What is in this image?", image, sampling=GREEDY) for image in IMAGES]
    expected = await wanted(shallow3, requests)
    wait, failures = StepHandle.wait, [RuntimeError("the device failed, once")]

    def fails_once(handle: StepHandle) -> Any:
        if failures:
            raise failures.pop()
        return wait(handle)

    async with served(shallow3, prefix_cache=False) as engine:
        assert (await answer(engine, requests[0])).output == expected[0]
        monkeypatch.setattr(StepHandle, "wait", fails_once)
        # Its embeddings are found, forgotten when the step fails, and its image is decoded then.
        assert (await answer(engine, requests[0])).output == expected[0]
        assert not failures
        assert [(await answer(engine, request)).output for request in requests] == expected
