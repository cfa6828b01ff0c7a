"""A scheduler with the rest of an engine played by the test: cache, token source, and who is done when."""

from kestrel_runtime.interfaces.tokens import Token
from kestrel_runtime.scheduling.page_pool import PagePool
from kestrel_runtime.scheduling.scheduler import Scheduler
from kestrel_runtime.scheduling.sequence import SequenceState
from tests.runtime.sequences import blank_tiles, new_sequence


class World:
    """A scheduler and the rest of an engine as far as it matters here.

    Its cache remembers whose position each slot holds; its token source answers by who asks and how often, so
    that what a sequence gets can be told from what it should have got.
    """

    def __init__(self, num_pages=64, page_size=4, batch=8, prefill=1000, crops=100):
        self.pool = PagePool(num_pages, page_size)
        self.max_prefill_tokens, self.max_crops = prefill, crops
        self.scheduler = Scheduler(
            self.pool, max_batch_size=batch, max_prefill_tokens=prefill, max_crops_per_step=crops
        )
        self.max_batch_size = batch
        self.slots = {}
        self.to_generate = {}
        self.finished = []
        self.due = []

    @property
    def capacity(self):
        return self.pool.num_pages * self.pool.page_size

    def add(self, prompt=4, image=0, crops=0, generates=1000, **standing):
        sequence = new_sequence(
            prompt,
            num_image_tokens=image,
            crops=blank_tiles(crops) if crops else None,
            max_context=self.capacity,
            **standing,
        )
        self.to_generate[sequence] = generates
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        """One turn: choose, run, commit, remove who is done. Returns the batch."""
        batch, self.due = self.begin()
        assert self.end(batch, self.due) == self.due
        return batch

    def begin(self, *, takes_prompts=True):
        """Choose, run and commit, and leave it under way. Returns what `end` wants, the batch first."""
        batch = self.scheduler.next_batch(now=0.0, takes_prompts=takes_prompts)
        return batch, self.run_and_commit(batch)

    def run_and_commit(self, batch):
        """Returns who draws a token."""
        self.run(batch)
        due = batch.due
        assert self.scheduler.commit(batch) == due
        return due

    def end(self, batch, drew):
        """Land what was begun, remove who is done. Returns who got a token."""
        drawn = {sequence.id: Token(sequence.id, (float(sequence.num_generated),)) for sequence in drew}
        here = self.scheduler.land(batch, drew, drawn)
        for sequence in here:
            assert sequence.tokens[-1] == drawn[sequence.id]
            if sequence.num_generated == self.to_generate[sequence] or sequence.is_full:
                self.scheduler.remove(sequence)
                self.finished.append(sequence)
        return here

    def fail(self):
        """A step whose run raises after it has written. Returns the batch."""
        batch = self.scheduler.next_batch(now=0.0)
        self.run(batch)
        self.scheduler.put_all_back()
        return batch

    def steps(self, count):
        return [self.step() for _ in range(count)][-1]

    def run(self, batch):
        """Write and read the cache as the model would."""
        self.write_prompts(batch)
        for sequence in batch.decode:
            position = sequence.num_cached
            self.slots[self.slot(sequence, position)] = (sequence, position)
        for sequence in batch.due:
            for position in range(sequence.length):
                assert self.slots[self.slot(sequence, position)] == (sequence, position)

    def write_prompts(self, batch):
        for chunk in batch.prefill:
            for position in range(chunk.start, chunk.end):
                self.slots[self.slot(chunk.sequence, position)] = (chunk.sequence, position)

    def slot(self, sequence, position):
        page, place = divmod(position, self.pool.page_size)
        return sequence.pages[page], place

    def active(self):
        return [sequence for sequence in self.scheduler.sequences() if sequence.state is not SequenceState.WAITING]
