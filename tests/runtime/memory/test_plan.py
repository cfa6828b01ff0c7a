"""How large the key-value cache becomes, and which one is too small to serve with."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
import torch

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError, InvalidRequest
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Caption, Detect, Point, Query, Request, SamplingParams, Segment
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.loading.loaded_model import LoadedModel
from kestrel_runtime.memory import plan as memory_plan
from kestrel_runtime.memory.plan import DeviceReserve, smallest_num_pages
from kestrel_runtime.scheduling.limits import StepBounds
from tests.golden import MD2_SMALL, MD3_SMALL

IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()
PAGE_SIZE = 16


def bytes_per_page(loaded: LoadedModel) -> int:
    return KVCache.bytes_per_page(loaded.model.config.text, PAGE_SIZE, loaded.model.dtype)


def num_pages(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, free_pages: float, **settings: object) -> int:
    """Pages of the cache on a host with memory for `free_pages`."""
    monkeypatch.setattr(memory_plan, "available_memory_bytes", lambda: int(free_pages * bytes_per_page(loaded)))
    return loaded.new_cache(EngineConfig(model="", **settings)).num_pages  # pyright: ignore[reportArgumentType]


def test_the_cache_takes_its_fraction_of_what_the_host_has_left(
    moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_pages(moondream2, monkeypatch, 1000) == 500
    assert num_pages(moondream2, monkeypatch, 1000, kv_fraction=0.25) == 250


def test_beside_a_cpu_it_takes_no_more_than_a_full_batch_needs(
    moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_pages(moondream2, monkeypatch, 10_000, max_batch_size=2) == 2 * 2048 // PAGE_SIZE


def test_a_small_fraction_still_gives_a_typical_context_where_there_is_memory_for_it(
    moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_pages(moondream2, monkeypatch, 1000, kv_fraction=0.001) == 2048 // PAGE_SIZE
    assert num_pages(moondream2, monkeypatch, 60, kv_fraction=0.5) == 60  # and never more than there is


def test_a_pod_of_sixteen_gibibytes_keeps_moondream_2_within_them(
    moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is left of 16 GiB beside 7.7 GB of weights; a page of the real model takes 6.3 MB in float32.
    free = 16 * 2**30 - 7_700_000_000
    monkeypatch.setattr(KVCache, "bytes_per_page", staticmethod(lambda *_: 2 * 24 * 16 * 2048 * 4))
    monkeypatch.setattr(memory_plan, "available_memory_bytes", lambda: free)
    pages = memory_plan._num_pages(
        EngineConfig(model=""),
        moondream2.model.config,
        torch.device("cpu"),
        torch.float32,
        torch.float32,
    )
    assert pages * 2 * 24 * 16 * 2048 * 4 <= free / 2


@pytest.mark.parametrize("kv_fraction", [0.5, 1.0])
def test_on_a_gpu_the_reserve_for_steps_and_graphs_fits_beside_the_cache(
    moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch, kv_fraction: float
) -> None:
    config, dtype = moondream2.model.config, moondream2.model.dtype
    bounds = StepBounds.of(EngineConfig(), "cuda")
    for free_gib in (0.1, 1, 8, 24, 140):
        free = int(free_gib * 2**30)
        monkeypatch.setattr(memory_plan, "free_bytes", lambda _, free=free: free)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        settings = EngineConfig(model="", kv_fraction=kv_fraction)
        pages = memory_plan._num_pages(settings, config, torch.device("cuda"), dtype, dtype)
        reserve = DeviceReserve.of(config, bounds, dtype, free)
        cache = pages * bytes_per_page(moondream2)
        assert cache <= max(0, free - reserve.total)
        assert reserve.graphs <= free / 8


def test_a_model_without_prompts_needs_room_for_its_image_alone(moondream2: LoadedModel) -> None:
    config = moondream2.model.config
    silent = replace(config, tokenizer=replace(config.tokenizer, templates={}))
    assert smallest_num_pages(silent, 1) == config.text.prefix_attn + 1


def test_a_cache_of_one_page_refuses_to_start_and_says_what_is_needed(moondream3: LoadedModel) -> None:
    with pytest.raises(CheckpointError, match=r"1 pages \(16 tokens\) cannot hold .* 47 pages \(752 tokens\)"):
        LocalEngine(moondream3, EngineConfig(model="", num_kv_pages=1))


@pytest.mark.parametrize("page_size", [5, 16])
@pytest.mark.parametrize("model", ["moondream2", "moondream3"])
async def test_the_smallest_cache_serves_every_skill_and_one_page_less_does_not_start(
    model: str, page_size: int, request: pytest.FixtureRequest
) -> None:
    loaded: LoadedModel = request.getfixturevalue(model)
    least = smallest_num_pages(loaded.model.config, page_size)
    with pytest.raises(CheckpointError):
        LocalEngine(loaded, EngineConfig(model="", num_kv_pages=least - 1, page_size=page_size))
    engine = LocalEngine(loaded, EngineConfig(model="", num_kv_pages=least, page_size=page_size))
    sampling = SamplingParams(max_tokens=1)
    requests: list[Request] = [
        Query("a", IMAGE, sampling=sampling),
        *(Caption(IMAGE, length, sampling=sampling) for length in ("short", "normal", "long")),
        Point("a", IMAGE, max_objects=1),
        Detect("a", IMAGE, max_objects=1),
        Segment("a", IMAGE),
    ]
    try:
        served = [request for request in requests if request.skill in engine.info.skills]
        assert len(served) > 4
        for finished in await asyncio.gather(*(engine.submit(request).result() for request in served)):
            assert isinstance(finished, Finished)
        with pytest.raises(InvalidRequest):
            await engine.submit(Query("word " * 400, IMAGE)).result()
    finally:
        engine.close()


def test_what_the_cache_holds_is_logged_at_the_start(
    moondream2: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kestrel_runtime.engine.engine"):
        LocalEngine(moondream2, EngineConfig(model=str(MD2_SMALL), num_kv_pages=192)).close()
    assert "KV cache: 3,072 tokens, 0.0 GiB, 1.5 requests of full length (2,048 tokens)" in caplog.text


def test_pages_that_the_device_has_no_memory_for_are_an_error_in_words(
    moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("secret")

    monkeypatch.setattr(KVCache, "__init__", refuse)
    with pytest.raises(CheckpointError, match="no memory for a key-value cache of 1000 pages"):
        moondream2.new_cache(EngineConfig(model="", num_kv_pages=1000))
