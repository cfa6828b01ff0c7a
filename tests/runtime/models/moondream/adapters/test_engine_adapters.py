"""Requests that name an adapter are answered as by a model with the adapter merged into its weights."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import EngineUnavailable
from kestrel_runtime.api.events import Finished, Started
from kestrel_runtime.api.requests import Detect, Query, Request, RequestOptions, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.execution.step_runner import StepHandle, StepRunner
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.batch import Batch
from tests.adapter_folders import merged, random_pairs, scaled, write_peft
from tests.reference_fixtures import MD3_SMALL, image_paths

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
DRAWN = SamplingParams(temperature=1.0, max_tokens=5, seed=5)
NO_END = ((0, -100.0),)
"""A bias that has answers go on to their limit."""


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return LoadedModel.load(EngineConfig(dtype="float32", device="cpu"))


@pytest.fixture(params=["nano", "shallow2", "shallow3"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return request.getfixturevalue(request.param)


@asynccontextmanager
async def served(loaded: LoadedModel, **settings: Any) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(loaded, EngineConfig(model="", num_kv_pages=400, **settings))
    try:
        yield engine
    finally:
        engine.close()


def requests() -> list[Request]:
    image = image_paths(MD3_SMALL)[0].read_bytes()
    return [
        Query("What colour is it?", sampling=GREEDY),
        Query("What is in this image?", image, sampling=DRAWN),
        Detect("circle", image, max_objects=2),
    ]


def with_adapter(request: Request, name: str) -> Request:
    return replace(request, options=RequestOptions(adapter=name))


async def outputs(engine: LocalEngine, asked: Sequence[Request]) -> list[object]:
    """All answers, of requests that run together."""
    streams = [engine.submit(request) for request in asked]
    return [(await stream.result()).output for stream in streams]


async def outputs_alone(loaded: LoadedModel, asked: Sequence[Request]) -> list[object]:
    """All answers, one after the other, without caches."""
    async with served(loaded, prefix_cache=False, image_cache_bytes=0) as engine:
        return [(await engine.submit(request).result()).output for request in asked]


async def test_an_adapter_answers_as_merged_weights_do(loaded: LoadedModel, tmp_path: Path):
    pairs = random_pairs(loaded.model.config.text, seed=1)
    write_peft(tmp_path / "colours", pairs)
    plain = await outputs_alone(loaded, requests())
    expected = await outputs_alone(merged(loaded, scaled(pairs)), requests())
    assert expected != plain, "else the test shows nothing"
    async with served(loaded, adapters=str(tmp_path), max_adapter_rank=4) as engine:
        asked = [with_adapter(request, "colours") for request in requests()]
        assert await outputs(engine, asked) == expected
        assert await outputs(engine, asked) == expected, "now from the cache"
        assert await outputs(engine, requests()) == plain


@pytest.mark.parametrize("loaded", ["shallow2", "shallow3"], indirect=True)
async def test_eight_adapters_and_none_in_one_batch_answer_as_each_alone(loaded: LoadedModel, tmp_path: Path):
    asked = requests()
    adapters = {f"tenant-{n}": random_pairs(loaded.model.config.text, seed=n) for n in range(8)}
    expected = {"": await outputs_alone(loaded, asked)}
    for name, pairs in adapters.items():
        write_peft(tmp_path / name, pairs)
        expected[name] = await outputs_alone(merged(loaded, scaled(pairs)), asked)
    assert len({str(answers) for answers in expected.values()}) == 9, "else the test shows nothing"
    mixed = [(name, number) for number in range(len(asked)) for name in expected]
    async with served(loaded, adapters=str(tmp_path), max_adapter_rank=4, max_batch_size=64) as engine:
        found = await outputs(engine, [with_adapter(asked[number], name) for name, number in mixed])
    assert found == [expected[name][number] for name, number in mixed]


async def test_sixty_four_requests_of_eight_adapters_and_none_answer_as_each_alone(
    shallow3: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    batches: list[list[int]] = []
    launch = StepRunner.launch

    def noted(runner: StepRunner, batch: Batch, *rest: Any) -> StepHandle:
        batches.append([sequence.adapter_slot for sequence in batch.decode])
        return launch(runner, batch, *rest)

    image = image_paths(MD3_SMALL)[0].read_bytes()
    for number in range(1, 9):
        write_peft(tmp_path / f"tenant-{number}", random_pairs(shallow3.model.config.text, seed=number))
    drawn = replace(DRAWN, max_tokens=7, logit_bias=NO_END)
    texts = ("What colour is it?", "Where is the kite?", "How many rings do you see?")
    asked: list[Request] = []
    for number in range(64):
        question, tenant = divmod(number, 9)
        request = Query(texts[question % len(texts)], image if number in (0, 17) else None, sampling=drawn)
        asked.append(with_adapter(request, f"tenant-{tenant}") if tenant else request)
    settings = {"adapters": str(tmp_path), "max_adapter_rank": 4, "max_batch_size": 64}
    async with served(shallow3, prefix_cache=False, image_cache_bytes=0, **settings) as engine:
        alone = {request: (await engine.submit(request).result()).output for request in dict.fromkeys(asked)}
        expected = [alone[request] for request in asked]
        monkeypatch.setattr(StepRunner, "launch", noted)
        found = await outputs(engine, asked)
    assert len({str(expected[tenant:63:9]) for tenant in range(9)}) == 9, "else the test shows nothing"
    assert found == expected
    largest = max(batches, key=len)
    assert len(largest) == 64, "they run together"
    assert len(set(largest)) == 9


@dataclass(frozen=True, slots=True)
class Tenants:
    """Adapters of two tenants, what they ask for, and what each request gets alone."""

    adapters: Path
    question: Request
    answer: object
    flood: tuple[Request, ...]
    """Each with an adapter of its own; all but the first have long answers."""
    flood_answers: list[object]


@pytest.fixture(scope="module")
def tenants(shallow3: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Tenants:
    root = tmp_path_factory.mktemp("tenants")
    names = [f"flood-{number}" for number in range(3)]
    for number, name in enumerate(("modest", *names)):
        write_peft(root / name, random_pairs(shallow3.model.config.text, seed=number))
    long = SamplingParams(temperature=1.0, seed=1, max_tokens=200, logit_bias=NO_END)
    flood = tuple(
        with_adapter(Query("What colour is it?", sampling=sampling), name)
        for name, sampling in zip(names, (GREEDY, long, long), strict=True)
    )
    question = with_adapter(Query("Why?", sampling=GREEDY), "modest")

    async def ask() -> list[object]:
        async with served(shallow3, adapters=str(root), num_adapter_slots=2, max_adapter_rank=4) as engine:
            return [(await engine.submit(request).result()).output for request in (question, *flood)]

    answer, *flood_answers = asyncio.run(ask())
    return Tenants(root, question, answer, flood, flood_answers)


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["waiting for steps", "looking ahead"])
async def test_a_tenant_whose_requests_use_all_slots_gives_one_up_and_is_answered_as_before(
    shallow3: LoadedModel, tenants: Tenants, monkeypatch: pytest.MonkeyPatch, is_asynchronous: bool
):
    monkeypatch.setattr(StepRunner, "is_asynchronous", is_asynchronous)
    settings = {"adapters": str(tenants.adapters), "num_adapter_slots": 2, "max_adapter_rank": 4}
    async with served(shallow3, **settings) as engine:
        flood = [engine.submit(request, tenant="flood") for request in reversed(tenants.flood)]
        for stream in flood[:2]:  # whose adapters are there still
            await anext(stream)
        assert (await engine.submit(tenants.question, tenant="modest").result()).output == tenants.answer
        assert not any(stream.over.done() for stream in flood), "it was answered before any of them"
        assert [(await stream.result()).output for stream in reversed(flood)] == tenants.flood_answers
        load = engine.load()
        assert (load.num_used_pages, load.adapters.num_used_slots, load.num_waiting) == (0, 0, 0)


async def test_a_request_whose_adapter_changes_while_it_has_given_it_back_fails(
    shallow3: LoadedModel, tmp_path: Path
):
    versions = [random_pairs(shallow3.model.config.text, seed=seed) for seed in (1, 2)]
    for name in ("first", "second", "modest"):
        write_peft(tmp_path / name, versions[0])
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=300, logit_bias=NO_END)
    asked = [with_adapter(Query("What?", sampling=sampling), name) for name in ("first", "second")]
    async with served(shallow3, adapters=str(tmp_path), num_adapter_slots=2, max_adapter_rank=4) as engine:
        flood = [engine.submit(request, tenant="flood") for request in asked]
        for stream in flood:
            await anext(stream)
        for name in ("first", "second"):
            write_peft(tmp_path / name, versions[1])
        question = with_adapter(Query("Why?", sampling=GREEDY), "modest")
        await engine.submit(question, tenant="modest").result()
        ends = [stream.result() for stream in flood]
        outcomes = await asyncio.gather(*ends, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(EngineUnavailable) == 1
    assert [type(outcome) for outcome in outcomes].count(Finished) == 1


async def test_a_new_version_is_for_new_requests_and_running_ones_keep_theirs(
    shallow3: LoadedModel, tmp_path: Path
):
    image = image_paths(MD3_SMALL)[0].read_bytes()
    sampling = SamplingParams(temperature=0.0, max_tokens=200, logit_bias=NO_END)
    asked = with_adapter(Query("What is in this image?", image, sampling=sampling), "colours")
    versions = [random_pairs(shallow3.model.config.text, seed=seed) for seed in (1, 2)]
    plain = replace(asked, options=RequestOptions())
    expected = [await outputs_alone(merged(shallow3, scaled(pairs)), [plain]) for pairs in versions]
    assert expected[0] != expected[1], "else the test shows nothing"
    write_peft(tmp_path / "colours", versions[0])
    async with served(shallow3, adapters=str(tmp_path), num_adapter_slots=2, max_adapter_rank=4) as engine:
        running = [engine.submit(asked) for _ in range(3)]
        begun = [await anext(stream) for stream in running]
        assert all(isinstance(event, Started) for event in begun)
        write_peft(tmp_path / "colours", versions[1])
        old = await engine.unload_adapter("colours")
        assert (old.num_requests, old.is_current) == (3, False)
        after = engine.submit(asked)
        first = await anext(after)
        assert isinstance(first, Started)
        assert first.usage.num_cached_tokens == 0, "keys and values of the old version are not its own"
        assert len({info.digest for info in engine.adapters()}) == 2, "both versions run"
        again = engine.submit(asked)
        assert [(await stream.result()).output for stream in running] == expected[0] * 3
        assert (await after.result()).output == expected[1][0]
        finished = await again.result()
        assert finished.output == expected[1][0]
        assert finished.usage.num_cached_tokens >= 82, "the new version finds its own: BOS and image"
        assert [info.is_current for info in engine.adapters()] == [True], "the old version is gone"


@pytest.mark.parametrize("operations", ["reference", "library"])
async def test_the_fused_path_answers_as_merged_weights_do(
    nano: LoadedModel, shallow2: LoadedModel, tmp_path: Path, operations: str
):
    kernels = (("add_low_rank", operations), ("mixture_of_experts", operations))
    for number, loaded in enumerate((nano, shallow2)):
        pairs = random_pairs(loaded.model.config.text, seed=1)
        root = tmp_path / str(number)
        write_peft(root / "colours", pairs)
        asked = requests()[:1]
        expected = await outputs_alone(merged(loaded, scaled(pairs)), asked)
        plain = await outputs_alone(loaded, asked)
        settings = {"adapters": str(root), "max_adapter_rank": 4, "text_backend": "fused", "kernels": kernels}
        async with served(loaded, **settings) as engine:
            mixed = [asked[0], with_adapter(asked[0], "colours")]
            assert await outputs(engine, mixed) == [*plain, *expected]
