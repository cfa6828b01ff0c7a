"""The scheduler while steps of prompts and of decoding are under way beside each other and land when they like.

Prompts are written twice, when their step begins and when it lands: whoever gets one of their pages too early is
found out by what then stands in it.
"""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kestrel_runtime.scheduling.sequence import SequenceState
from tests.runtime.arrivals import Arrivals


class LookingAhead(Arrivals):
    """Turns as the engine's thread takes them: up to two steps of prompts under way, and two of decoding."""

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
        assert self.world.pool.num_used == 0

    @rule(prompts_are_over=st.lists(st.booleans(), min_size=1, max_size=12))
    def turns_are_taken(self, prompts_are_over):
        for are_over in prompts_are_over:
            self.take_turn(prompts_are_over=are_over)

    def take_turn(self, *, prompts_are_over):
        scheduler = self.world.scheduler
        if prompts_are_over and self.prompts:
            self.end(self.prompts)
        follows = bool(self.prompts) and bool(self.prompts[0][1]) and not scheduler.is_decoding
        if follows:
            scheduler.follow(self.prompts[0][1])
        if not scheduler.can_look_ahead:
            self.end_all()
        running = [sequence for sequence in self.still_here() if sequence.state is SequenceState.RUNNING]
        is_trial, was_decoding = scheduler.is_trying, bool(self.decoding)
        batch = scheduler.next_batch(0.0, takes_prompts=len(self.prompts) < 2)
        if not is_trial:  # I2, whatever prompts are under way
            for sequence in running:
                has_room = sequence.length < sequence.max_context
                assert sequence in batch.decode or sequence.state is SequenceState.WAITING or not has_room
        for step, _ in list(self.prompts)[1 if follows else 0 :]:  # I8: those that decoding does not wait for
            assert not {chunk.sequence for chunk in step.prefill} & set(batch.decode)
        for step, line in ((batch.decoding, self.decoding), (batch.prompting, self.prompts)):
            if not step.is_empty:
                line.append((step, self.world.run_and_commit(step)))
        if was_decoding:
            self.end(self.decoding)
        if follows and self.prompts:
            self.end(self.prompts)

    def end(self, line):
        batch, drew = line.popleft()
        self.world.write_prompts(batch)
        self.world.end(batch, drew)

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
        assert self.world.scheduler.is_idle, "somebody never finishes"
        assert self.world.pool.num_used == 0


TestLookingAhead = LookingAhead.TestCase
TestLookingAhead.settings = settings(max_examples=200, stateful_step_count=25)
