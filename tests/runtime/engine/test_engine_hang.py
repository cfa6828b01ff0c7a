"""A device that hangs, and a thread that ends: health changes, every caller is told, and no thread waits for it."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import EngineStatus
from kestrel_runtime.api.errors import EngineUnavailable
from kestrel_runtime.api.events import Started
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.api.stream import Outbox, Stream
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.batch import Batch
from tests.runtime.fake_runner import FakeHandle, FakeRunner

LIMIT_S = 0.5
MAX_WAIT_S = 30.0


class Hang:
    """A device that gets stuck when told so, until the end of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runner = FakeRunner()
        self._released = threading.Event()
        monkeypatch.setattr(
            "tests.runtime.models.second_family.small_pictures.StepRunner", lambda *_, **__: self.runner
        )

    def stuck_on_the_device(self, *_: object) -> None:
        self._released.wait(MAX_WAIT_S)

    def takes_s(self, duration_s: float) -> None:
        """Time that the device takes."""
        self._released.wait(duration_s)

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    made = Hang(monkeypatch)
    yield made
    made.release()


def new_engine(loaded: LoadedModel) -> LocalEngine:
    """An engine whose steps are guarded, as after a warm-up."""
    config = EngineConfig(model="", num_kv_pages=256, num_preprocess_threads=1, step_timeout_s=LIMIT_S)
    engine = LocalEngine(loaded, config)
    engine.guard_steps()
    return engine


def ask(engine: LocalEngine, num_tokens: int = 50) -> Stream:
    return engine.submit(Query("hi", sampling=SamplingParams(max_tokens=num_tokens)))


@pytest.mark.parametrize("stage", ["launch", "wait"])
async def test_a_step_that_hangs_ends_the_engine_and_every_stream(
    loaded: LoadedModel, hang: Hang, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    engine = new_engine(loaded)
    statuses: list[EngineStatus] = []
    engine.on_status_change(statuses.append)
    num_steps = 0

    def stuck_at_the_fifth(_: object) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps >= 5:
            hang.stuck_on_the_device()

    if stage == "launch":
        hang.runner.on_launch = stuck_at_the_fifth
    else:
        hang.runner.on_wait = stuck_at_the_fifth
    streams = [ask(engine) for _ in range(3)]
    for stream in streams:
        with pytest.raises(EngineUnavailable):
            async with asyncio.timeout(MAX_WAIT_S):
                await stream.result()
    assert statuses == [EngineStatus.DEAD]
    with pytest.raises(EngineUnavailable):
        await ask(engine).result()
    # Where it hangs, and for whom, without what was asked.
    assert "thread kestrel-engine:" in caplog.text
    assert "in stuck_on_the_device" in caplog.text
    assert "decode step of query-" in caplog.text
    # The thread cannot be joined, so closing must not wait for it.
    await asyncio.wait_for(asyncio.to_thread(engine.close), MAX_WAIT_S)
    assert not engine.has_ended
    hang.release()
    assert await asyncio.to_thread(vars(engine)["_loop"].join, MAX_WAIT_S)
    assert engine.has_ended


async def test_a_prefill_that_hangs_is_noticed_while_others_decode(loaded: LoadedModel, hang: Hang) -> None:
    engine = new_engine(loaded)
    hang.runner.on_wait = lambda _: hang.takes_s(0.002)
    decoding = ask(engine, 4000)
    await anext(decoding)
    hang.runner.are_prompts_over = lambda: False
    late = ask(engine)
    for stream in (late, decoding):
        with pytest.raises(EngineUnavailable):
            async with asyncio.timeout(MAX_WAIT_S):
                await stream.result()
    assert engine.status is EngineStatus.DEAD
    engine.close()
    # The engine thread does not hang, and ends after its turn: the engine does not wait for it after a stall.
    assert await asyncio.to_thread(vars(engine)["_loop"].join, MAX_WAIT_S)
    assert engine.has_ended


async def test_an_engine_without_work_does_not_hang(loaded: LoadedModel, hang: Hang) -> None:
    engine = new_engine(loaded)
    try:
        await ask(engine, 2).result()
        looked = threading.Event()
        watchdog = vars(engine)["_watchdog"]
        look, num_looks = watchdog.look, 0

        def counted() -> list[str]:
            nonlocal num_looks
            num_looks += 1
            if num_looks > 40:  # twice the limit
                looked.set()
            return look()

        watchdog.look = counted
        assert await asyncio.to_thread(looked.wait, MAX_WAIT_S)
        await ask(engine, 2).result()
        assert engine.status is EngineStatus.SERVING
    finally:
        engine.close()


async def test_the_first_steps_may_take_longer(loaded: LoadedModel, hang: Hang) -> None:
    engine = LocalEngine(loaded, EngineConfig(model="", num_kv_pages=256, step_timeout_s=LIMIT_S))
    started = threading.Event()

    def compiles(_: Batch) -> None:
        started.set()
        hang.takes_s(2 * LIMIT_S)

    hang.runner.on_launch = compiles
    try:
        await ask(engine, 1).result()
        assert started.is_set()
        assert engine.status is EngineStatus.SERVING
    finally:
        engine.close()


async def test_what_was_read_before_the_end_of_the_thread_still_arrives(
    loaded: LoadedModel, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(loaded)
    post, num_posts = Outbox.post, 0

    def post_later(outbox: Outbox) -> None:
        nonlocal num_posts
        pending = vars(outbox)["_pending"]
        num_posts += bool(pending)
        if num_posts == 1 and pending:
            raise SystemExit("before the first events were sent")
        post(outbox)

    monkeypatch.setattr(Outbox, "post", post_later)
    stream = ask(engine)
    assert isinstance(await anext(stream), Started)
    with pytest.raises(EngineUnavailable):
        async for _ in stream:
            pass
    assert engine.status is EngineStatus.DEAD
    engine.close()


async def test_closing_does_not_wait_for_a_step_that_takes_long(
    loaded: LoadedModel, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrel_runtime.engine.engine._CLOSE_TIMEOUT_S", 0.05)
    config = EngineConfig(model="", num_kv_pages=256, num_preprocess_threads=1)
    engine = LocalEngine(loaded, config)
    is_stuck = threading.Event()

    def stuck(handle: FakeHandle) -> None:
        is_stuck.set()
        hang.stuck_on_the_device()

    hang.runner.on_wait = stuck
    stream = ask(engine)
    assert await asyncio.to_thread(is_stuck.wait, MAX_WAIT_S)
    await asyncio.wait_for(asyncio.to_thread(engine.close), MAX_WAIT_S)
    assert not engine.has_ended
    with pytest.raises(EngineUnavailable):
        await stream.result()
