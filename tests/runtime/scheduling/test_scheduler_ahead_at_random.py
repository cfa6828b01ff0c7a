"""The scheduler while prefill steps and decode steps are in flight beside each other and complete at any time.

Prompts are written twice, when their step is launched and when it is complete: so a page that has a new owner too
early has the wrong content.
"""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kestrel_runtime.scheduling.sequence import SequenceState
from tests.runtime.arrivals import Arrivals


class LookingAhead(Arrivals):
    """Turns as the engine's thread takes them: up to two prefill steps and two decode steps in flight."""

    def __init__(self):
        super().__init__()
        self.prompts, self.decoding = deque(), deque()

    @precondition(lambda self: self.still_here())
    @rule(data=st.data())
    def one_is_cancelled(self, data):
        self.world.scheduler.remove(data.draw(st.sampled_from(self.still_here())))

    @rule()
    def a_step_fails(self):
        self.end_all()
        self.world.fail()
        assert self.world.pages.num_held == 0

    @rule(prompts_are_over=st.lists(st.booleans(), min_size=1, max_size=12))
    def turns_are_taken(self, prompts_are_over):
        for are_over in prompts_are_over:
            self.take_turn(prompts_are_over=are_over)

    def take_turn(self, *, prompts_are_over):
        scheduler = self.world.scheduler
        if prompts_are_over and self.prompts:
            self.end(self.prompts)
        promoted = bool(self.prompts) and bool(self.prompts[0].batch.sampled) and not scheduler.is_decoding
        if promoted:
            scheduler.promote(self.prompts[0].batch)
        if not scheduler.can_look_ahead:
            self.end_all()
        running = [sequence for sequence in self.still_here() if sequence.state is SequenceState.RUNNING]
        is_isolating, was_decoding = scheduler.is_isolating, bool(self.decoding)
        plan = scheduler.schedule(0.0, may_prefill=len(self.prompts) < 2)
        if not is_isolating:  # I2, whatever prompts are in flight
            for sequence in running:
                has_room = sequence.length < sequence.max_context
                assert sequence in plan.decode.decode or sequence.state is SequenceState.WAITING or not has_room
        for step in self.prompts:  # I8: those whose prompt is in flight decode in steps that depend on it
            members = {chunk.sequence for chunk in step.batch.prefill} & set(plan.decode.decode)
            assert not members or (promoted and step is self.prompts[0])
            assert (step.id in plan.decode.depends_on) == bool(members)
        for batch, line in ((plan.decode, self.decoding), (plan.prefill, self.prompts)):
            if not batch.is_empty:
                line.append(self.world.run_and_commit(batch))
        if was_decoding:
            self.end(self.decoding)
        if promoted and self.prompts:
            self.end(self.prompts)

    def end(self, line):
        while any(step.id in line[0].batch.depends_on for step in self.prompts):
            self.end(self.prompts)
        step = line.popleft()
        self.world.slots |= step.prompts
        self.world.complete(step)

    def end_all(self):
        while self.decoding or self.prompts:
            self.end(self.decoding or self.prompts)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        for turn in range(4000):
            if self.world.scheduler.is_idle and not (self.prompts or self.decoding):
                break
            self.take_turn(prompts_are_over=turn % 3 == 0)
            if self.world.scheduler.is_idle:
                self.end_all()
        assert self.world.scheduler.is_idle, "a sequence never finishes"
        assert self.world.pages.num_held == 0


TestLookingAhead = LookingAhead.TestCase
TestLookingAhead.settings = settings(max_examples=200, stateful_step_count=25)
