"""Requests that share prefixes and images, at random, on a device that runs steps in any order that batches allow:
what is shared is right, no step reads what another sequence wrote, and nothing is lost or freed twice.

A prefill step waits for exactly the decode steps in `Batch.after`, a decode step for the prefill steps in
`Batch.depends_on`. Each mutation makes one mistake, and the schedules (`schedules`) find it.
"""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kestrel_runtime.scheduling.cache_keys import ImageContent, PrefixKeyMaker
from kestrel_runtime.scheduling.crop_cache import CropCache, CropKey
from kestrel_runtime.scheduling.embedding_cache import EmbeddingCache
from kestrel_runtime.scheduling.page_manager import PageManager
from kestrel_runtime.scheduling.scheduler import Scheduler
from tests.runtime.scheduling.schedules import IMAGES, NUM_OPERATIONS, Schedule, run_schedules


def test_no_operation_loses_frees_twice_or_shares_wrongly():
    counts = run_schedules()
    least = {"hits": 0.02, "evictions": 0.02, "copies": 0.003, "cancellations": 0.02, "failures": 0.002}
    least |= {
        "found embeddings": 0.002,
        "evicted embeddings": 0.003,
        "found crops": 0.01,
        "removals": 0.003,
        "parked cancellations": 0.0005,
        "decoded again": 0.0002,
        "yields": 0.003,
        "steps alone": 0.003,
        "several images": 0.02,
        "embeddings read": 0.01,
        "continued": 0.01,
        "prefills that do not wait for the last decode step": 0.002,
    }
    for name, share in least.items():
        assert counts[name] >= share * NUM_OPERATIONS, f"the schedules try {name}: {counts}"


class WithoutWaits(Scheduler):
    """Prefill steps wait for no decode step."""

    def _prefill_batch(self, encode=(), prefill=(), read=()):
        return super()._prefill_batch(encode, prefill, read)._replace(after=frozenset())


class WithoutDependencies(Scheduler):
    """Decode steps do not wait for the prefill steps that write their prompts."""

    def schedule(self, now, *, may_prefill=True):
        plan = super().schedule(now, may_prefill=may_prefill)
        return plan._replace(decode=plan.decode._replace(depends_on=frozenset()))


class PublishesTheWholePrompt(Scheduler):
    """Pages are found before all chunks of a prompt are written."""

    def _publish(self, sequence, num_positions, now):
        super()._publish(sequence, max(num_positions, sequence.num_prompt_positions), now)


class KeepsTheCacheAfterAFailure(PageManager):
    """A failed step leaves findable what was cached before."""

    def forget_cached(self, namespace=None, image=None):
        return 0


class SplitsSpans(PageManager):
    """A part of an image is matched at a page end."""

    def match(self, keys, max_positions):
        keys = type(keys)(keys.root, keys.pages, keys.boundaries, (), keys.scope, keys.images)
        return super().match(keys, max_positions)


class CopiesNothing(PageManager):
    """The page at a share point gets no copy."""

    def allocate(self, owner, match, num_positions):
        return super().allocate(owner, match, num_positions)._replace(copies=())


class WritesIntoASharedPage(PageManager):
    """The page at a share point is shared in place."""

    def allocate(self, owner, match, num_positions):
        return super().allocate(owner, replace(match, is_partial_last=False), num_positions)


class FreesWhatOthersHold(PageManager):
    """A run of pages has one owner, however many sequences share it."""

    def allocate(self, owner, match, num_positions):
        allocation = super().allocate(owner, match, num_positions)
        self._num_sharing[self._owners[owner].run] = 1
        for page in match.pages:
            self._pages[page].references = 1
        return allocation


class EvictsPagesInUse(PageManager):
    """A page that was found stays evictable."""

    def allocate(self, owner, match, num_positions):
        cached = [page for page in match.pages if page in self._cached]
        allocation = super().allocate(owner, match, num_positions)
        self._cached.update(dict.fromkeys(cached))
        return allocation


class LosesWhoIsParked(Scheduler):
    """Who waits for a filler that is cancelled is not told."""

    def remove(self, sequence):
        self._shared_prefills.end(sequence)
        super().remove(sequence)


class WithoutQuarantine(PageManager):
    """Pages that a prefill step in flight writes can be allocated at once."""

    def release(self, owner, writing=()):
        super().release(owner, ())


class PublishesUnwrittenPositions(PageManager):
    """A page is found before it is full."""

    def publish(self, owner, keys, num_positions, **how):
        capacity = min(len(self._owners[owner].pages), len(keys.pages)) * self.page_size
        num_positions = max(num_positions, min(num_positions + self.page_size - 1, capacity))
        super().publish(owner, keys, num_positions, **how)


class PublishesEntriesAtLaunch(EmbeddingCache):
    """An entry is found when the step that encodes the last crop has been launched."""

    def fill(self, owner, step):
        super().fill(owner, step)
        super().complete(step)


class FreesLeasedEntries(EmbeddingCache):
    """An entry has one lease, however many sequences have it."""

    def lease(self, owner, key, **how):
        lease = super().lease(owner, key, **how)
        self._entries[lease.entry].num_leases = 1
        return lease


class PublishesForSequencesThatLeft(EmbeddingCache):
    """An entry is published although its sequence has left, and the entry is free."""

    def release(self, owner):
        lease = self._leases.get(owner)
        key = None if lease is None else lease.key
        super().release(owner)
        if lease is not None:
            lease.key = key


class FindsEvictedEntries(EmbeddingCache):
    """What is evicted can still be found."""

    def _unpublish(self, entry):
        key = self._entries[entry].key
        super()._unpublish(entry)
        assert key is not None
        self._index[key.digest] = entry


class KeepsEntriesAfterAFailure(EmbeddingCache):
    """A failed step leaves embeddings findable."""

    def reset(self):
        self._filled.clear()
        for owner in list(self._leases):
            self.release(owner)


class EmbeddingKeysWithoutNamespace(PrefixKeyMaker):
    """Embeddings of an image are found in every namespace."""

    def embedding_key(self, image, namespace):
        return super().embedding_key(image, "")


class FreesFoundCrops(CropCache):
    """The place of a crop becomes free although another image has found the crop."""

    def release(self, owner):
        for place in self._leases.get(owner, ()):
            self._places[place].num_leases = 1
        super().release(owner)


class KeepsCropsAfterAFailure(CropCache):
    """A failed step leaves crops findable."""

    def reset(self):
        known = dict(self._index)
        super().reset()
        self._index.update(known)


class CropsOfEveryNamespace(CropCache):
    """Crops are found in every namespace."""

    def find(self, owner, key, now=0.0):
        return super().find(owner, key._replace(namespace=""), now)

    def reserve(self, key, now=0.0, *, replaces=False):
        return super().reserve(key._replace(namespace=""), now, replaces=replaces)


class MissesLateDuplicates(CropCache):
    """A crop whose digest was late is published although it is known."""

    def _publish_late(self, place, late, now):
        state = self._places[place]
        state.key = CropKey(late.namespace, late.digests()[late.crop])
        self._index[state.key] = place


def with_keys(change: Callable[..., Any]) -> type[Schedule]:
    """Schedules whose keys leave something out: `change` gets images and namespace."""

    class Maker(PrefixKeyMaker):
        def keys(self, tokens, images=(), namespace="", adapter=b"", *, answer_ends=()):
            return super().keys(tokens, *change(images, namespace), adapter=adapter, answer_ends=answer_ends)

    return mutated(maker_class=Maker)


def without_digests(images: tuple[ImageContent, ...]) -> tuple[ImageContent, ...]:
    return tuple(image._replace(digest=IMAGES[0]) for image in images)


def mutated(**classes: type[Any]) -> type[Schedule]:
    return type("Mutated", (Schedule,), classes)


class KeepsPixelsWhileItWaits(Scheduler):
    """A sequence that waits for the pixels of some of its images keeps those of the others."""

    def _start_or_park(self, sequence, match):
        pixels = [image.pixels for image in sequence.images]
        super()._start_or_park(sequence, match)
        for image, own in zip(sequence.images, pixels, strict=True):
            image.pixels = own


class ForgetsFurtherImages(Scheduler):
    """The pixels of further images count as decoded."""

    def _lacks_pixels(self, sequence, match):
        images = sequence.images
        sequence.images = images[:1]
        try:
            return super()._lacks_pixels(sequence, match)
        finally:
            sequence.images = images


MUTATIONS = {
    "pixels are kept while others are waited for": mutated(scheduler_class=KeepsPixelsWhileItWaits),
    "further images are not waited for": mutated(scheduler_class=ForgetsFurtherImages),
    "no waits": mutated(scheduler_class=WithoutWaits),
    "no dependencies": mutated(scheduler_class=WithoutDependencies),
    "published before it is full": mutated(manager_class=PublishesUnwrittenPositions),
    "published before it is written": mutated(scheduler_class=PublishesTheWholePrompt),
    "kept after a failure": mutated(manager_class=KeepsTheCacheAfterAFailure),
    "spans are split": mutated(manager_class=SplitsSpans),
    "nothing is copied": mutated(manager_class=CopiesNothing),
    "a shared page is written": mutated(manager_class=WritesIntoASharedPage),
    "pages of others are freed": mutated(manager_class=FreesWhatOthersHold),
    "pages in use are evicted": mutated(manager_class=EvictsPagesInUse),
    "parked sequences are lost": mutated(scheduler_class=LosesWhoIsParked),
    "no quarantine": mutated(manager_class=WithoutQuarantine),
    "entries are found at launch": mutated(embeddings_class=PublishesEntriesAtLaunch),
    "entries of others are freed": mutated(embeddings_class=FreesLeasedEntries),
    "entries without an owner are published": mutated(embeddings_class=PublishesForSequencesThatLeft),
    "evicted entries are found": mutated(embeddings_class=FindsEvictedEntries),
    "entries are kept after a failure": mutated(embeddings_class=KeepsEntriesAfterAFailure),
    "places of found crops are freed": mutated(crops_class=FreesFoundCrops),
    "crops are kept after a failure": mutated(crops_class=KeepsCropsAfterAFailure),
    "crops without the namespace": mutated(crops_class=CropsOfEveryNamespace),
    "late crops are published twice": mutated(crops_class=MissesLateDuplicates),
    "embedding keys without the namespace": mutated(maker_class=EmbeddingKeysWithoutNamespace),
    "keys without the namespace": with_keys(lambda images, namespace: (images, "")),
    "keys without the first image": with_keys(
        lambda images, namespace: (
            tuple(image._replace(digest=IMAGES[0]) for image in images[:1]) + images[1:],
            namespace,
        )
    ),
    "keys without further images": with_keys(
        lambda images, namespace: (
            images[:1] + tuple(image._replace(digest=IMAGES[0]) for image in images[1:]),
            namespace,
        )
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_schedules_find_each_mutation(mutation: str):
    with pytest.raises((AssertionError, KeyError)):
        run_schedules(MUTATIONS[mutation], 8 * NUM_OPERATIONS)
