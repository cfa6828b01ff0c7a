"""Random requests and conversations that share prefixes and images, on a simulated device that runs steps in any
order that batches allow.

Each position of the device's memory holds what was written there last: the number of a content. Two sequences have
equal contents where all tokens up to there, the images and the namespace are equal. Each entry for embeddings holds
the images of its crops. A step checks what it reads. A page or entry that is published too early, shared wrongly,
freed twice or not copied shows as a wrong read or in the books; a sequence that is lost, or that waits for ever for
pages, entries or the memory of its pixels, never finishes.

`KESTREL_GRPC_CACHE_OPERATIONS` sets how many operations are tried.
"""

import itertools
import os
from collections import Counter, deque
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from kestrel_runtime.output.embedding import EmbeddingForm
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.batch import Batch, EncodeItem
from kestrel_runtime.scheduling.cache_keys import CacheScope, ImageContent, PrefixKeyMaker
from kestrel_runtime.scheduling.crop_cache import CropCache, CropKey
from kestrel_runtime.scheduling.embedding_cache import EmbeddingCache
from kestrel_runtime.scheduling.page_manager import PageManager, StepId
from kestrel_runtime.scheduling.scheduler import Scheduler
from kestrel_runtime.scheduling.sequence import SequenceClock, SequenceImage, SequenceState, TokenSequence
from tests.runtime.scheduling.simulated_device import (
    Access,
    DeviceStep,
    EntryRead,
    EntryWrite,
    RowAccess,
    SimulatedDevice,
)
from tests.runtime.sequences import new_sequence

NUM_OPERATIONS = int(os.environ.get("KESTREL_GRPC_CACHE_OPERATIONS", "40000"))
NUM_TURNS = 60
NUM_CROPS = 3
IMAGES = tuple(bytes([number]) * 32 for number in range(3))
MAX_IMAGES = 4
NAMESPACES = ("", "another")
BOS = Token(0)
FORM = EmbeddingForm(patches=True, normalize=False, dtype="float16")


class LateCrops:
    """Crops of which some are those of other images, and whose digests may take a while."""

    num_crops = NUM_CROPS

    def __init__(self, image: bytes, random: Random) -> None:
        self._image, self._random = image, random
        self._are_known = False

    def content(self, crop: int) -> bytes:
        """Returns what a crop shows: the last one of any image is the same, the first two of an image are equal."""
        return b"common" if crop == NUM_CROPS - 1 else self._image

    def crop_digests(self, *, waits: bool) -> Sequence[bytes] | None:
        self._are_known = self._are_known or waits or self._random.random() < 0.5
        return [self.content(crop) for crop in range(NUM_CROPS)] if self._are_known else None


class Conversation(NamedTuple):
    """A conversation that has got its last answer."""

    namespace: str
    tokens: list[Token]
    images: tuple[ImageContent, ...]
    answer_ends: list[int]


class Schedule:
    """Sequences come, go, fail and are cancelled at random, in turns like those of the engine loop."""

    scheduler_class: type[Scheduler] = Scheduler
    manager_class: type[PageManager] = PageManager
    maker_class: type[PrefixKeyMaker] = PrefixKeyMaker
    embeddings_class: type[EmbeddingCache] = EmbeddingCache
    crops_class: type[CropCache] = CropCache

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        page_size, max_batch_size = random.choice((1, 2, 3, 4)), random.randrange(1, 6)
        self.max_batch_size = max_batch_size
        self.manager = self.manager_class(random.randrange(6, 60), page_size)
        self.device = SimulatedDevice(self.manager.num_pages, page_size, random)
        self.embeddings = self.embeddings_class(max_batch_size + 1, random.choice((0, 1, 2, 4)))
        self.crops = self.crops_class(random.choice((0, 1, 2, 3, 8)))
        self.scheduler = self.scheduler_class(
            self.manager,
            max_batch_size=max_batch_size,
            max_prefill_tokens=random.randrange(1, 16),
            max_crops_per_step=random.randrange(1, 5),
            cuts_at_share_points=random.random() < 0.7,
            embeddings=self.embeddings,
            crops=self.crops,
        )
        self.tenants = random.choice((("",), ("a", "b"), ("a", "b", "c")))
        self.num_image_tokens = random.randrange(1, 8)
        self.max_decoded = random.randrange(MAX_IMAGES, 2 * MAX_IMAGES + 3)  # images with pixels at a time
        self.maker = self.maker_class({}, page_size)
        # Questions with their answers, of few words, so that many begin alike.
        self.texts = [
            [Token(random.choice((1, 1, 1, 2))) for _ in range(random.randrange(2, 20))] for _ in range(5)
        ]
        self.answers: dict[TokenSequence, list[Token]] = {}  # of those that are here: all tokens until they finish
        self.alone: set[TokenSequence] = set()
        self.origins: dict[TokenSequence, tuple[str, tuple[ImageContent, ...]]] = {}
        self.conversations: list[Conversation] = []  # that may go on
        self.preparing: list[TokenSequence] = []  # whose images have not been decoded
        self.contents: dict[object, int] = {}
        self.decoding: list[TokenSequence] = []  # without crops, which a worker makes
        self.to_decode: dict[TokenSequence, list[SequenceImage]] = {}
        self.sequence_ids = itertools.count(1)
        self.free_rows = list(range(max_batch_size + 1))
        self.rows: dict[TokenSequence, int] = {}
        self.in_flight: dict[str, deque[tuple[DeviceStep, Batch]]] = {"prefill": deque(), "decode": deque()}
        self.ids = itertools.count(1)
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        for _ in range(NUM_TURNS):
            self.turn(is_busy=True)
        for _ in range(4000):
            if self.scheduler.is_idle and not self.preparing and not any(self.in_flight.values()):
                break
            self.turn(is_busy=False)
        assert self.scheduler.is_idle, "every sequence finishes"
        assert not self.answers, "no sequence is lost"
        assert self.manager.num_available == self.manager.num_pages, "B6: every page can be allocated again"
        check_entries(self.embeddings, self.device)
        check_pool(self.crops, self.device)
        assert not vars(self.embeddings)["_leases"], "E1: every lease has ended"
        assert not vars(self.crops)["_leases"], "every lease has ended"

    def turn(self, *, is_busy: bool) -> None:
        random = self.random
        if is_busy:
            while len(self.answers) < 8 and random.random() < 0.6:
                self.arrive()
            if self.answers and random.random() < 0.3:
                self.leave(random.choice(list(self.answers)), "cancellations")
            if random.random() < 0.02:
                self.fail()
            if random.random() < 0.02:
                self.forget()
        self.device.run_some()
        prefills, decodes = self.in_flight["prefill"], self.in_flight["decode"]
        if prefills and random.random() < 0.3:
            self.complete(prefills)
        promoted = bool(prefills and prefills[0][1].sampled) and not self.scheduler.is_decoding
        if promoted:
            self.scheduler.promote(prefills[0][1])
        if not self.scheduler.can_look_ahead:
            self.complete_all()
        had_decodes = bool(decodes)
        rows = {sequence for sequence in self.answers if sequence.cache.pages}
        assert len(rows) <= self.max_batch_size, "there is a row of the request state for each"
        running = [sequence for sequence in self.answers if sequence.has_room]
        plan = self.scheduler.schedule(0.0, may_prefill=len(prefills) < 2)
        is_isolating = self.scheduler.is_isolating or bool(self.alone & self.answers.keys())
        for sequence in () if is_isolating else running:
            assert sequence in plan.decode.decode or sequence.state is not SequenceState.RUNNING, "I2"
        for step, prompts in prefills:  # those whose prompt is in flight decode in steps that depend on it
            members = {chunk.sequence for chunk in prompts.prefill} & set(plan.decode.decode)
            assert not members or (promoted and prompts is prefills[0][1]), "I8"
            assert (step.id in plan.decode.depends_on) == bool(members), "I8"
        gave_way = {sequence.tenant for sequence in rows if sequence.state is SequenceState.WAITING}
        starting = {sequence.tenant for sequence in self.answers if sequence.cache.pages and sequence not in rows}
        self.counts["yields"] += any(tenant != other for tenant in gave_way for other in starting)
        for sequence in self.scheduler.take_preempted():
            if sequence in self.rows:
                self.free_rows.append(self.rows.pop(sequence))
        self.decoding += self.scheduler.take_without_pixels()
        self.decode()
        batch, max_decodes = plan.decode, random.randrange(1, 5)
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
        check_entries(self.embeddings, self.device)
        check_pool(self.crops, self.device)

    def arrive(self) -> None:
        random = self.random
        capacity = self.manager.num_pages * self.manager.page_size
        words = random.choice(self.texts)
        num_prompt = random.randrange(1, len(words))
        text, answer = words[:num_prompt], words[num_prompt:]
        earlier = Conversation(random.choice(NAMESPACES), [BOS], (), [])
        if self.conversations and random.random() < 0.4:
            earlier = self.conversations.pop(random.randrange(len(self.conversations)))
        namespace, prompt, images = earlier.namespace, [*earlier.tokens], earlier.images
        answer_ends = earlier.answer_ends
        if answer_ends:  # the token that ended the answer is no part of the next prompt
            prompt.pop()
        for _ in range(random.choice((0, 0, 1, 1, 2, 3))):
            if len(images) < MAX_IMAGES:
                count = random.randrange(min(2, len(text) + 1))
                prompt, text = prompt + text[:count], text[count:]
                start = len(prompt) + len(images) * self.num_image_tokens
                images = (*images, ImageContent(start, self.num_image_tokens, random.choice(IMAGES)))
        prompt += text
        if len(prompt) + len(images) * self.num_image_tokens >= capacity:
            return
        reads_embeddings = len(images) == 1 and not answer_ends and random.random() < 0.3
        if reads_embeddings:
            prompt, answer = [BOS], []
            images = (images[0]._replace(start=1),)
        sequence = TokenSequence(
            id=next(self.sequence_ids),
            tokens=prompt,
            num_prompt_tokens=len(prompt),
            request=new_sequence(
                max_context=capacity,
                tenant=random.choice(self.tenants),
                embeddings=EmbeddingForm(patches=True, normalize=False, dtype="float16")
                if reads_embeddings
                else None,
            ).request,
            clock=SequenceClock(0.0),
            images=[SequenceImage(image.start, image.num_positions) for image in images],
            answer_ends=tuple(answer_ends),
        )
        sequence.request.computes_anew = random.random() < 0.1
        sequence.request.is_transient = random.random() < 0.1
        sequence.request.is_turn = random.random() < 0.9
        left_out: list[SequenceImage] = []
        if random.random() < 0.95:
            if random.random() < 0.95 and not reads_embeddings:
                keys = self.maker.keys([*prompt], images, namespace, answer_ends=answer_ends)
                sequence.cache.keys = keys
            for image, own in zip(images, sequence.images, strict=True):
                if random.random() < 0.9:
                    own.key = self.maker.embedding_key(image.digest, namespace)
                if random.random() < 0.9:
                    own.crop_scope = CacheScope(namespace, frozenset((image.digest,)))
                keys = sequence.cache.keys
                is_cached = keys is not None and self.manager.has(keys.share_point(own.end, self.manager.page_size))
                if (is_cached or own.key in self.embeddings) and not sequence.request.computes_anew:
                    left_out.append(own)
        if left_out:
            sequence.decode_job = "decode the images"
        self.answers[sequence], self.origins[sequence] = answer, (namespace, images)
        self.to_decode[sequence] = [image for image in sequence.images if image not in left_out]
        self.preparing.append(sequence)
        self.counts["arrivals"] += 1
        self.counts["several images"] += len(images) > 1
        self.counts["continued"] += bool(answer_ends)

    def decode(self) -> None:
        """Decodes images of new requests, and of those that are parked for them, as far as their memory goes."""
        num_decoded = sum(image.pixels is not None for sequence in self.answers for image in sequence.images)
        while self.preparing and num_decoded + len(self.to_decode[self.preparing[0]]) <= self.max_decoded:
            sequence = self.preparing.pop(0)
            for image in self.to_decode.pop(sequence):
                image.pixels = self.crops_of(sequence, image)
                num_decoded += 1
            self.scheduler.add(sequence)
            if self.random.random() < 0.01:
                self.scheduler.run_alone(sequence)
                self.alone.add(sequence)
        self.decoding = [sequence for sequence in self.decoding if sequence in self.answers]
        if self.decoding and self.random.random() < 0.5:
            sequence = self.random.choice(self.decoding)
            if num_decoded + len(sequence.images) <= self.max_decoded:
                self.decoding.remove(sequence)
                self.scheduler.add_pixels(sequence, [self.crops_of(sequence, image) for image in sequence.images])
                self.counts["decoded again"] += 1

    def crops_of(self, sequence: TokenSequence, image: SequenceImage) -> LateCrops:
        _, digest = self.origin_of(sequence, image)
        return LateCrops(digest, self.random)

    def encoding(self, item: EncodeItem) -> EntryWrite:
        """Returns what the item does, and what it must find in the pool."""
        namespace, digest = self.origin_of(item.sequence, item.image)
        shown = LateCrops(digest, self.random).content
        kept = [(place, (namespace, shown(crop))) for crop, place in zip(item.crops, item.places, strict=False)]
        found = [(crop, place, (namespace, shown(crop))) for crop, place in item.found]
        self.counts["found crops"] += len(found)
        return EntryWrite(
            item.entry,
            (namespace, digest),
            item.crops,
            tuple((place, content) for place, content in kept if place is not None),
            tuple(found),
        )

    def origin_of(self, sequence: TokenSequence, image: SequenceImage) -> tuple[str, bytes]:
        namespace, images = self.origins[sequence]
        return namespace, images[sequence.images.index(image)].digest

    def launch(self, batch: Batch) -> None:
        if batch.is_empty:
            return
        if self.alone.intersection(batch.sequences):
            assert len(batch.sequences) == 1, "I6"
            self.counts["steps alone"] += 1
        accesses: list[Access] = []
        members: list[tuple[TokenSequence, int]] = []
        for chunk in batch.prefill:
            sequence, length = chunk.sequence, chunk.sequence.length
            if chunk.is_first and sequence not in self.rows:
                self.rows[sequence] = self.free_rows.pop()
            row = RowAccess(self.rows[sequence])
            if chunk.is_first:
                for image in sequence.images_behind(chunk.start):
                    image_is_there = image.pixels is not None or image.has_cached_embeddings
                    assert image_is_there, "I12: what is not cached needs its image"
                    self.counts["found embeddings"] += image.has_cached_embeddings
                row.opened = (sequence.id, length)
                self.counts["shared positions"] += chunk.start
            for start, end in sequence.spans:
                assert not start < chunk.start < end, "a chunk that begins inside an image sees a part of it only"
                assert not start < chunk.end < end, "no span is divided"
            if chunk.num_samples:
                row.read, row.sampled = (sequence.id, length), (sequence.id, length + 1)
            accesses.append(self.access(sequence, chunk.start, chunk.end, row))
            for image in sequence.images:
                if chunk.start < image.end <= chunk.end:
                    assert image.entry is not None, "I10"
                    read = EntryRead(image.entry, self.origin_of(sequence, image), NUM_CROPS)
                    accesses[-1].embeddings.append(read)
            members.append((sequence, chunk.end))
        for sequence in batch.read:
            (image,) = sequence.images
            assert image.entry is not None, "I13"
            read = EntryRead(image.entry, self.origin_of(sequence, image), NUM_CROPS)
            accesses.append(Access((), [], 0, 0, embeddings=[read]))
            members.append((sequence, 0))
            self.counts["embeddings read"] += 1
        for sequence in batch.decode:
            position = sequence.cache.num_cached
            row = RowAccess(self.rows[sequence])
            row.read, row.sampled = (sequence.id, position + 1), (sequence.id, position + 2)
            accesses.append(self.access(sequence, position, position + 1, row))
            members.append((sequence, position + 1))
        waits = batch.after | batch.depends_on
        decodes = self.in_flight["decode"]
        is_narrow = batch.kind == "prefill" and bool(decodes) and decodes[-1][0].id not in waits
        self.counts["prefills that do not wait for the last decode step"] += is_narrow
        step = DeviceStep(
            next(self.ids),
            batch.kind,
            accesses,
            [(copy.source, copy.target) for copy in batch.copies],
            frozenset(waits),
            members,
            [self.encoding(item) for item in batch.encode],
        )
        self.device.launch(step)
        self.scheduler.commit(StepId(step.id), batch)
        held = vars(self.manager)["_copy_sources"].get(StepId(step.id), ())
        sources = {copy.source for copy in batch.copies}
        assert sources <= set(held), "a step holds what it copies: its sequence may leave before it is complete"
        self.in_flight[batch.kind].append((step, batch))
        self.counts["steps"] += 1
        self.counts["copies"] += len(batch.copies)

    def access(self, sequence: TokenSequence, start: int, end: int, row: RowAccess) -> Access:
        return Access(tuple(sequence.cache.pages), self.contents_of(sequence, end), start, end, row=row)

    def contents_of(self, sequence: TokenSequence, end: int) -> list[object]:
        """What each position up to `end` holds once it is written."""
        namespace, images = self.origins[sequence]
        prompt = sequence.tokens[: sequence.num_prompt_tokens]
        tokens = iter(
            [*prompt, *self.answers[sequence], *[BOS] * 8]
        )  # steps look ahead beyond the end of an answer
        starts = {start: image.digest for (start, _), image in zip(sequence.spans, images, strict=True)}
        of_images = {position for image in images for position in range(image.start, image.end)}
        contents: list[object] = []
        content: object = self.contents.setdefault(("begin", namespace), len(self.contents))
        for position in range(end):
            if position in starts:
                content = self.contents.setdefault((content, starts[position]), len(self.contents))
            token = None if position in of_images else next(tokens)
            content = self.contents.setdefault((content, token), len(self.contents))
            contents.append(content)
        return contents

    def complete(self, steps: deque[tuple[DeviceStep, Batch]]) -> None:
        while any(step.id in steps[0][1].depends_on for step, _ in self.in_flight["prefill"]):
            self.complete(self.in_flight["prefill"])
        step, batch = steps.popleft()
        self.device.run_until(step.id)
        tokens = [self.next_token(sequence) for sequence in batch.sampled]
        for sequence in self.scheduler.complete(StepId(step.id), batch, tokens):
            if sequence.num_generated == len(self.answers[sequence]) or sequence.is_full:
                if sequence.num_generated == len(self.answers[sequence]):
                    namespace, images = self.origins[sequence]
                    ends = [*sequence.answer_ends, sequence.num_written]
                    self.conversations.append(Conversation(namespace, list(sequence.tokens), images, ends))
                self.leave(sequence, "finished")
        for sequence in batch.read:
            if sequence in self.answers:
                assert not sequence.cache.pages, "I13"
                self.leave(sequence, "finished")

    def next_token(self, sequence: TokenSequence) -> Token:
        answer = self.answers.get(sequence)
        return BOS if answer is None else answer[sequence.num_generated]

    def complete_all(self) -> None:
        while steps := self.in_flight["decode"] or self.in_flight["prefill"]:
            self.complete(steps)

    def leave(self, sequence: TokenSequence, why: str) -> None:
        for steps in self.in_flight.values():  # whose output for it is dropped from now on
            for step, _ in steps:
                for (member, _), access in zip(step.sequences, step.accesses, strict=True):
                    access.counts = access.counts and member is not sequence
        self.counts[f"parked {why}"] += sequence.state is SequenceState.PARKED
        if why == "finished":
            self.scheduler.finish(sequence)
        else:
            if sequence in self.preparing:
                self.scheduler.add(sequence)
                self.preparing.remove(sequence)
            self.scheduler.remove(sequence)
        assert (sequence.state, sequence.cache.pages) == (SequenceState.FINISHED, [])
        del self.answers[sequence]
        if sequence in self.rows:
            self.free_rows.append(self.rows.pop(sequence))
        self.counts[why] += 1

    def fail(self) -> None:
        """A step failed: the others end, their tokens are dropped, all sequences wait again, and it is unknown what
        the memory holds."""
        while self.device.run_one():
            pass
        for steps in self.in_flight.values():
            steps.clear()
        self.scheduler.preempt_all()
        for page in self.device.memory:
            page[:] = ["rubbish"] * len(page)
        self.device.entries.clear()
        self.device.pool.clear()
        assert self.manager.num_available == self.manager.num_pages
        self.counts["failures"] += 1

    def forget(self) -> None:
        """Remove what is cached of a namespace, or of an image in it."""
        namespace, image = self.random.choice((None, *NAMESPACES)), self.random.choice((None, *IMAGES))
        self.scheduler.forget_cached(namespace, image)
        if namespace is not None:
            left = [key.namespace for key in vars(self.crops)["_index"]]
            assert namespace not in left, "what was removed is not found"
        for own_namespace in NAMESPACES:
            for own_image in IMAGES:
                images = (ImageContent(1, self.num_image_tokens, own_image),)
                keys = self.maker.keys([BOS] * 3, images, own_namespace)
                if namespace in (None, own_namespace) and image in (None, own_image):
                    match = self.manager.match(keys, 1 + self.num_image_tokens)
                    assert match.num_positions == 0, "what was removed is not found"
                    assert self.maker.embedding_key(own_image, own_namespace) not in self.embeddings
        self.counts["removals"] += 1


def check_books(manager: PageManager) -> None:
    """Raise AssertionError where the books of the pages are wrong: B1, B3 and B4 of `page_manager`."""
    books = vars(manager)
    pages, free, cached, index = books["_pages"], books["_free"], books["_cached"], books["_index"]
    holders: Counter[int] = Counter()
    shared: Counter[tuple[int, ...]] = Counter()
    for owner in books["_owners"].values():
        shared[owner.run] += 1
        assert owner.pages[: len(owner.run)] == [*owner.run], "what is shared comes first"
        holders.update([*owner.pages[len(owner.run) :], *owner.sources])
    assert books["_num_sharing"] == shared, "each run of pages counts its owners"
    for run in shared:
        holders.update(run)
    for sources in books["_copy_sources"].values():
        holders.update(sources)
    assert len(free) == len(set(free))
    for page, state in enumerate(pages):
        assert state.references == holders[page], "references count owners, shared runs, and copies in flight"
        is_quarantined = bool(state.writing) and not state.references
        kinds = (page in free, page in cached, bool(state.references), is_quarantined)
        assert sum(kinds) == 1, f"B1: page {page} is in one state"
        assert page not in cached or state.keys, "B1: a cached page is published"
        assert page not in free or not state.keys, "B3: a free page is not found"
        assert not state.writing or page not in (*free, *cached), "B4: a page that is written is not allocated"
        for key in state.keys:
            assert index[key] == page, "B3: what is published is found"
    assert len(index) == sum(len(state.keys) for state in pages), "B3: only published pages are found"
    assert manager.num_available == len(free) + len(cached) == manager.num_pages - manager.num_held


def check_entries(embeddings: EmbeddingCache, device: SimulatedDevice) -> None:
    """Raise AssertionError where the books of the entries are wrong, or a published one lacks its image."""
    books = vars(embeddings)
    entries, free, unused, index = books["_entries"], books["_free"], books["_unused"], books["_index"]
    leases = Counter(lease.entry for lease in books["_leases"].values())
    assert len(free) == len(set(free)), "no entry is freed twice"
    for number, entry in enumerate(entries):
        assert entry.num_leases == leases[number]
        kinds = (number in free, number in unused, bool(entry.num_leases))
        assert sum(kinds) == 1, f"entry {number} is free, unused or leased"
        assert number not in free or entry.key is None, "a free entry is not found"
        if entry.key is not None:
            assert index[entry.key.digest] == number
            (image,) = entry.key.scope.images
            origin = (entry.key.scope.namespace, image)
            assert device.holds(EntryRead(number, origin, NUM_CROPS)), "E2: what is found is complete"
    assert len(index) == sum(entry.key is not None for entry in entries)


def check_pool(crops: CropCache, device: SimulatedDevice) -> None:
    """Raise AssertionError where the books of the pool are wrong, or a place lacks its crop."""
    books = vars(crops)
    places, free, unused, index = books["_places"], books["_free"], books["_unused"], books["_index"]
    writing = [place for of_step in books["_writing"].values() for place in of_step]
    leases = Counter(place for of_owner in books["_leases"].values() for place in of_owner)
    assert len(free) == len(set(free)), "no place is freed twice"
    for number, place in enumerate(places):
        assert place.num_leases == leases[number]
        assert place.is_written is (number not in writing)
        kinds = (number in free, number in unused, bool(place.num_leases) or not place.is_written)
        assert sum(kinds) == 1, f"C2: place {number} is free, unused or in use"
        assert number not in free or place.key is None, "a free place is not found"
        assert number not in unused or isinstance(place.key, CropKey)
        if isinstance(place.key, CropKey):
            assert index[place.key] == number
            assert not place.is_written or device.pool[number] == tuple(place.key), "what is found is there"
    assert len(index) == sum(isinstance(place.key, CropKey) for place in places)


OPERATIONS = ("arrivals", "cancellations", "finished", "failures", "removals", "steps")


def run_schedules(schedule_class: type[Schedule] = Schedule, num_operations: int = NUM_OPERATIONS) -> Counter[str]:
    """Run schedules until they have done so many operations; what they did."""
    counts: Counter[str] = Counter()
    for seed in itertools.count():
        schedule = schedule_class(seed)
        schedule.run()
        counts += schedule.counts
        counts["hits"] += schedule.scheduler.num_hits
        counts["evictions"] += schedule.manager.num_evictions
        counts["evicted embeddings"] += schedule.embeddings.num_evictions
        if sum(counts[name] for name in OPERATIONS) >= num_operations:
            return counts
    raise AssertionError("unreachable")
