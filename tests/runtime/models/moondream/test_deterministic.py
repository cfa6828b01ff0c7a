"""With `deterministic` an answer has the same bytes alone, in any batch, after a preemption and after a hit.

What is compared are the ids of the tokens and their logprobs, with those of the likeliest others.
"""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel_ops import Kernels
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.api.events import Finished, QueryOutput
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.scheduling.scheduler import Scheduler
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL

NUM_REQUESTS = 8
EOS = 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()
Answer = tuple[Any, ...]


def request(number: int, image: bytes | None = None) -> Query:
    """Prompts of 1 to 16 sentences, with answers of 26 to 5 tokens, some drawn and some greedy."""
    sampling = SamplingParams(
        temperature=(0.0, 1.0, 3.0)[number % 3],
        top_p=1.0,
        max_tokens=26 - 7 * (number % 4),
        seed=number,
        logprobs=3,
        logit_bias=((EOS, -100.0),),
    )
    return Query("What may this be? " * (1 + 5 * (number % 4)), image, sampling=sampling)


@asynccontextmanager
async def engine(model: Any, **options: Any) -> AsyncIterator[LocalEngine]:
    # So many pages, that others may use the device, too.
    chosen: dict[str, Any] = {"max_batch_size": 16, "deterministic": True, "num_kv_pages": 2048, **options}
    config = EngineConfig(model=str(model), device=DEVICE, **chosen)
    engine = await asyncio.to_thread(LocalEngine.start, config)
    try:
        yield engine
    finally:
        engine.close()


async def answer(engine: LocalEngine, number: int, image: bytes | None = None) -> Answer:
    finished: Finished = await engine.submit(request(number, image)).result()
    assert isinstance(finished.output, QueryOutput)
    assert finished.output.logprobs is not None
    return tuple((token.id, token.logprob, token.top) for token in finished.output.logprobs)


async def together(engine: LocalEngine, *, seed: int = 0) -> list[Answer]:
    """All answers, asked for in a random order in bursts that overlap."""
    chance = random.Random(seed)
    tasks: dict[int, asyncio.Task[Answer]] = {}
    for number in chance.sample(range(NUM_REQUESTS), k=NUM_REQUESTS):
        tasks[number] = asyncio.create_task(answer(engine, number))
        if chance.random() < 0.4:
            await tasks[number]  # the others that run go on meanwhile
    return [await tasks[number] for number in range(NUM_REQUESTS)]


async def alone(model: Any, **options: Any) -> list[Answer]:
    async with engine(model, prefix_cache=False, **options) as quiet:
        return [await answer(quiet, number) for number in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def wanted(shallow3_folder: Path) -> list[Answer]:
    return asyncio.run(alone(shallow3_folder, dtype="float32"))


async def test_text_has_the_same_bytes_alone_and_in_any_batch(wanted: list[Answer], shallow3_folder: Path):
    assert len(set(wanted)) == NUM_REQUESTS
    async with engine(shallow3_folder, dtype="float32") as busy:
        for seed in range(2):  # the second time much is cached
            assert await together(busy, seed=seed) == wanted


async def test_so_it_has_in_bfloat16_without_experts(shallow2_folder: Path):
    wanted = await alone(shallow2_folder, dtype="bfloat16")
    async with engine(shallow2_folder, dtype="bfloat16") as busy:
        assert await together(busy) == wanted


async def test_text_has_the_same_bytes_in_small_chunks(wanted: list[Answer], shallow3_folder: Path):
    async with engine(shallow3_folder, dtype="float32", max_prefill_tokens=7, max_batch_size=5) as busy:
        assert await together(busy) == wanted


async def test_text_has_the_same_bytes_after_preemptions(
    wanted: list[Answer], shallow3_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    preempted: list[object] = []
    preempt = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, each: (preempted.append(each), preempt(self, each)))
    few = {"page_size": 4, "num_kv_pages": 40, "max_batch_size": 32, "prefix_cache": False}
    async with engine(shallow3_folder, dtype="float32", **few) as busy:
        # Most are short prompts with long answers, of which many start at a time and need more pages later.
        numbers = [*[0, 4] * 5, *range(NUM_REQUESTS)]
        found = await asyncio.gather(*(answer(busy, number) for number in numbers))
        assert found == [wanted[number] for number in numbers]
    assert preempted


async def test_answers_about_images_have_the_same_bytes_with_and_without_their_pages(shallow3_folder: Path):
    numbers = (2, 3)
    async with engine(shallow3_folder, dtype="float32", prefix_cache=False) as quiet:
        wanted = [await answer(quiet, number, IMAGE) for number in numbers]
    async with engine(shallow3_folder, dtype="float32") as busy:
        texts = [asyncio.create_task(answer(busy, number)) for number in range(4)]
        for _ in range(2):
            assert await asyncio.gather(*(answer(busy, number, IMAGE) for number in numbers)) == wanted
        await asyncio.gather(*texts)
        assert busy.load().prefix_cache.num_hits > 0


@pytest.mark.parametrize("folder", [MD2_SMALL, MD3_SMALL], ids=["without experts", "with experts"])
def test_a_gpu_captures_graphs(folder: Path):
    pytest.importorskip("triton")
    model = LoadedModel.load(EngineConfig(str(folder), device="cpu")).model
    execution = ExecutionConfig.of(EngineConfig(deterministic=True), "cuda", model)
    assert (execution.text, execution.vision, execution.with_graphs) == ("invariant", "invariant", True)


async def test_a_product_that_depends_on_the_batch_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch):
    def by_row_number(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(rows, weight, bias) + torch.arange(len(rows), device=rows.device)[:, None]

    select = Kernels.select
    monkeypatch.setattr(
        Kernels, "select", lambda *asked: dataclasses.replace(select(*asked), invariant_linear=by_row_number)
    )
    with pytest.raises(CheckpointError, match="the bits of a row depend on its batch"):
        async with engine(MD2_SMALL):
            pass


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"text_backend": "fused"}, "--text-backend: --deterministic has a backend of its own"),
        ({"vision_backend": "fused-float8"}, "--vision-backend: --deterministic has a backend of its own"),
        ({"adapters": "/somewhere"}, "adapters"),
    ],
)
async def test_what_depends_on_the_batch_is_refused(options: dict[str, Any], reason: str):
    with pytest.raises(CheckpointError, match=reason):
        async with engine(MD3_SMALL, **options):
            pass
