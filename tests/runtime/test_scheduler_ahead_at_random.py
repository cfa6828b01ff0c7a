"""The scheduler while steps of prompts and of decoding are under way beside each other and land when they like.

Prompts are written twice, when their step begins and when it lands: whoever gets one of their pages too early is
found out by what then stands in it.
"""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kestrel_runtime.sequence import SequenceState
from tests.runtime.arrivals import Arrivals
from tests.runtime.world import World


class LookingAhead(Arrivals):
    """Turns as the engine's thread takes them: up to two steps of prompts under way, and two of decoding."""

    @initialize(
        num_pages=st.integers(6, 30),
        page_size=st.integers(1, 4),
        batch=st.integers(1, 5),
        prefill=st.integers(1, 12),
        crops=st.integers(1, 5),
    )
    def build(self, **sizes):
        self.world = World(**sizes)
        self.arrived = []
        self.prompts, self.decoding = deque(), deque()

    @precondition(lambda self: self.still_here())
    @rule(data=st.data())
    def one_is_cancelled(self, data):
        self.world.scheduler.remove(data.draw(st.sampled_from(self.still_here())))

    @rule()
    def a_step_fails(self):
        while self.decoding or self.prompts:
            self.end(self.decoding or self.prompts)
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
            scheduler.follow(self.prompts[0][0])
        if not scheduler.can_look_ahead:
            while self.decoding or self.prompts:
                self.end(self.decoding or self.prompts)
        running = [sequence for sequence in self.still_here() if sequence.state is SequenceState.RUNNING]
        is_trial, was_decoding = scheduler.is_trying, bool(self.decoding)
        batch = scheduler.next_batch(0.0, takes_prompts=len(self.prompts) < 2)
        if not is_trial:  # I2, whatever prompts are under way
            for sequence in running:
                assert sequence in batch.decode or sequence.state is SequenceState.WAITING or self.is_full(sequence)
        for step, line in ((batch.decoding, self.decoding), (batch.prompting, self.prompts)):
            if not step.is_empty:
                self.world.run(step)
                line.append((step, scheduler.commit(step)))
        if was_decoding:
            self.end(self.decoding)
        if follows and self.prompts:
            self.end(self.prompts)

    @staticmethod
    def is_full(sequence):
        return sequence.length >= sequence.max_context

    def end(self, line):
        world = self.world
        batch, drew = line.popleft()
        for chunk in batch.prefill:
            for position in range(chunk.start, chunk.end):
                world.slots[world.slot(chunk.sequence, position)] = (chunk.sequence, position)
        for sequence in world.end(batch, drew):
            if sequence.num_generated == world.to_generate[sequence] or sequence.is_full:
                world.scheduler.remove(sequence)
                world.finished.append(sequence)

    @invariant()
    def i1_every_page_has_one_owner(self):
        held = [page for sequence in self.arrived for page in sequence.pages]
        assert len(held) == len(set(held)) == self.world.pool.num_used

    @invariant()
    def tokens_come_in_order(self):
        for sequence in self.arrived:
            drawn = [token.value[0] for token in sequence.tokens[sequence.num_prompt_tokens :]]
            assert drawn == [float(place) for place in range(len(drawn))]

    def teardown(self):
        if not hasattr(self, "world"):
            return
        for turn in range(4000):
            if self.world.scheduler.is_idle and not (self.prompts or self.decoding):
                break
            self.take_turn(prompts_are_over=turn % 3 == 0)
            if self.world.scheduler.is_idle:
                while self.decoding or self.prompts:
                    self.end(self.decoding or self.prompts)
        assert self.world.scheduler.is_idle, "somebody never finishes"
        assert self.world.pool.num_used == 0


TestLookingAhead = LookingAhead.TestCase
TestLookingAhead.settings = settings(max_examples=200, stateful_step_count=25)
