"""A scheduler with the rest of an engine played by the test: cache, token source, and who is done when."""

import itertools
from typing import NamedTuple

from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.batch import Batch, Plan
from kestrel_runtime.scheduling.page_manager import PageManager, StepId
from kestrel_runtime.scheduling.scheduler import Scheduler
from kestrel_runtime.scheduling.sequence import SequenceState, TokenSequence
from tests.runtime.sequences import blank_crops, new_sequence


class Range(NamedTuple):
    """Part of a sequence's image or of its positions."""

    sequence: TokenSequence
    start: int
    end: int


class Step(NamedTuple):
    """A batch that was launched."""

    id: StepId
    batch: Batch
    prompts: dict[tuple[int, int], tuple[TokenSequence, int]]
    """What it writes of prompts: page and place → sequence and position."""


def _ends(numbers):
    return (numbers[0], numbers[-1] + 1) if numbers else (0, 0)


class Turn:
    """A plan, with the work of both of its steps in the shape in which tests compare it."""

    def __init__(self, plan: Plan, steps: list[Step]):
        self.steps = steps
        self.images = [item.image for item in plan.prefill.encode]
        self.encode = [Range(item.sequence, *_ends(item.crops)) for item in plan.prefill.encode]
        self.prefill = [Range(chunk.sequence, chunk.start, chunk.end) for chunk in plan.prefill.prefill]
        self.decode = list(plan.decode.decode)
        self.sampled = [*plan.prefill.sampled, *plan.decode.sampled]
        self.members = [*plan.prefill.sequences, *plan.decode.sequences]
        self.is_empty = plan.is_empty


class World:
    """A scheduler and the rest of an engine as far as it matters here.

    Its cache remembers whose position each slot holds; its token source answers by who asks and how often, so
    that what a sequence gets can be told from what it should have got.
    """

    def __init__(self, num_pages=64, page_size=4, batch=8, prefill=1000, crops=100, prefill_of_others=None):
        self.pages = PageManager(num_pages, page_size)
        self.max_prefill_tokens, self.max_crops = prefill, crops
        self.scheduler = Scheduler(
            self.pages,
            max_batch_size=batch,
            max_prefill_tokens=prefill,
            max_crops_per_step=crops,
            max_prefill_tokens_of_others=prefill_of_others,
        )
        self.max_batch_size = batch
        self.now = 0.0
        self.slots = {}
        self.to_generate = {}
        self.finished = []
        self.sampled = []
        self._step_ids = itertools.count(1)

    @property
    def capacity(self):
        return self.pages.num_pages * self.pages.page_size

    def add(self, prompt=4, image=0, crops=0, generates=1000, **standing):
        sequence = new_sequence(
            prompt,
            num_image_tokens=image,
            pixels=blank_crops(crops) if crops else None,
            max_context=self.capacity,
            **standing,
        )
        self.to_generate[sequence] = generates
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        """One turn: plan, run, commit, complete, remove who is done. Returns the turn."""
        turn = self.begin()
        self.sampled = turn.sampled
        assert self.end(turn) == turn.sampled
        return turn

    def begin(self, *, may_prefill=True):
        """Plan, run and commit, and leave the steps in flight. Returns the turn."""
        plan = self.scheduler.schedule(now=self.now, may_prefill=may_prefill)
        return Turn(plan, [self.run_and_commit(batch) for batch in plan if not batch.is_empty])

    def run_and_commit(self, batch):
        """Returns the step."""
        self.run(batch)
        step = Step(StepId(next(self._step_ids)), batch, self.prompts_of(batch))
        self.scheduler.commit(step.id, batch)
        return step

    def end(self, turn):
        """Complete the steps of a turn. Returns who got a token."""
        return [sequence for step in turn.steps for sequence in self.complete(step)]

    def complete(self, step):
        """Complete a step, remove who is done. Returns who got a token."""
        tokens = [Token(sequence.id, (float(sequence.num_generated),)) for sequence in step.batch.sampled]
        here = self.scheduler.complete(step.id, step.batch, tokens)
        for sequence in here:
            assert sequence.tokens[-1] == tokens[step.batch.sampled.index(sequence)]
            if sequence.num_generated == self.to_generate[sequence] or sequence.is_full:
                self.scheduler.remove(sequence)
                self.finished.append(sequence)
        return here

    def fail(self):
        """A turn whose steps raise after they have written. Returns the turn."""
        plan = self.scheduler.schedule(now=self.now)
        for batch in plan:
            self.run(batch)
        self.scheduler.preempt_all()
        return Turn(plan, [])

    def steps(self, count):
        return [self.step() for _ in range(count)][-1]

    def run(self, batch):
        """Write and read the cache as the model would."""
        self.slots |= self.prompts_of(batch)
        for sequence in batch.decode:
            position = sequence.cache.num_cached
            self.slots[self.slot(sequence, position)] = (sequence, position)
        for sequence in batch.sampled:
            for position in range(sequence.length):
                assert self.slots[self.slot(sequence, position)] == (sequence, position)

    def prompts_of(self, batch):
        """What a batch writes of prompts."""
        return {
            self.slot(chunk.sequence, position): (chunk.sequence, position)
            for chunk in batch.prefill
            for position in range(chunk.start, chunk.end)
        }

    def slot(self, sequence, position):
        page, place = divmod(position, self.pages.page_size)
        return sequence.cache.pages[page], place

    def active(self):
        return [sequence for sequence in self.scheduler.sequences() if sequence.state is not SequenceState.WAITING]
