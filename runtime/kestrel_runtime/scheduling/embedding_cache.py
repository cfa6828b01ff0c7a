"""Assigns entries of the device's image embeddings to sequences, and finds published entries by their image.

An entry holds the embeddings of one image.

Invariants
  E1  A sequence leases one entry to write at most, for one of its images after the other. At most `num_leases`
      sequences do, and an entry can be had for each of them.
  E2  An entry is published when the step that encoded the last crop of its image is complete, if its sequence is
      still here. It is not written again before it is free.
  E3  A published entry that no sequence leases stays until `num_cached` others have lost their last lease
      after it, it is removed, or its place is needed for a lease.
  E4  Where an image has been published before, a second entry of it stays private to its sequence.
  E5  Sequences with several images also hold published entries, to read. At most `num_cached` entries are held, so
      that `num_leases` are left for E1.
  E6  An entry that was published as transient becomes free with its last lease, and takes the place of no other.

An entry that becomes free may still be read or written by steps in flight. Steps that encode or read embeddings run
one after the other, in the order of their launches, so that a later step may take it over at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kestrel_runtime.scheduling.cache_keys import Digest, EmbeddingKey
from kestrel_runtime.scheduling.page_manager import StepId, first_value

EntryId: TypeAlias = int
"""Index of an entry of the image embeddings on the device."""
LeaseId: TypeAlias = Hashable
"""Names a lease, among those of all sequences."""


class EmbeddingLease(NamedTuple):
    """An entry for a sequence."""

    entry: EntryId
    is_complete: bool
    """True if the entry already holds the embeddings of the sequence's image."""


@dataclass(slots=True)
class _Entry:
    num_leases: int = 0
    num_holds: int = 0
    """Leases of other than the sequences' own entries (E5)."""
    key: EmbeddingKey | None = None
    """The key under which the entry is published; None if it is not."""
    published_at: float = 0.0
    is_transient: bool = False


@dataclass(slots=True, eq=False)
class _Lease:
    entry: EntryId
    key: EmbeddingKey | None
    """The key under which the entry will be published; None if it will not be."""
    replaces: bool
    is_hold: bool = False
    is_transient: bool = False


class EmbeddingCache:
    """Entries of one image each. Belongs to the engine thread, except that `in` and `oldest_published_at` may be
    called from any thread."""

    def __init__(self, num_leases: int, num_cached: int = 0) -> None:
        """Creates `num_leases` entries for sequences, and `num_cached` for images without one; 0 publishes
        nothing."""
        self.num_entries = num_leases + num_cached
        self.num_lookups = 0
        """Images whose embeddings were looked for."""
        self.num_hits = 0
        """Images whose embeddings were found."""
        self.num_evictions = 0
        self._num_leases = num_leases
        self._num_cached = num_cached
        self._entries = [_Entry() for _ in range(self.num_entries)]
        self._free: list[EntryId] = list(range(self.num_entries))[::-1]
        self._unused: OrderedDict[EntryId, None] = OrderedDict()  # published without a lease, the oldest first
        self._index: dict[Digest, EntryId] = {}  # in the order of publication
        self._leases: dict[LeaseId, _Lease] = {}
        self._num_holds = 0
        self._num_held = 0  # entries
        self._filled: dict[StepId, list[_Lease]] = {}  # by the step that encodes the last crop

    def __contains__(self, key: EmbeddingKey | None) -> bool:
        """Returns True if the embeddings of an image are published. In other threads the answer may be out of
        date."""
        return key is not None and key.digest in self._index

    @property
    def num_leases_left(self) -> int:
        """The number of further sequences that can lease an entry to write."""
        return self._num_leases - (len(self._leases) - self._num_holds)

    @property
    def num_holds_left(self) -> int:
        """The number of further entries that can be held."""
        return self._num_cached - self._num_held

    @property
    def num_published(self) -> int:
        """Entries that can be found, leased or not."""
        return len(self._index)

    def oldest_published_at(self) -> float | None:
        """Returns when the oldest published entry was published, in seconds of the clock of `complete`, or None.
        May be called from any thread."""
        entry = first_value(self._index)
        return None if entry is None else self._entries[entry].published_at

    def lease(
        self,
        owner: LeaseId,
        key: EmbeddingKey | None,
        *,
        computes_anew: bool = False,
        is_transient: bool = False,
    ) -> EmbeddingLease:
        """Gives a sequence the published entry of an image, or a free one.

        With `computes_anew` the sequence gets a free entry, which will replace the published one. Without a key the
        entry is not published; with `is_transient` it can be found only while it is leased.
        """
        assert owner not in self._leases, "an image has one entry"
        found = None
        if not self._num_cached:
            key = None
        if key is not None and not computes_anew:
            found = self._index.get(key.digest)
            self.num_lookups += 1
            self.num_hits += found is not None
        if found is None and not self._free:  # entries that are held leave fewer for images without a lease
            self._evict()
        entry = self._free.pop() if found is None else found
        self._unused.pop(entry, None)
        self._entries[entry].num_leases += 1
        new_key = key if found is None else None
        self._leases[owner] = _Lease(entry, new_key, computes_anew, is_transient=is_transient)
        return EmbeddingLease(entry, found is not None)

    def hold(self, owner: LeaseId, key: EmbeddingKey | None) -> EntryId | None:
        """Gives a sequence the published entry of a further image, to read. Returns None if there is none, or if no
        further entry can be held."""
        assert owner not in self._leases, "an image has one entry"
        entry = None if key is None else self._index.get(key.digest)
        if entry is None or (not self._entries[entry].num_holds and self.num_holds_left <= 0):
            return None
        state = self._entries[entry]
        self.num_lookups += 1
        self.num_hits += 1
        self._num_held += not state.num_holds
        self._num_holds += 1
        state.num_holds += 1
        state.num_leases += 1
        self._unused.pop(entry, None)
        self._leases[owner] = _Lease(entry, None, replaces=False, is_hold=True)
        return entry

    def is_held(self, owner: LeaseId) -> bool:
        """Returns True if a lease is one to read."""
        return self._leases[owner].is_hold

    def fill(self, owner: LeaseId, step: StepId) -> None:
        """Records that `step`, which has been launched, encodes the last crop of an image into its entry."""
        self._filled.setdefault(step, []).append(self._leases[owner])

    def complete(self, step: StepId, now: float = 0.0) -> None:
        """Publishes the entries that a completed step has filled, if their leases have not ended.

        `now`: in seconds of any clock.
        """
        for lease in self._filled.pop(step, ()):
            if lease.key is not None:
                self._publish(lease, lease.key, now)
                lease.key = None

    def release(self, owner: LeaseId) -> None:
        """Ends a lease, if there is one of this name."""
        lease = self._leases.pop(owner, None)
        if lease is None:
            return
        lease.key = None
        state = self._entries[lease.entry]
        state.num_leases -= 1
        if lease.is_hold:
            state.num_holds -= 1
            self._num_holds -= 1
            self._num_held -= not state.num_holds
        if not state.num_leases and state.key is not None and state.is_transient:
            self._unpublish(lease.entry)
        if not state.num_leases and state.key is None:
            self._free.append(lease.entry)
        elif not state.num_leases:
            self._unused[lease.entry] = None
            if len(self._unused) > self._num_cached:
                self._evict()

    def forget(self, namespace: str | None = None, image: bytes | None = None) -> int:
        """Removes the entries of a namespace, or of an image in it, from those that can be found; all entries if
        both are None.

        Returns the number of entries. Sequences keep their leases and do not publish the embeddings that they
        encode.
        """
        for lease in self._leases.values():
            if lease.key is not None and lease.key.scope.is_part_of(namespace, image):
                lease.key = None
        published = [(entry, self._entries[entry].key) for entry in self._index.values()]
        found = [entry for entry, key in published if key is not None and key.scope.is_part_of(namespace, image)]
        for entry in found:
            self._unpublish(entry)
        return len(found)

    def reset(self) -> None:
        """Empties all entries and ends all leases after a failed step. No step may be in flight."""
        self._filled.clear()
        self.forget()
        for owner in list(self._leases):
            self.release(owner)

    def _evict(self) -> None:
        self._unpublish(next(iter(self._unused)))
        self.num_evictions += 1

    def _publish(self, lease: _Lease, key: EmbeddingKey, now: float) -> None:
        known = self._index.get(key.digest)
        if known is not None and not lease.is_transient:
            self._entries[known].is_transient = False
        if known is not None and not lease.replaces:
            return
        if known is not None:
            self._unpublish(known)
        self._index[key.digest] = lease.entry
        state = self._entries[lease.entry]
        state.key, state.published_at, state.is_transient = key, now, lease.is_transient

    def _unpublish(self, entry: EntryId) -> None:
        state = self._entries[entry]
        assert state.key is not None, "only published entries are removed"
        del self._index[state.key.digest]
        state.key = None
        if entry in self._unused:
            del self._unused[entry]
            self._free.append(entry)
