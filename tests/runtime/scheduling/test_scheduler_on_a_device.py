"""Random schedules of the scheduler on a simulated device that runs steps in any order which their batches allow.

A prefill step waits for exactly the decode steps in `Batch.after`, a decode step for the prefill steps in
`Batch.depends_on`. A step that needed to wait for another one too would read what that one had not written yet, or
what a sequence that has left wrote late. The mutations at the end remove one rule at a time, and the schedules find
each of them.
"""

from __future__ import annotations

import itertools
from collections import deque
from random import Random
from typing import Any

import pytest

from kestrel_runtime.scheduling.batch import Batch
from kestrel_runtime.scheduling.output_parser import Token
from kestrel_runtime.scheduling.page_manager import PageManager, StepId
from kestrel_runtime.scheduling.scheduler import Scheduler
from kestrel_runtime.scheduling.sequence import Sequence, SequenceState
from tests.runtime.scheduling.page_books import check_books
from tests.runtime.scheduling.simulated_device import Access, DeviceStep, RowAccess, SimulatedDevice
from tests.runtime.sequences import blank_tiles, new_sequence

NUM_SCHEDULES, NUM_TURNS = 150, 80


class Schedule:
    """Sequences come, go, fail and are cancelled at random, in turns like those of the engine loop."""

    def __init__(self, seed: int, scheduler_class: type[Scheduler], manager_class: type[PageManager]) -> None:
        self.random = Random(seed)
        num_pages, page_size = self.random.randrange(4, 24), self.random.choice((1, 2, 3, 4))
        max_batch_size = self.random.randrange(1, 6)
        self.manager = manager_class(num_pages, page_size)
        self.device = SimulatedDevice(num_pages, page_size, self.random)
        self.scheduler = scheduler_class(
            self.manager,
            max_batch_size=max_batch_size,
            max_prefill_tokens=self.random.randrange(1, 12),
            max_tiles_per_step=self.random.randrange(1, 5),
        )
        self.num_left: dict[Sequence, int] = {}  # of those that are here: tokens until they finish
        self.free_rows = list(range(max_batch_size + 1))
        self.rows: dict[Sequence, int] = {}
        self.in_flight: dict[str, deque[tuple[DeviceStep, Batch]]] = {"prefill": deque(), "decode": deque()}
        self.ids = itertools.count(1)
        self.num_narrow = 0  # prefill steps that did not wait for the last decode step in flight

    def run(self) -> None:
        for _ in range(NUM_TURNS):
            self.turn(is_busy=True)
        for _ in range(4000):
            if self.scheduler.is_idle and not any(self.in_flight.values()):
                break
            self.turn(is_busy=False)
        assert self.scheduler.is_idle, "every sequence finishes"
        assert self.manager.num_available == self.manager.num_pages, "B6: every page can be allocated again"

    def turn(self, *, is_busy: bool) -> None:
        if is_busy and len(self.num_left) < 7 and self.random.random() < 0.5:
            self.arrive()
        if is_busy and self.num_left and self.random.random() < 0.3:
            self.leave(self.random.choice(list(self.num_left)))
        if is_busy and self.random.random() < 0.02:
            self.fail()
        self.device.run_some()
        prefills, decodes = self.in_flight["prefill"], self.in_flight["decode"]
        if prefills and self.random.random() < 0.2:
            self.complete(prefills)
        promoted = bool(prefills and prefills[0][1].sampled) and not self.scheduler.is_decoding
        if promoted:
            self.scheduler.promote(prefills[0][1])
        if not self.scheduler.can_look_ahead:
            self.complete_all()
        had_decodes = bool(decodes)
        plan = self.scheduler.schedule(0.0, may_prefill=len(prefills) < 2)
        batch, max_decodes = plan.decode, self.random.randrange(1, 5)
        while not batch.is_empty and len(decodes) < max_decodes:
            self.launch(batch)
            if not self.scheduler.can_look_ahead:
                break
            batch = self.scheduler.schedule(0.0, may_prefill=False).decode
        self.launch(plan.prefill)
        if had_decodes and decodes:
            self.complete(decodes)
        if prefills and (promoted or (not had_decodes and plan.is_empty)):
            self.complete(prefills)
        check_books(self.manager)

    def arrive(self) -> None:
        capacity = self.manager.num_pages * self.manager.page_size
        image: dict[str, Any] = {}
        if self.random.random() < 0.3:
            image = {"num_image_tokens": self.random.randrange(1, 6), "tiles": blank_tiles(3)}
        num_prompt = self.random.randrange(1, 8)
        if num_prompt + image.get("num_image_tokens", 0) < capacity:
            sequence = new_sequence(num_prompt, max_context=capacity, **image)
            self.num_left[sequence] = self.random.randrange(1, 12)
            self.scheduler.add(sequence)

    def launch(self, batch: Batch) -> None:
        if batch.is_empty:
            return
        accesses: list[Access] = []
        members: list[tuple[Sequence, int]] = []
        for chunk in batch.prefill:
            sequence, length = chunk.sequence, chunk.sequence.length
            if chunk.start == 0 and sequence not in self.rows:
                self.rows[sequence] = self.free_rows.pop()
            row = RowAccess(self.rows[sequence])
            if chunk.start == 0:
                row.opened = (sequence.id, length)
            if chunk.num_samples:
                row.read, row.sampled = (sequence.id, length), (sequence.id, length + 1)
            accesses.append(self.access(sequence, chunk.start, chunk.end, row))
            members.append((sequence, chunk.end))
        for sequence in batch.decode:
            position = sequence.num_cached
            row = RowAccess(self.rows[sequence])
            row.read, row.sampled = (sequence.id, position + 1), (sequence.id, position + 2)
            accesses.append(self.access(sequence, position, position + 1, row))
            members.append((sequence, position + 1))
        waits = batch.after | batch.depends_on
        decodes = self.in_flight["decode"]
        self.num_narrow += batch.kind == "prefill" and bool(decodes) and decodes[-1][0].id not in waits
        step = DeviceStep(next(self.ids), batch.kind, accesses, [], frozenset(waits), members)
        self.device.launch(step)
        self.scheduler.commit(StepId(step.id), batch)
        self.in_flight[batch.kind].append((step, batch))

    @staticmethod
    def access(sequence: Sequence, start: int, end: int, row: RowAccess) -> Access:
        content: list[object] = [(sequence.id, position) for position in range(end)]
        return Access(tuple(sequence.pages), content, start, end, row=row)

    def complete(self, steps: deque[tuple[DeviceStep, Batch]]) -> None:
        while any(step.id in steps[0][1].depends_on for step, _ in self.in_flight["prefill"]):
            self.complete(self.in_flight["prefill"])
        step, batch = steps.popleft()
        self.device.run_until(step.id)
        for sequence in self.scheduler.complete(StepId(step.id), batch, [Token(1)] * len(batch.sampled)):
            self.num_left[sequence] -= 1
            if not self.num_left[sequence] or sequence.is_full:
                self.leave(sequence)

    def complete_all(self) -> None:
        while steps := self.in_flight["decode"] or self.in_flight["prefill"]:
            self.complete(steps)

    def leave(self, sequence: Sequence) -> None:
        for steps in self.in_flight.values():  # whose output for it is dropped from now on
            for step, _ in steps:
                for (member, _), access in zip(step.sequences, step.accesses, strict=True):
                    access.counts = access.counts and member is not sequence
        self.scheduler.remove(sequence)
        assert (sequence.state, sequence.pages) == (SequenceState.FINISHED, [])
        del self.num_left[sequence]
        if sequence in self.rows:
            self.free_rows.append(self.rows.pop(sequence))

    def fail(self) -> None:
        """A step failed: the others end, their tokens are dropped, and all sequences wait again."""
        while self.device.run_one():
            pass
        for steps in self.in_flight.values():
            steps.clear()
        self.scheduler.preempt_all()
        assert self.manager.num_available == self.manager.num_pages


def run_schedules(
    scheduler_class: type[Scheduler] = Scheduler, manager_class: type[PageManager] = PageManager
) -> int:
    """Run many schedules; how many prefill steps did not wait for the last decode step in flight."""
    schedules = [Schedule(seed, scheduler_class, manager_class) for seed in range(NUM_SCHEDULES)]
    for schedule in schedules:
        schedule.run()
    return sum(schedule.num_narrow for schedule in schedules)


def test_no_schedule_reads_what_another_sequence_wrote():
    assert run_schedules() > 100, "the schedules try what waiting for the last decode step would hide"


class WithoutWaits(Scheduler):
    """Prefill steps wait for no decode step."""

    def _prefill_batch(self, encode=(), prefill=()):
        return super()._prefill_batch(encode, prefill)._replace(after=frozenset())


class WithoutWaitsForRows(Scheduler):
    """Prefill steps wait for decode steps that write their pages only."""

    def _prefill_batch(self, encode=(), prefill=()):
        self._tail_steps.clear()
        return super()._prefill_batch(encode, prefill)


class WithoutDependencies(Scheduler):
    """Decode steps do not wait for the prefill steps that write their prompts."""

    def schedule(self, now, *, may_prefill=True):
        plan = super().schedule(now, may_prefill=may_prefill)
        return plan._replace(decode=plan.decode._replace(depends_on=frozenset()))


class WithoutQuarantine(PageManager):
    """Pages that a prefill step in flight writes can be allocated at once."""

    def release(self, owner, writing=(), last_decode=None):
        super().release(owner, (), last_decode)


@pytest.mark.parametrize("scheduler_class", [WithoutWaits, WithoutWaitsForRows, WithoutDependencies])
def test_the_random_schedules_find_each_missing_rule_of_the_scheduler(scheduler_class: type[Scheduler]):
    with pytest.raises(AssertionError):
        run_schedules(scheduler_class)


def test_the_random_schedules_find_a_missing_quarantine():
    with pytest.raises(AssertionError):
        run_schedules(manager_class=WithoutQuarantine)
