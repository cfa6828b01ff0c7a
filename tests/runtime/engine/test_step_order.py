"""Which steps the loop makes a prefill step wait for: the decode steps that may still write what it takes over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kestrel_runtime.api.stream import Stream
from kestrel_runtime.engine.isolation import Isolation
from kestrel_runtime.engine.loop import EngineLoop
from kestrel_runtime.engine.offending_requests import OffendingRequests
from kestrel_runtime.scheduling.admission import Admission, QueueLimits
from kestrel_runtime.scheduling.batch import Batch
from kestrel_runtime.scheduling.page_manager import PageManager
from kestrel_runtime.scheduling.scheduler import Scheduler
from kestrel_runtime.scheduling.sequence import Sequence, SequenceState
from tests.runtime.fake_runner import FakeHandle, FakeRunner
from tests.runtime.sequences import ShortParser, new_sequence


class RecordingRunner(FakeRunner):
    """Notes at each launch of a prefill step which decode steps were in flight, that is, not waited for yet."""

    def __init__(self) -> None:
        super().__init__()
        self.decodes_in_flight: list[FakeHandle] = []
        self.seen: list[tuple[Batch, set[FakeHandle], set[FakeHandle]]] = []
        """Prefill steps: what each waits for, and the last decode steps in flight of sequences that had left."""
        self.on_wait = self._waiting

    def launch(self, batch: Batch, after: Iterable[FakeHandle] = ()) -> FakeHandle:
        step = super().launch(batch)
        if batch.kind == "decode":
            self.decodes_in_flight.append(step)
        else:
            last_of = {sequence: item for item in self.decodes_in_flight for sequence in item.batch.decode}
            tails = {item for sequence, item in last_of.items() if sequence.state is SequenceState.FINISHED}
            self.seen.append((batch, set(after), tails))
        return step

    def _waiting(self, step: FakeHandle) -> None:
        if step in self.decodes_in_flight:
            self.decodes_in_flight.remove(step)


def new_loop(runner: Any) -> EngineLoop:
    scheduler = Scheduler(PageManager(64, 4), max_batch_size=4, max_prefill_tokens=64, max_tiles_per_step=8)
    isolation = Isolation(
        scheduler, runner, OffendingRequests(), new_probes=list, on_restart=lambda: None, on_restarted=lambda: None
    )
    return EngineLoop(scheduler, runner, isolation, Admission(QueueLimits(100, 10**9, 10**6)))


async def test_no_token_is_sampled_that_a_parser_does_not_take() -> None:
    runner = FakeRunner()
    sampled: list[Sequence] = []
    runner.on_launch = lambda batch: sampled.extend(batch.sampled)
    loop = new_loop(runner)
    limits = [1, 2, 3, 7]
    sequences = [new_sequence(6, max_context=6 + limit) for limit in limits]
    for sequence, limit in zip(sequences, limits, strict=True):
        sequence.parser = ShortParser(limit)
        loop.add(sequence, Stream())
    for _ in range(20):
        loop.step()
    assert [sampled.count(sequence) for sequence in sequences] == limits


async def test_a_prefill_step_waits_for_the_tail_steps_and_for_no_other_decode_step() -> None:
    runner = RecordingRunner()
    loop = new_loop(runner)
    for number in range(60):
        sequence = new_sequence(6)
        sequence.parser = ShortParser(3 + number % 5)
        loop.add(sequence, Stream())
        for _ in range(1 + number % 4):
            loop.step()
    for batch, after, tails in runner.seen:
        assert all(chunk.start == 0 for chunk in batch.prefill)
        assert after == tails
    assert sum(bool(tails) for _, _, tails in runner.seen) > 5
    assert sum(not tails for _, _, tails in runner.seen) > 5
