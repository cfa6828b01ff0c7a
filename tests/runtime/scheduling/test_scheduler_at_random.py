"""The scheduler's invariants, I1 to I6, while requests come and go and steps fail in any order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.sequence import SequenceState
from tests.runtime.scheduling.schedules import check_books
from tests.runtime.world import World

WAITING, PARKED, PREFILLING, PREFILLED, RUNNING, FINISHED = SequenceState


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go and run in any order; the invariants hold after each step."""

    @initialize(
        num_pages=st.integers(4, 30),
        page_size=st.integers(1, 4),
        batch=st.integers(1, 5),
        prefill=st.integers(1, 12),
        crops=st.integers(1, 5),
    )
    def build(self, **sizes):
        self.world = World(**sizes)
        self.arrived = []

    def still_here(self):
        return [sequence for sequence in self.arrived if sequence.state is not FINISHED]

    @rule(prompt=st.integers(1, 20), generates=st.integers(1, 25))
    def a_question_comes(self, prompt, generates):
        self.arrived.append(self.world.add(min(prompt, self.world.capacity - 1), generates=generates))

    @rule(prompt=st.integers(1, 5), image=st.integers(1, 14), crops=st.integers(2, 7), generates=st.integers(1, 25))
    def an_image_comes(self, prompt, image, crops, generates):
        if prompt + image < self.world.capacity:
            self.arrived.append(self.world.add(prompt, image, crops, generates))

    @rule(
        prompt=st.integers(3, 12),
        places=st.lists(st.integers(1, 12), min_size=2, max_size=4),
        image=st.integers(1, 6),
        crops=st.integers(2, 5),
        generates=st.integers(1, 25),
    )
    def a_conversation_comes(self, prompt, places, image, crops, generates):
        places = tuple(sorted(min(place, prompt) for place in places))
        if prompt + image * len(places) < self.world.capacity:
            self.arrived.append(self.world.add(prompt, image, crops, generates, image_places=places))

    @invariant()
    def i1_every_page_has_one_owner(self):
        held = [page for sequence in self.arrived for page in sequence.cache.pages]
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

    @precondition(lambda self: self.still_here())
    @rule(data=st.data())
    def one_is_cancelled(self, data):
        sequence = data.draw(st.sampled_from(self.still_here()))
        self.world.scheduler.remove(sequence)
        assert (sequence.state, sequence.cache.pages) == (FINISHED, [])

    @rule()
    def a_step_is_taken(self):
        self.take_step()

    @rule()
    def a_step_fails(self):
        world = self.world
        here, tokens = self.still_here(), {item: list(item.tokens) for item in self.arrived}
        was_trying = world.scheduler.is_isolating
        batch = world.fail()
        assert world.pages.num_held == 0
        assert world.scheduler.num_waiting == len(here)
        assert {item: list(item.tokens) for item in self.arrived} == tokens
        assert world.scheduler.is_isolating == bool(batch.members)
        if was_trying:
            assert len(batch.members) == 1

    @rule(count=st.integers(5, 15))
    def steps_are_taken(self, count):
        for _ in range(count):
            self.take_step()

    def take_step(self):
        world, here = self.world, self.still_here()
        tokens = {sequence: list(sequence.tokens) for sequence in here}
        encoded = {image: len(image.encoded_crops) for sequence in here for image in sequence.images}
        cached = {sequence: sequence.cache.num_cached for sequence in here}
        active_before = world.active()
        running_before = [sequence for sequence in active_before if sequence.state is RUNNING]
        is_isolating = world.scheduler.is_isolating
        batch = world.step()
        if is_isolating:  # I6, and no other invariant of who runs
            assert len(batch.members) == 1
            return
        working = {item.sequence for item in (*batch.encode, *batch.prefill)} | set(batch.decode)
        # I2: each sequence that ran before decodes or was preempted; none is in a step twice.
        for sequence in running_before:
            assert sequence in batch.decode or sequence.state is WAITING
        assert len({chunk.sequence for chunk in batch.prefill}) == len(batch.prefill)
        assert not {chunk.sequence for chunk in batch.prefill} & set(batch.decode)
        # I3
        num_prefill = sum(chunk.end - chunk.start for chunk in batch.prefill)
        if num_prefill > world.max_prefill_tokens:
            ((pictured, start, end),) = batch.prefill
            assert (start, end) in pictured.spans
        if batch.decode:
            assert sum(part.end - part.start for part in batch.encode) <= world.max_crops
        for image, (sequence, start, end) in zip(batch.images, batch.encode, strict=True):
            assert image in sequence.images
            assert start == encoded.get(image, 0) < end
        assert len({sequence for sequence, _, _ in batch.encode}) == len(batch.encode), "one image at a time"
        for sequence, start, end in batch.prefill:
            assert start == (cached[sequence] if sequence in active_before else 0)
            for span_start, span_end in sequence.spans:  # never split
                assert not span_start < start < span_end
                assert not span_start < end < span_end
        # I4: the oldest advances, and preemption forgets nothing.
        if here:
            assert here[0] in working
        for sequence in here:
            new = [Token(sequence.id, (float(sequence.num_generated - 1),))] if sequence in world.sampled else []
            assert sequence.tokens == tokens[sequence] + new

    @invariant()
    def i1_no_page_is_held_by_who_may_not_have_it(self):
        for sequence in self.arrived:
            assert (sequence.state in (PREFILLING, RUNNING)) == bool(sequence.cache.pages)
            assert self.world.pages.pages_for(sequence.cache.num_cached) <= len(sequence.cache.pages)
            assert len(sequence.cache.pages) <= self.world.pages.pages_for(sequence.length)

    @invariant()
    def i5_the_scheduler_keeps_the_order_of_arrival(self):
        here = list(self.world.scheduler.sequences())
        assert len(here) == len(self.still_here())
        if self.world.scheduler.is_isolating:  # I6: the one that failed comes first
            assert set(here) == set(self.still_here())
        else:
            assert here == self.still_here()
        assert self.world.scheduler.num_active == len(self.world.active()) <= self.world.max_batch_size
        assert self.world.scheduler.num_waiting == len(self.still_here()) - len(self.world.active())

    def teardown(self):
        if not hasattr(self, "world"):
            return
        for _ in range(2000):
            if self.world.scheduler.is_idle:
                break
            self.take_step()
        assert self.world.scheduler.is_idle, "a sequence never finishes"
        assert self.world.pages.num_held == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=25)
