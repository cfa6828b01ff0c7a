"""Embeddings of images are those of the reference, in any batch, from the cache or not, and need no pages."""

import asyncio
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from kestrel_runtime.api.errors import InvalidRequest, NumbersOverflowed
from kestrel_runtime.api.events import EmbedOutput, Finished, PatchEmbeddings, Started
from kestrel_runtime.api.requests import CachePolicy, Embed, Point, Query, Request, RequestOptions, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.execution.step_runner import StepHandle, StepRunner
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.verify.tolerances import FLOAT32_RELATIVE
from kestrel_runtime.scheduling.batch import Batch
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL
from tests.runtime.models.moondream.engines import served

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)
NUM_PATCHES = 81
"""The patches of an image in the shallow models."""


class Embedded(NamedTuple):
    mean: NDArray[Any]
    patches: NDArray[Any]
    finished: Finished


def images_of(folder: Any) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("image_*.png"))]


async def embedded(engine: LocalEngine, request: Embed, **caller: Any) -> Embedded:
    """Reads the whole stream, whose pieces follow each other."""
    data, num_patches, is_started = b"", 0, False
    async for event in engine.submit(request, **caller):
        if isinstance(event, PatchEmbeddings):
            assert is_started
            assert event.first_patch == num_patches
            assert len(event.data) <= 256 * 2**10
            data += event.data
            num_patches += event.num_patches
        elif isinstance(event, Finished):
            assert isinstance(event.output, EmbedOutput)
            assert num_patches in (0, event.output.num_patches)
            mean = np.array(event.output.mean, np.float32)
            patches = np.frombuffer(data, request.dtype).reshape(num_patches, mean.size)
            return Embedded(mean, patches, event)
        else:
            assert isinstance(event, Started)
            is_started = True
    raise AssertionError("the stream has no end")


def error_of(found: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.fixture(params=[MD2_SMALL, MD3_SMALL], ids=lambda folder: folder.name)
def small(request: pytest.FixtureRequest) -> tuple[LoadedModel, Any]:
    name = "moondream2" if request.param is MD2_SMALL else "moondream3"
    return request.getfixturevalue(name), request.param


async def test_embeddings_are_those_of_the_reference_alone_and_among_other_requests(small: tuple[LoadedModel, Any]):
    loaded, folder = small
    expected = load_file(folder / "expected.safetensors")
    requests = [Embed(image, patches=True, dtype="float32") for image in images_of(folder)]
    others: list[Request] = [Query("What?", images_of(folder)[1], sampling=GREEDY), Query("Why?", sampling=GREEDY)]
    async with served(loaded, image_cache_bytes=0, prefix_cache=False) as engine:
        alone = await embedded(engine, requests[1])
        streams = [engine.submit(other) for other in others]
        together = await asyncio.gather(*(embedded(engine, request) for request in requests))
        for stream in streams:
            await stream.result()
        assert engine.load().num_used_pages == 0
    for index, found in [*enumerate(together), (1, alone)]:
        wanted = expected[f"{index}.image_embeddings_every_9th"]
        assert error_of(found.patches[::9], wanted) <= FLOAT32_RELATIVE
        assert error_of(found.mean, found.patches.mean(0)) <= 1e-5
    assert error_of(together[1].patches, alone.patches) <= 1e-5


async def test_embeddings_have_the_format_and_the_length_that_a_request_asks_for(shallow2: LoadedModel):
    image = images_of(MD2_SMALL)[0]
    async with served(shallow2) as engine:
        exact = await embedded(engine, Embed(image, patches=True, dtype="float32"))
        half = await embedded(engine, Embed(image, patches=True))
        unit = await embedded(engine, Embed(image, patches=True, dtype="float32", normalize=True))
        mean = await embedded(engine, Embed(image))
    assert exact.patches.shape == (NUM_PATCHES, exact.mean.size)
    assert (half.patches == exact.patches.astype(np.float16)).all()
    assert np.allclose(np.linalg.norm(unit.patches, axis=1), 1.0, atol=1e-6)
    assert np.allclose(unit.mean, exact.mean / np.linalg.norm(exact.mean), atol=1e-6)
    assert (mean.mean == exact.mean).all()
    assert mean.patches.size == 0


async def test_cached_embeddings_are_not_computed_again(shallow2: LoadedModel):
    image = images_of(MD2_SMALL)[0]
    request = Embed(image, patches=True, dtype="float32")
    bypass = replace(request, options=RequestOptions(cache=CachePolicy.BYPASS))
    refresh = replace(request, options=RequestOptions(cache=CachePolicy.REFRESH))
    async with served(shallow2, prefix_cache=False) as engine:
        question = await engine.submit(Query("What?", image, sampling=GREEDY)).result()
        answers = [await embedded(engine, each) for each in (request, bypass, refresh, request)]
        hits = engine.load().image_cache.num_hits
        elsewhere = await embedded(engine, request, namespace="another")
        await engine.clear_cache()
        cleared = await embedded(engine, request)
        later = await engine.submit(Query("What?", image, sampling=GREEDY)).result()
        assert engine.load().decoded_image_bytes == 0
    assert [answer.finished.usage.num_cached_tokens for answer in answers] == [NUM_PATCHES, 0, 0, NUM_PATCHES]
    assert hits == 2
    assert elsewhere.finished.usage.num_cached_tokens == cleared.finished.usage.num_cached_tokens == 0
    assert later.output == question.output
    for answer in (*answers, elsewhere, cleared):
        assert (answer.patches == answers[0].patches).all()
        assert answer.finished.usage.num_input_tokens == answer.finished.usage.num_image_tokens == NUM_PATCHES
        assert answer.finished.usage.num_output_tokens == 0
        assert answer.finished.image_size_px == question.image_size_px


async def test_many_requests_for_embeddings_share_rows_and_entries_with_others(shallow3: LoadedModel):
    images = images_of(MD3_SMALL)
    wanted: list[Embedded] = []
    async with served(shallow3) as engine:
        wanted = [await embedded(engine, Embed(image, patches=True)) for image in images]
    async with served(shallow3, max_batch_size=2, max_crops_per_step=3, image_cache_bytes=0) as engine:
        requests = [Embed(images[index % len(images)], patches=True) for index in range(8)]
        streams = [engine.submit(Point("thing", images[0], max_objects=2)) for _ in range(3)]
        found = await asyncio.gather(*(embedded(engine, request) for request in requests))
        for stream in streams:
            await stream.result()
        assert engine.load().num_used_pages == 0
    for index, each in enumerate(found):
        assert error_of(each.patches.astype(np.float32), wanted[index % len(images)].patches) <= 2e-3


async def test_a_request_that_is_cancelled_leaves_nothing(shallow2: LoadedModel):
    image = images_of(MD2_SMALL)[0]
    async with served(shallow2) as engine:
        streams = [engine.submit(Embed(image, patches=True)) for _ in range(4)]
        for stream in streams[1:]:
            stream.cancel()
        assert (await streams[0].result()).output == (await engine.submit(Embed(image)).result()).output
        load = engine.load()
        assert (load.num_running, load.num_waiting, load.num_used_pages) == (0, 0, 0)


async def test_embeddings_are_read_again_after_a_failed_step(
    shallow2: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    launch, failures = StepRunner.launch, [ValueError("for the test")] * 2

    def failing(runner: StepRunner, batch: Batch, *others: Any) -> StepHandle:
        handle = launch(runner, batch, *others)
        if batch.read and failures:
            raise failures.pop()
        return handle

    image = images_of(MD2_SMALL)[0]
    async with served(shallow2) as engine:
        wanted = await embedded(engine, Embed(image, patches=True))
        monkeypatch.setattr(StepRunner, "launch", failing)
        found = await embedded(engine, Embed(image, patches=True))
    assert not failures
    assert (found.patches == wanted.patches).all()


async def test_numbers_that_do_not_fit_the_format_are_an_error(
    shallow2: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    embeddings = StepRunner.image_embeddings
    monkeypatch.setattr(StepRunner, "image_embeddings", lambda *given: embeddings(*given) * 1e9)
    image = images_of(MD2_SMALL)[0]
    async with served(shallow2) as engine:
        with pytest.raises(NumbersOverflowed):
            await embedded(engine, Embed(image, patches=True))
        assert (await embedded(engine, Embed(image, patches=True, dtype="float32"))).patches.max() > 65504


def test_a_request_for_embeddings_names_all_its_mistakes():
    with pytest.raises(InvalidRequest) as refused:
        Embed(b"", dtype="int8", options=RequestOptions(adapter="colours"))
    assert [item.field for item in refused.value.violations] == ["image", "dtype", "options.adapter"]
