"""What the engine holds does not grow with the number of requests it has served."""

import asyncio
import gc
from typing import Any

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.deadlines import deadline_in
from kestrel_runtime.api.errors import ImageError
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.engine.isolation import Isolation
from kestrel_runtime.engine.loop import EngineLoop
from kestrel_runtime.engine.poison_requests import PoisonRequests
from kestrel_runtime.fairness.queue_admission import QueueAdmission, QueueLimits
from kestrel_runtime.imaging.crops import Crops
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.batch import Batch
from kestrel_runtime.scheduling.page_manager import PageManager
from kestrel_runtime.scheduling.scheduler import Scheduler
from kestrel_runtime.scheduling.sequence import TokenSequence
from tests.reference_fixtures import MD3_SMALL
from tests.runtime.fake_runner import FakeHandle, FakeRunner
from tests.runtime.sequences import ShortParser, blank_crops, new_sequence

NUM_TURNS = 300
NUM_LAST_TURNS = 4
"""In which it is counted: what a load retains is still there, and each turn of a request holds more or less."""


def new_loop(runner: FakeRunner) -> EngineLoop:
    """A loop whose thread never runs; the test calls `step`."""
    pages = PageManager(256, 16)
    scheduler = Scheduler(pages, max_batch_size=8, max_prefill_tokens=64, max_crops_per_step=8)
    fake: Any = runner
    isolation = Isolation(
        scheduler, fake, PoisonRequests(), new_probes=list, on_restart=lambda: None, on_restarted=lambda: None
    )
    admission = QueueAdmission(QueueLimits(100, 10**9, 10**6))
    return EngineLoop(scheduler, fake, isolation, admission)


def census() -> dict[str, int]:
    """How many objects there are of what a request or a step holds."""
    kinds = {TokenSequence: 0, Crops: 0, Stream: 0, Batch: 0, FakeHandle: 0}
    for item in gc.get_objects():
        if type(item) in kinds:
            kinds[type(item)] += 1
    return {kind.__name__: count for kind, count in kinds.items()}


@pytest.mark.parametrize("num_tokens", [1, 2], ids=["one-token answers", "two-token answers"])
@pytest.mark.parametrize("is_over", [True, False], ids=["prompts are over soon", "prompts are waited for"])
async def test_a_steady_load_retains_neither_sequences_nor_images_nor_steps(num_tokens: int, is_over: bool) -> None:
    runner = FakeRunner()
    runner.are_prompts_over = lambda: is_over
    loop = new_loop(runner)
    gc.collect()
    gc.disable()  # what only a cycle holds counts as held: an image must not wait for the collector
    try:
        before = census()
        peak, num_sent = dict(before), 0
        for turn in range(NUM_TURNS):
            if loop.num_waiting < 2:  # no more than is served: a queue that grows is not what is looked for
                sequence = new_sequence(6, num_image_tokens=4, pixels=blank_crops(2))
                sequence.request.parser = ShortParser(num_tokens)
                loop.add(sequence, Stream())
                num_sent += 1
                del sequence
            loop._wait_for_work()
            loop.run_turn()
            await asyncio.sleep(0)  # the event loop delivers what the turn posted
            if turn >= NUM_TURNS - NUM_LAST_TURNS:
                now = census()
                peak = {kind: max(count, now[kind]) for kind, count in peak.items()}
        grown = {kind: count - before[kind] for kind, count in peak.items()}
        assert num_sent > NUM_TURNS / 4
        # A few requests and steps in flight, whatever the number of turns.
        assert max(grown.values()) < 20, grown
    finally:
        gc.enable()


async def test_a_request_that_is_over_leaves_nothing_behind_however_it_ended(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.runtime.models.second_family.small_pictures.StepRunner", FakeRunner)
    image = (MD3_SMALL / "image_1_64x64.png").read_bytes()
    engine = LocalEngine(loaded, EngineConfig(model="", num_kv_pages=256, num_preprocess_threads=1))

    async def ask(number: int) -> None:
        query = Query("hi", image, sampling=SamplingParams(max_tokens=1, seed=number))
        # A deadline far away, whose timer would hold what it refers to.
        stream = engine.submit(query, deadline=deadline_in(3600.0))
        if number % 3 == 0:
            stream.cancel()
            return
        await stream.result()
        with pytest.raises(ImageError):
            await engine.submit(Query("hi", image[:100]), deadline=deadline_in(3600.0)).result()

    try:
        await ask(1)
        gc.collect()
        gc.disable()
        before = census()
        for number in range(60):
            await ask(number)
        await ask(1)  # the loop has turned since the last of them
        grown = {kind: count - before[kind] for kind, count in census().items()}
        assert max(grown.values()) < 5, grown
    finally:
        gc.enable()
        engine.close()
