"""What a Moondream needs of memory, and which cache is too small to serve with."""

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

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
from kestrel_runtime.models.moondream import memory
from kestrel_runtime.models.moondream.adapters.slabs import AdapterSlabs
from kestrel_runtime.models.moondream.backends import Backends
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.models.moondream.memory import (
    estimated_step_bytes,
    largest_encode,
    largest_prefill,
    memory_needs,
    new_cache,
    peak_bytes,
    smallest_num_pages,
    step_bytes,
    weight_bytes,
)
from kestrel_runtime.scheduling.limits import StepBounds
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL

IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()
BOUNDS = StepBounds(max_batch_size=3, max_prefill_tokens=777, max_crops=5)


def needs_of(loaded: LoadedModel, **settings: Any) -> MemoryNeeds:
    return memory_needs(
        loaded.model,
        EngineConfig(model="", **settings),
        BOUNDS,
        step_bytes=1_234_567,
        available_bytes=8_000_000_011,
        with_graphs=True,
        host_image_bytes=12_347,
    )


def test_a_page_takes_what_its_keys_and_values_take(moondream2: LoadedModel):
    cache = new_cache(moondream2.model, EngineConfig(page_size=5), 7)
    assert needs_of(moondream2, page_size=5).page_bytes * 7 == cache.num_bytes
    assert needs_of(moondream2, page_size=5, kv_dtype="float8").page_bytes * 4 * 7 == cache.num_bytes


def test_a_full_batch_is_one_of_typical_contexts(moondream2: LoadedModel):
    assert needs_of(moondream2, page_size=5).batch_pages == 3 * 410


def test_graphs_get_a_pool_for_the_largest_step_and_an_eighth_of_what_is_available_beside_it(
    moondream2: LoadedModel,
):
    needs = needs_of(moondream2)
    num_rows, vocab_size = BOUNDS.max_batch_size + 2, moondream2.model.config.text.vocab_size
    adjustments = LogitAdjustments.num_bytes(num_rows, vocab_size)
    masks = AllowedTokens.num_bytes(num_rows, vocab_size)
    assert adjustments > masks > 0
    assert needs.activation_bytes == 1_234_567 + adjustments + masks
    assert needs.graph_bytes == 1_234_567 + 1_000_000_001


def test_graphs_never_get_more_than_two_gibibytes_beside_their_pool(moondream2: LoadedModel):
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


def test_without_graphs_nothing_is_kept_for_them(moondream2: LoadedModel):
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


def test_all_weights_that_are_in_memory_are_counted(moondream2: LoadedModel):
    assert weight_bytes(moondream2.model) == 4 * moondream2.num_parameters


def test_a_model_without_prompts_needs_room_for_its_image_alone(moondream2: LoadedModel):
    config = moondream2.model.config
    silent = replace(config, tokenizer=replace(config.tokenizer, templates={}))
    assert smallest_num_pages(silent, 1) == config.text.prefix_attn + 1


def test_a_cache_of_one_page_refuses_to_start_and_says_what_is_needed(moondream3: LoadedModel):
    with pytest.raises(CheckpointError, match=r"1 pages cannot hold .* 47 pages are the least"):
        LocalEngine(moondream3, EngineConfig(model="", num_kv_pages=1))


def test_a_host_without_memory_for_the_cache_refuses_to_start(
    moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory_plan, "available_memory_bytes", lambda: 700 * MIB)
    with pytest.raises(CheckpointError, match=r"largest part is taken by: .*images 0\.67 GiB"):
        LocalEngine(moondream2, EngineConfig(model=""))


@pytest.mark.parametrize("page_size", [5, 16])
@pytest.mark.parametrize("model", ["shallow2", "shallow3"])
async def test_the_smallest_cache_serves_every_skill_and_one_page_less_does_not_start(
    model: str, page_size: int, request: pytest.FixtureRequest
):
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
):
    with caplog.at_level(logging.INFO, logger="kestrel_runtime.engine.build"):
        engine = LocalEngine(moondream2, EngineConfig(model=str(MD2_SMALL), num_kv_pages=192))
        engine.close()
    assert "KV cache: 3,072 tokens, 0.0 GiB, 1.5 requests of full length (2,048 tokens)" in caplog.text
    assert engine.info.memory is not None
    assert f"memory of cpu:\n{engine.info.memory.table()}" in caplog.text
    assert engine.info.memory.weight_bytes == weight_bytes(moondream2.model)
    assert engine.info.memory.cache_bytes == 192 * needs_of(moondream2).page_bytes


def test_pages_that_the_device_has_no_memory_for_are_an_error_in_words(
    moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("secret")

    monkeypatch.setattr(KVCache, "__init__", refuse)
    with pytest.raises(CheckpointError, match="no memory for a key-value cache of 1000 pages"):
        new_cache(moondream2.model, EngineConfig(), 1000)


LARGEST_BOUNDS = StepBounds(max_batch_size=4, max_prefill_tokens=256, max_crops=5)
FUSED = EngineConfig(text_backend="fused", vision_backend="fused")


def fused_backends(loaded: LoadedModel) -> Backends:
    return Backends.of(loaded.model, ExecutionConfig.of(FUSED, "cpu", loaded.model), max_batch_size=4)


class OnADevice:
    """A model that says to be on a CUDA device, whose tensors are on the CPU."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.config, self.dtype = loaded.model.config, loaded.model.dtype
        self.num_asked = 0

    @property
    def device(self) -> Any:
        self.num_asked += 1
        return SimpleNamespace(type="cuda") if self.num_asked == 1 else torch.device("cpu")


@torch.inference_mode()
def test_the_largest_prefill_has_as_many_tokens_as_a_step_may_carry_and_needs_one_page(moondream2: LoadedModel):
    paths: Any = fused_backends(moondream2)
    seen: list[int] = []
    prefill = paths.text.prefill

    def look(embeddings: Tensor, *rest: Any) -> Tensor:
        seen.append(len(embeddings))
        return prefill(embeddings, *rest)

    paths.text.prefill = look
    cache = new_cache(moondream2.model, FUSED, 1)
    hidden = largest_prefill(moondream2.model, paths, cache, LARGEST_BOUNDS)()
    assert seen == [256]
    assert hidden.isfinite().all()
    assert not cache.key_pages.any()
    assert not cache.value_pages.any()


@torch.inference_mode()
def test_where_there_are_adapters_the_largest_step_is_measured_with_one(
    shallow2: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    config, paths = shallow2.model.config, fused_backends(shallow2)
    slabs = AdapterSlabs(config.text, 1, 4, torch.device("cpu"), torch.float32)
    for layer in slabs.layers:
        for weights in layer:
            weights.a.fill_(0.1)
            weights.b.fill_(0.1)
    measured: list[Tensor] = []

    def measure(work: Any) -> int:
        measured.append(work())
        return 1

    monkeypatch.setattr(memory, "peak_bytes", measure)
    for given in (slabs, None):
        model: Any = OnADevice(shallow2)
        step_bytes(model, paths, LARGEST_BOUNDS, 16, torch.float32, given)
    assert not torch.equal(measured[0], measured[2])
    assert torch.equal(measured[1], measured[3]), "images use no adapters"


@torch.inference_mode()
def test_the_largest_encoding_has_as_many_crops_as_one_image_or_one_step(shallow2: LoadedModel):
    vision, paths = shallow2.model.config.vision, fused_backends(shallow2)
    most_of_image = 1 + vision.max_crops
    for max_crops in (5, most_of_image + 3):
        images = largest_encode(shallow2.model, paths, StepBounds(4, 256, max_crops))()
        num_crops = max(max_crops, most_of_image)
        assert len(images) == -(-num_crops // 2)
        assert images.shape[1:] == (vision.num_image_tokens, shallow2.model.config.text.dim)


@pytest.mark.parametrize(("allocated", "reserved"), [((7, 1007), (50, 1030)), ((7, 907), (50, 1050))])
def test_the_peak_is_the_larger_of_what_tensors_fill_and_what_the_allocator_takes(
    monkeypatch: pytest.MonkeyPatch, allocated: tuple[int, int], reserved: tuple[int, int]
):
    order: list[str] = []
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: order.append(name))
    for name, value in (
        ("memory_allocated", allocated[0]),
        ("max_memory_allocated", allocated[1]),
        ("memory_reserved", reserved[0]),
        ("max_memory_reserved", reserved[1]),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)

    def work() -> Tensor:
        order.append("work")
        return torch.zeros(1)

    assert peak_bytes(work) == 1000
    assert order == ["work", "synchronize", "empty_cache", "reset_peak_memory_stats", "work", "synchronize"]


def test_on_a_gpu_the_larger_of_prefill_and_encoding_is_what_a_step_takes(
    moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    figures = iter([1009, 2003])
    monkeypatch.setattr(memory, "peak_bytes", lambda _: next(figures))
    model: Any = OnADevice(moondream2)
    assert step_bytes(model, fused_backends(moondream2), LARGEST_BOUNDS, 16, torch.float32) == 2003


def test_on_a_gpu_images_need_the_features_of_all_crops_of_a_step(moondream2: LoadedModel):
    def image_bytes(max_crops: int) -> int:
        model: Any = OnADevice(moondream2)
        bounds = replace(BOUNDS, max_crops=max_crops)
        return memory_needs(
            model,
            EngineConfig(),
            bounds,
            step_bytes=0,
            available_bytes=2**33,
            with_graphs=False,
            host_image_bytes=0,
        ).image_bytes

    vision = moondream2.model.config.vision
    # Those that the step has encoded, and copies of them with those of cached crops.
    assert image_bytes(50) - image_bytes(40) == 2 * 10 * vision.num_image_tokens * vision.enc_dim * 4


def test_a_measurement_that_fails_leaves_the_estimate(
    moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(_: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory\nand a page of advice")

    monkeypatch.setattr(memory, "peak_bytes", fail)
    model: Any = OnADevice(moondream2)
    with caplog.at_level(logging.WARNING):
        got = step_bytes(model, fused_backends(moondream2), LARGEST_BOUNDS, 16, torch.float32)
    assert got == estimated_step_bytes(moondream2.model.config, LARGEST_BOUNDS, 4)
    assert caplog.messages == ["activations are estimated, not measured: CUDA out of memory"]


def test_on_the_host_it_is_estimated(moondream2: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "peak_bytes", lambda _: pytest.fail("measured"))
    estimate = estimated_step_bytes(moondream2.model.config, LARGEST_BOUNDS, 4)
    assert (
        step_bytes(moondream2.model, fused_backends(moondream2), LARGEST_BOUNDS, 16, torch.float32) == estimate > 0
    )
    config = EngineConfig(deterministic=True)
    paths = Backends.of(moondream2.model, ExecutionConfig.of(config, "cpu", moondream2.model), max_batch_size=4)
    assert step_bytes(moondream2.model, paths, LARGEST_BOUNDS, 16, torch.float32) > estimate, (
        "attention has its own memory"
    )


@pytest.mark.parametrize("larger", [StepBounds(3, 777_777, 5), StepBounds(3, 256, 5_555)], ids=["prompts", "crops"])
def test_a_step_that_carries_more_is_estimated_to_need_more(moondream3: LoadedModel, larger: StepBounds):
    config = moondream3.model.config
    assert estimated_step_bytes(config, larger, 2) > estimated_step_bytes(config, LARGEST_BOUNDS, 2)


def test_prompts_with_adapters_are_estimated_to_need_more(moondream3: LoadedModel):
    config, long = moondream3.model.config, replace(LARGEST_BOUNDS, max_prefill_tokens=777_777)
    assert estimated_step_bytes(config, long, 2, with_adapters=True) > estimated_step_bytes(config, long, 2)
