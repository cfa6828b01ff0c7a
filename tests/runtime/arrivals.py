"""Requests that come to a `World` at random."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kestrel_runtime.sequence import Sequence, SequenceState
from tests.runtime.world import World


class Arrivals(RuleBasedStateMachine):
    """Whoever inherits it makes both."""

    world: World
    arrived: list[Sequence]

    def still_here(self):
        return [sequence for sequence in self.arrived if sequence.state is not SequenceState.FINISHED]

    @rule(prompt=st.integers(1, 20), generates=st.integers(1, 25))
    def a_question_comes(self, prompt, generates):
        self.arrived.append(self.world.add(min(prompt, self.world.capacity - 1), generates=generates))

    @rule(prompt=st.integers(1, 5), image=st.integers(1, 14), crops=st.integers(2, 7), generates=st.integers(1, 25))
    def an_image_comes(self, prompt, image, crops, generates):
        if prompt + image < self.world.capacity:
            self.arrived.append(self.world.add(prompt, image, crops, generates))
