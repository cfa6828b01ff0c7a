"""Answers with the crop cache are those without it, and only what one namespace has shown is found."""

import asyncio
import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import CacheLoad
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import CachePolicy, Query, Request, RequestOptions, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.execution.step_runner import StepHandle
from kestrel_runtime.imaging.device_crops import CropDigests
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from tests.reference_fixtures import MD3_SMALL
from tests.runtime.models.moondream.engines import served

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
ALONE = {"prefix_cache": False, "image_cache_bytes": 0}
"""No other cache answers."""


def encoded(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def repainted(picture: Image.Image, place: tuple[int, int], size: int = 5) -> Image.Image:
    """The picture with a red square."""
    changed = picture.copy()
    x, y = place
    ImageDraw.Draw(changed).rectangle((x, y, x + size, y + size), fill="red")
    return changed


WHOLE = Image.open(next(iter(sorted(MD3_SMALL.glob("image_*.png"))))).convert("RGB")
CORNER = repainted(WHOLE, (1, 1))
OPPOSITE = repainted(WHOLE, (WHOLE.width - 8, WHOLE.height - 8))
TINY = WHOLE.resize((9, 7))


def ask(picture: Image.Image, *, policy: CachePolicy = CachePolicy.USE, logprobs: int | None = None) -> Query:
    sampling = replace(GREEDY, logprobs=logprobs)
    return Query("What is this?", encoded(picture), sampling=sampling, options=RequestOptions(cache=policy))


def crops_of(loaded: LoadedModel, picture: Image.Image) -> list[bytes]:
    crops = MoondreamCropping(loaded.model.config.vision).make_crops(picture)
    return [crop.tobytes() for crop in crops.pixels]


def crop_bytes(loaded: LoadedModel) -> int:
    vision = loaded.model.config.vision
    return vision.num_image_tokens * vision.enc_dim * loaded.model.dtype.itemsize


async def answer(engine: LocalEngine, request: Request, **caller: Any) -> Finished:
    return await engine.submit(request, **caller).result()


async def num_encoded(engine: LocalEngine, request: Request, **caller: Any) -> int:
    """The crops that a request has encoded and not found."""
    before = engine.load().crop_cache
    await answer(engine, request, **caller)
    after = engine.load().crop_cache
    return (after.num_lookups - before.num_lookups) - (after.num_hits - before.num_hits)


async def outputs(loaded: LoadedModel, requests: Sequence[Request], **settings: Any) -> list[object]:
    async with served(loaded, **ALONE, **settings) as engine:
        return [(await answer(engine, request)).output for request in requests]


async def test_a_picture_of_which_a_part_has_changed_encodes_only_the_crops_that_show_it(shallow3: LoadedModel):
    pictures = [WHOLE, CORNER, OPPOSITE, CORNER]
    requests = [ask(picture) for picture in pictures]
    expected = await outputs(shallow3, requests, crop_cache_bytes=0)
    seen: set[bytes] = set()
    async with served(shallow3, **ALONE) as engine:
        for picture, request, output in zip(pictures, requests, expected, strict=True):
            crops = crops_of(shallow3, picture)
            before = engine.load().crop_cache
            assert (await answer(engine, request)).output == output
            after = engine.load().crop_cache
            num_new = len(set(crops) - seen)
            assert num_new < len(crops) or not seen
            seen.update(crops)
            assert after.num_lookups - before.num_lookups == len(crops)
            assert after.num_hits - before.num_hits == len(crops) - num_new
        load = engine.load().crop_cache
    assert load.used_bytes == len(seen) * crop_bytes(shallow3)
    assert load.total_bytes == 128 * crop_bytes(shallow3)


@pytest.mark.parametrize("crops_per_step", [1, 4])
async def test_deterministic_answers_have_the_same_bits_with_found_crops(
    shallow2: LoadedModel, crops_per_step: int
):
    requests = [ask(picture, logprobs=3) for picture in (WHOLE, CORNER, OPPOSITE, TINY, WHOLE)]
    settings = {"deterministic": True, "max_crops_per_step": crops_per_step}
    expected = await outputs(shallow2, requests, crop_cache_bytes=0, **settings)
    async with served(shallow2, **ALONE, **settings) as engine:
        finished = await asyncio.gather(*(answer(engine, request) for request in requests))
        assert [item.output for item in finished] == expected
        assert engine.load().crop_cache.num_hits > 0


async def test_equal_crops_of_one_picture_are_encoded_once(shallow3: LoadedModel):
    assert len(crops_of(shallow3, TINY)) == 2
    async with served(shallow3, **ALONE) as engine:
        assert await num_encoded(engine, ask(TINY)) == 1


@pytest.mark.parametrize("num_kept", [1, 3])
async def test_evicted_crops_change_no_answer(shallow3: LoadedModel, num_kept: int):
    requests = [ask(picture) for picture in (WHOLE, CORNER, TINY, OPPOSITE)]
    expected = await outputs(shallow3, requests, crop_cache_bytes=0)
    settings = {"max_batch_size": 3, "max_crops_per_step": 2, "num_kv_pages": 18}
    async with served(shallow3, **ALONE, crop_cache_bytes=num_kept * crop_bytes(shallow3), **settings) as engine:
        for _ in range(2):
            finished = await asyncio.gather(*(answer(engine, request) for request in requests))
            assert [item.output for item in finished] == expected
        load = engine.load().crop_cache
    assert load.num_evictions > 0
    assert load.used_bytes == num_kept * crop_bytes(shallow3)


async def test_crops_are_bypassed_and_encoded_anew(shallow3: LoadedModel):
    async with served(shallow3, **ALONE) as engine:

        async def change(policy: CachePolicy) -> tuple[int, int]:
            before = engine.load().crop_cache
            await answer(engine, ask(WHOLE, policy=policy))
            after = engine.load().crop_cache
            return after.num_hits - before.num_hits, after.used_bytes - before.used_bytes

        num_crops, one = len(crops_of(shallow3, WHOLE)), crop_bytes(shallow3)
        assert await change(CachePolicy.BYPASS) == (0, 0)
        assert await change(CachePolicy.REFRESH) == (0, num_crops * one)
        assert await change(CachePolicy.REFRESH) == (0, 0), "replaced"
        assert await change(CachePolicy.USE) == (num_crops, 0)


async def test_namespaces_share_no_crops_and_lose_them_alone(shallow3: LoadedModel):
    num_crops = len(crops_of(shallow3, WHOLE))
    async with served(shallow3, **ALONE) as engine:
        assert await num_encoded(engine, ask(WHOLE), namespace="mine") == num_crops
        assert await num_encoded(engine, ask(WHOLE), namespace="yours") == num_crops
        await engine.forget_image(hashlib.sha256(encoded(TINY)).digest(), "mine")
        assert await num_encoded(engine, ask(WHOLE), namespace="yours") == 0
        assert await num_encoded(engine, ask(WHOLE), namespace="mine") == num_crops, "a crop knows no images"
        assert (await engine.clear_cache("yours")).num_crops == num_crops
        assert await num_encoded(engine, ask(WHOLE), namespace="mine") == 0
        assert await num_encoded(engine, ask(WHOLE), namespace="yours") == num_crops
        await engine.clear_cache()
        assert engine.load().crop_cache.used_bytes == 0


async def test_a_failed_step_empties_the_pool(shallow3: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    requests = [ask(WHOLE), ask(CORNER)]
    expected = await outputs(shallow3, requests, crop_cache_bytes=0)
    wait, failures = StepHandle.wait, [RuntimeError("the device failed, once")]

    def fails_once(handle: StepHandle) -> Any:
        if failures:
            raise failures.pop()
        return wait(handle)

    async with served(shallow3, **ALONE) as engine:
        assert (await answer(engine, requests[0])).output == expected[0]
        monkeypatch.setattr(StepHandle, "wait", fails_once)
        assert (await answer(engine, requests[1])).output == expected[1]
        assert not failures
        assert engine.load().crop_cache.used_bytes == len(crops_of(shallow3, CORNER)) * crop_bytes(shallow3)


async def test_digests_of_a_device_are_awaited_only_where_crops_have_come_again(
    shallow3: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    pictures = [WHOLE, CORNER, OPPOSITE, CORNER]
    expected = await outputs(shallow3, [ask(picture) for picture in pictures], crop_cache_bytes=0)
    get = CropDigests.get

    def is_slow(digests: CropDigests, *, waits: bool) -> Sequence[bytes] | None:
        return get(digests, waits=True) if waits else None

    monkeypatch.setattr(CropDigests, "get", is_slow)
    async with served(shallow3, **ALONE, resize_on_device=True) as engine:
        counts: list[int] = []
        for picture, output in zip(pictures, expected, strict=True):
            before = engine.load().crop_cache
            assert (await answer(engine, ask(picture))).output == output
            after = engine.load().crop_cache
            counts.append((after.num_lookups - before.num_lookups) - (after.num_hits - before.num_hits))
    num_crops = len(crops_of(shallow3, WHOLE))
    assert counts[:2] == [num_crops] * 2, "the second picture shows that crops come again"
    assert counts[2] < num_crops
    assert counts[3] == 0


async def test_a_cache_of_no_bytes_is_off(shallow3: LoadedModel):
    async with served(shallow3, **ALONE, crop_cache_bytes=0) as engine:
        await answer(engine, ask(WHOLE))
        assert engine.load().crop_cache == CacheLoad()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"deterministic": True},
        {"vision_backend": "fused-float8", "text_backend": "fused-float8"},
    ],
    ids=["float32", "deterministic", "float8"],
)
async def test_a_gpu_finds_crops_once_their_namespace_has_shown_some_again(settings: dict[str, Any]):
    config = EngineConfig(model=str(MD3_SMALL), device="cuda", num_kv_pages=512, **ALONE, **settings)
    requests = [ask(picture) for picture in (WHOLE, CORNER, OPPOSITE, WHOLE, CORNER)]

    async def answers(engine: LocalEngine) -> list[object]:
        return [(await answer(engine, request)).output for request in requests]

    without = LocalEngine.start(replace(config, crop_cache_bytes=0))
    try:
        expected = await answers(without)
    finally:
        await asyncio.to_thread(without.close)
    engine = LocalEngine.start(config)
    try:
        found = await answers(engine)
        if "text_backend" not in settings:  # there the number of rows may change the last bits
            assert found == expected
        assert await num_encoded(engine, requests[0]) == 0
        assert await num_encoded(engine, requests[0], namespace="another") >= 1
        assert engine.load().crop_cache.num_hits > 0
    finally:
        await asyncio.to_thread(engine.close)
