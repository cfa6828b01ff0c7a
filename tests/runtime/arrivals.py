"""Requests that arrive at random in a `World` of random size, and invariants for every way of serving them."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kestrel_runtime.scheduling.output_parser import Token
from kestrel_runtime.scheduling.sequence import SequenceState
from tests.runtime.scheduling.page_books import check_books
from tests.runtime.world import World


class Arrivals(RuleBasedStateMachine):
    """Subclasses define the steps."""

    @initialize(
        num_pages=st.integers(4, 30),
        page_size=st.integers(1, 4),
        batch=st.integers(1, 5),
        prefill=st.integers(1, 12),
        tiles=st.integers(1, 5),
    )
    def build(self, **sizes):
        self.world = World(**sizes)
        self.arrived = []

    def still_here(self):
        return [sequence for sequence in self.arrived if sequence.state is not SequenceState.FINISHED]

    @rule(prompt=st.integers(1, 20), generates=st.integers(1, 25))
    def a_question_comes(self, prompt, generates):
        self.arrived.append(self.world.add(min(prompt, self.world.capacity - 1), generates=generates))

    @rule(prompt=st.integers(1, 5), image=st.integers(1, 14), tiles=st.integers(2, 7), generates=st.integers(1, 25))
    def an_image_comes(self, prompt, image, tiles, generates):
        if prompt + image < self.world.capacity:
            self.arrived.append(self.world.add(prompt, image, tiles, generates))

    @invariant()
    def i1_every_page_has_one_owner(self):
        held = [page for sequence in self.arrived for page in sequence.pages]
        # Pages of sequences that have left are quarantined while prefill steps in flight write them.
        states = vars(self.world.pages)["_pages"]
        num_quarantined = sum(bool(state.writing) and not state.references for state in states)
        assert len(held) == len(set(held)) == self.world.pages.num_held - num_quarantined
        check_books(self.world.pages)

    @invariant()
    def what_was_drawn_is_what_is_held(self):
        for sequence in self.arrived:
            drawn = sequence.tokens[sequence.num_prompt_tokens :]
            assert drawn == [Token(sequence.id, (float(place),)) for place in range(len(drawn))]
