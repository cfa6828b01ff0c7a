"""What a Moondream needs of memory, and which cache is too small to serve with."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
import torch

from kestrel_runtime.api.config import MIB, EngineConfig
from kestrel_runtime.api.errors import CheckpointError, InvalidRequest
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Caption, Detect, Point, Query, Request, SamplingParams, Segment
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.execution.kv_cache import KVCache
from kestrel_runtime.execution.logits import AllowedTokens, LogitAdjustments
from kestrel_runtime.memory import plan as memory_plan
from kestrel_runtime.memory.plan import MemoryNeeds
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.memory_needs import (
    memory_needs,
    new_cache,
    smallest_num_pages,
    weight_bytes,
)
from kestrel_runtime.scheduling.limits import StepBounds
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL

IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()
BOUNDS = StepBounds(max_batch_size=3, max_prefill_tokens=777, max_tiles=5)


def needs_of(loaded: LoadedModel, **settings: object) -> MemoryNeeds:
    return memory_needs(
        loaded.model,
        EngineConfig(model="", **settings),  # pyright: ignore[reportArgumentType]
        BOUNDS,
        step_bytes=1_234_567,
        available_bytes=8_000_000_011,
        with_graphs=True,
        host_image_bytes=12_347,
    )


def test_a_page_takes_what_its_keys_and_values_take(moondream2: LoadedModel) -> None:
    cache = new_cache(moondream2.model, EngineConfig(page_size=5), 7)
    assert needs_of(moondream2, page_size=5).page_bytes * 7 == cache.num_bytes
    assert needs_of(moondream2, page_size=5, kv_dtype="float8").page_bytes * 4 * 7 == cache.num_bytes


def test_a_full_batch_is_one_of_typical_contexts(moondream2: LoadedModel) -> None:
    assert needs_of(moondream2, page_size=5).batch_pages == 3 * 410


def test_graphs_get_a_pool_for_the_largest_step_and_an_eighth_of_what_is_available_beside_it(
    moondream2: LoadedModel,
) -> None:
    needs = needs_of(moondream2)
    num_rows, vocab_size = BOUNDS.max_batch_size + 2, moondream2.model.config.text.vocab_size
    adjustments = LogitAdjustments.num_bytes(num_rows, vocab_size)
    masks = AllowedTokens.num_bytes(num_rows, vocab_size)
    assert adjustments > masks > 0
    assert needs.activation_bytes == 1_234_567 + adjustments + masks
    assert needs.graph_bytes == 1_234_567 + 1_000_000_001


def test_graphs_never_get_more_than_two_gibibytes_beside_their_pool(moondream2: LoadedModel) -> None:
    needs = memory_needs(
        moondream2.model,
        EngineConfig(),
        BOUNDS,
        step_bytes=1_234_567,
        available_bytes=140_000_000_003,
        with_graphs=True,
        host_image_bytes=0,
    )
    assert needs.graph_bytes == 1_234_567 + 2048 * MIB


def test_without_graphs_nothing_is_kept_for_them(moondream2: LoadedModel) -> None:
    needs = memory_needs(
        moondream2.model,
        EngineConfig(),
        BOUNDS,
        step_bytes=7,
        available_bytes=2**33,
        with_graphs=False,
        host_image_bytes=1,
    )
    assert (needs.graph_bytes, needs.image_bytes) == (0, 1)


def test_all_weights_that_are_in_memory_are_counted(moondream2: LoadedModel) -> None:
    assert weight_bytes(moondream2.model) == 4 * moondream2.num_parameters


def test_a_model_without_prompts_needs_room_for_its_image_alone(moondream2: LoadedModel) -> None:
    config = moondream2.model.config
    silent = replace(config, tokenizer=replace(config.tokenizer, templates={}))
    assert smallest_num_pages(silent, 1) == config.text.prefix_attn + 1


def test_a_cache_of_one_page_refuses_to_start_and_says_what_is_needed(moondream3: LoadedModel) -> None:
    with pytest.raises(CheckpointError, match=r"1 pages cannot hold .* 47 pages are the least"):
        LocalEngine(moondream3, EngineConfig(model="", num_kv_pages=1))


def test_a_host_without_memory_for_the_cache_refuses_to_start(
    moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "available_memory_bytes", lambda: 700 * MIB)
    with pytest.raises(CheckpointError, match=r"largest part is taken by: .*images 0\.67 GiB"):
        LocalEngine(moondream2, EngineConfig(model=""))


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


def test_what_the_cache_holds_and_how_memory_is_divided_is_logged_at_the_start(
    moondream2: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kestrel_runtime.engine.engine"):
        engine = LocalEngine(moondream2, EngineConfig(model=str(MD2_SMALL), num_kv_pages=192))
        engine.close()
    assert "KV cache: 3,072 tokens, 0.0 GiB, 1.5 requests of full length (2,048 tokens)" in caplog.text
    assert engine.info.memory is not None
    assert f"memory of cpu:\n{engine.info.memory.table()}" in caplog.text
    assert engine.info.memory.weight_bytes == weight_bytes(moondream2.model)
    assert engine.info.memory.cache_bytes == 192 * needs_of(moondream2).page_bytes


def test_pages_that_the_device_has_no_memory_for_are_an_error_in_words(
    moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("secret")

    monkeypatch.setattr(KVCache, "__init__", refuse)
    with pytest.raises(CheckpointError, match="no memory for a key-value cache of 1000 pages"):
        new_cache(moondream2.model, EngineConfig(), 1000)
