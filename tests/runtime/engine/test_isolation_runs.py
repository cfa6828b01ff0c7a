"""Which requests are quarantined: runs of one request alone, on a quiet engine, over the engine's loop.

R1 to R4 are the invariants of `kestrel_runtime.engine.isolation`. The runner is a fake one: the test decides which
steps fail.
"""

import gc
import logging
from collections.abc import Callable

import pytest
import torch

from kestrel_runtime.api.errors import InternalError
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Priority
from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine.isolation import DeviceLost, Isolation
from kestrel_runtime.engine.loop import EngineLoop
from kestrel_runtime.engine.poison_requests import PoisonRequests
from kestrel_runtime.fairness.queue_admission import Cost, QueueAdmission, QueueLimits
from kestrel_runtime.scheduling.batch import Batch
from kestrel_runtime.scheduling.page_manager import PageManager
from kestrel_runtime.scheduling.scheduler import Scheduler
from kestrel_runtime.scheduling.sequence import TokenSequence
from tests.runtime.fake_runner import FakeRunner
from tests.runtime.sequences import ShortParser, new_sequence

OUT_OF_MEMORY = torch.OutOfMemoryError("for the test")
Fails = Callable[[Batch], Exception | None]


class Bench:
    """A loop that the test turns by hand, over a device that fails as the test says."""

    def __init__(self, fails: Fails) -> None:
        self.runner = FakeRunner()
        self.runner.on_launch = self._launch
        self.poison_requests = PoisonRequests()
        self.is_device_well = True
        self.runner.on_run = self._probe
        self.events: list[str] = []
        """Which steps were begun, by the names of their sequences, with what happened between them."""
        self._fails = fails
        self._pages = PageManager(256, 16)
        scheduler = Scheduler(self._pages, max_batch_size=8, max_prefill_tokens=64, max_crops_per_step=8)
        isolation = Isolation(
            scheduler,
            self.runner,  # pyrefly: ignore[bad-argument-type] it stands in for one
            self.poison_requests,
            new_probes=lambda: [new_sequence(2)],
            on_restart=lambda: self.events.append("restart"),
            on_restarted=lambda: None,
        )
        self._admission = QueueAdmission(QueueLimits(100, 10**9, 10**6))
        self.loop = EngineLoop(scheduler, self.runner, isolation, self._admission)  # pyrefly: ignore[bad-argument-type]
        empty = self.runner.empty_device_cache
        self.runner.empty_device_cache = lambda: (empty(), self.events.append("cache emptied"))[0]

    def add(self, name: str, num_tokens: int = 4) -> Stream:
        sequence, stream = new_sequence(6), Stream()
        sequence.request.fingerprint, sequence.request.parser = name, ShortParser(num_tokens)
        self._admission.enter(stream, Cost("", Priority.NORMAL, Priority.NORMAL, 0, 1), 0.0)
        self.loop.add(sequence, stream)
        return stream

    def turn_until_idle(self) -> None:
        for _ in range(200):
            self.loop.run_turn()
            if not (self.loop.num_active or self.loop.num_waiting):
                assert self._pages.num_held == 0
                return
        raise AssertionError("the loop goes on for ever")

    def _launch(self, batch: Batch) -> None:
        self.events.append(" ".join(item.request.fingerprint for item in batch.sequences))
        error = self._fails(batch)
        if error is not None:
            raise error

    def _probe(self, batch: Batch) -> None:
        if not self.is_device_well:
            raise RuntimeError("the device is not well")


def names(batch: Batch) -> list[str]:
    return [item.request.fingerprint for item in batch.sequences]


async def failure_of(stream: Stream) -> object:
    with pytest.raises(InternalError) as caught:
        await stream.result()
    return caught.value.__cause__


async def test_r1_a_request_that_fails_alone_twice_is_quarantined_and_no_other() -> None:
    bench = Bench(lambda batch: RuntimeError("poison") if "poison" in names(batch) else None)
    good, bad = bench.add("good"), bench.add("poison")
    bench.turn_until_idle()
    assert isinstance(await good.result(), Finished)
    assert str(await failure_of(bad)) == "poison"
    # The second run follows the first at once; then the good one begins again.
    assert bench.events[:5] == ["good poison", "good", "poison", "poison", "good"]
    assert bench.events.count("poison") == 2
    assert "poison" in bench.poison_requests
    assert "good" not in bench.poison_requests


@pytest.mark.parametrize("error", [RuntimeError("once"), OUT_OF_MEMORY])
async def test_r1_a_request_that_fails_alone_only_once_is_not_quarantined(error: Exception) -> None:
    left = 2  # in company, then alone; the second run alone passes

    def fails(batch: Batch) -> Exception | None:
        nonlocal left
        if "unlucky" in names(batch) and left:
            left -= 1
            return error
        return None

    bench = Bench(fails)
    streams = [bench.add("good"), bench.add("unlucky")]
    bench.turn_until_idle()
    for stream in streams:
        assert (await stream.result()).usage.num_output_tokens == 4
    assert left == 0
    assert "unlucky" not in bench.poison_requests
    assert "restart" not in bench.events


async def test_failures_count_from_zero_after_a_run_alone_that_passed() -> None:
    fails_at = {1, 2, 6, 7}  # twice: in company and alone, and then a run alone passes
    num_steps = 0

    def fails(batch: Batch) -> Exception | None:
        nonlocal num_steps
        num_steps += "unlucky" in names(batch)
        return RuntimeError("now and then") if num_steps in fails_at and "unlucky" in names(batch) else None

    bench = Bench(fails)
    streams = [bench.add("good", 12), bench.add("unlucky", 12)]
    bench.turn_until_idle()
    for stream in streams:
        assert isinstance(await stream.result(), Finished)
    assert "unlucky" not in bench.poison_requests


async def test_out_of_memory_empties_the_allocator_before_each_run_alone() -> None:
    bench = Bench(lambda batch: OUT_OF_MEMORY if "large" in names(batch) else None)
    bad = bench.add("large")
    bench.turn_until_idle()
    assert await failure_of(bad) is OUT_OF_MEMORY
    # Once in a batch, then twice alone: a request that runs out of memory alone twice needs too much.
    assert bench.events == ["large", "cache emptied"] * 3
    assert "large" in bench.poison_requests


async def test_out_of_memory_that_the_batch_causes_ends_no_request() -> None:
    bench = Bench(lambda batch: OUT_OF_MEMORY if len(names(batch)) > 2 else None)
    streams = [bench.add(f"one of {number}") for number in range(4)]
    bench.turn_until_idle()
    for stream in streams:
        assert isinstance(await stream.result(), Finished)
    assert not any(f"one of {number}" in bench.poison_requests for number in range(4))


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_r2_the_third_in_a_row_is_tried_again_after_a_restart_which_clears_the_others(stage: str) -> None:
    """A device that is bad without our request noticing must not cause all requests to be refused for an hour."""
    bench: Bench

    def fails(batch: Batch) -> Exception | None:
        is_there = batch.decode if stage == "decode" else batch.prefill
        return RuntimeError("the device is bad") if is_there and "restart" not in bench.events else None

    bench = Bench(fails)
    streams = [bench.add(f"bystander {number}") for number in range(5)]
    bench.turn_until_idle()
    ends = [await failure_of(stream) for stream in streams[:2]]
    assert [str(end) for end in ends] == ["the device is bad"] * 2  # two were lost before it could be known
    for stream in streams[2:]:
        assert isinstance(await stream.result(), Finished)
    assert bench.events.count("restart") == 1
    assert not any(f"bystander {number}" in bench.poison_requests for number in range(5))


async def test_r4_a_restart_clears_what_was_learned_before_but_not_who_broke_the_device_again() -> None:
    bench: Bench

    def fails(batch: Batch) -> Exception | None:
        if "breaks it" in names(batch):
            bench.is_device_well = False
        return None if names(batch) == ["good"] else RuntimeError("broken")

    bench = Bench(fails)
    renew = bench.runner.restart

    def restart() -> None:
        renew()
        bench.is_device_well = True

    bench.runner.restart = restart
    bench.add("poison")
    bench.turn_until_idle()
    assert "poison" in bench.poison_requests
    bench.add("breaks it")
    bench.turn_until_idle()
    assert bench.events.count("restart") == 2
    assert "poison" not in bench.poison_requests
    assert "breaks it" in bench.poison_requests
    good = bench.add("good")
    bench.turn_until_idle()
    assert isinstance(await good.result(), Finished)
    # Another one does the same: the first is still refused.
    bench.poison_requests.forget_learned_before_restart()
    assert "breaks it" in bench.poison_requests


async def test_a_device_that_does_not_recover_quarantines_no_request() -> None:
    bench = Bench(lambda _: RuntimeError("gone"))
    bench.is_device_well = False
    bench.add("bystander")
    bench.loop.run_turn()
    with pytest.raises(DeviceLost):
        bench.loop.run_turn()
    assert "bystander" not in bench.poison_requests


async def test_an_isolated_request_that_has_left_is_not_kept_alive(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, "kestrel_runtime")  # pytest keeps what is logged, with tracebacks
    bench = Bench(lambda _: RuntimeError("poison"))
    stream = bench.add("poison")
    for _ in range(2):  # in company and once alone
        bench.loop.run_turn()
    bench.loop.cancel(stream)
    bench.turn_until_idle()
    gc.collect()
    assert [
        item for item in gc.get_objects() if type(item) is TokenSequence and item.request.fingerprint == "poison"
    ] == []
