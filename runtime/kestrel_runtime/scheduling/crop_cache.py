"""Assigns places of the device's pool of encoded crops, and finds the crops that are in it by their pixels.

The vision encoder computes each crop by itself, so what it makes of a crop serves every image with the same crop.

Invariants
  C1  A crop is found by its namespace and the digest of its pixels, from the moment on at which a step that encodes
      it is planned. Steps that encode run one after the other in the order of their plans, and a step that fails
      empties the pool, so whoever finds a crop reads it behind its writer.
  C2  A place is not given to another crop while a step that writes it is in flight, or while an image that has
      found its crop is not complete.
  C3  A crop that finds no place is encoded and not kept: the pool delays nothing.
  C4  A crop whose digest was not known when its step was planned gets its key when the step is complete.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kestrel_runtime.scheduling.page_manager import StepId, first_value

PlaceId: TypeAlias = int
"""Index of a crop in the pool on the device."""

_RECENT_S = 10.0
"""The time in seconds for which a hit makes further hits of its namespace likely."""
_MAX_KNOWN_NAMESPACES = 1024


class CropKey(NamedTuple):
    """Names a crop. Weights, vision backend and scales are the same for all crops of a process."""

    namespace: str
    digest: bytes
    """The digest of the pixels. Digests of one process are made by one function."""


class LateKey(NamedTuple):
    """Names a crop whose digest is still being computed."""

    namespace: str
    digests: Callable[[], Sequence[bytes] | None]
    """Waits for the digests of all crops of its image; empty if they could not be computed."""
    crop: int
    """The number of the crop in its image."""


@dataclass(slots=True)
class _Place:
    key: CropKey | LateKey | None = None
    """The key under which the crop is or will be found; None if it is not."""
    num_leases: int = 0
    is_written: bool = True
    """False while the step that writes the crop is planned or in flight."""
    published_at: float = 0.0


class CropCache:
    """Places of one encoded crop each. Belongs to the engine thread, except that any thread may read numbers."""

    def __init__(self, num_places: int = 0) -> None:
        """Creates `num_places` free places; with 0 the cache is off."""
        self.num_places = num_places
        self.num_lookups = 0
        """Crops that were looked for; those that were not found have been encoded."""
        self.num_hits = 0
        self.num_evictions = 0
        self._places = [_Place() for _ in range(num_places)]
        self._free: list[PlaceId] = list(range(num_places))[::-1]
        self._unused: OrderedDict[PlaceId, None] = OrderedDict()  # written, without a lease, the oldest first
        self._index: dict[CropKey, PlaceId] = {}
        self._leases: dict[Hashable, list[PlaceId]] = {}
        self._writing: dict[StepId, list[PlaceId]] = {}
        self._hit_at: OrderedDict[str, float] = OrderedDict()  # by namespace

    @property
    def num_published(self) -> int:
        """Crops that can be found."""
        return len(self._index)

    def oldest_published_at(self) -> float | None:
        """Returns when the oldest crop was published, in seconds of the clock of `complete`, or None. May be called
        from any thread."""
        place = first_value(self._index)
        return None if place is None else self._places[place].published_at

    def has_recent_hits(self, namespace: str, now: float) -> bool:
        """Returns True if a crop of the namespace was found a short time ago. `now`: in seconds of any clock."""
        hit_at = self._hit_at.get(namespace)
        return hit_at is not None and now - hit_at < _RECENT_S

    def find(self, owner: Hashable, key: CropKey, now: float = 0.0) -> PlaceId | None:
        """Leases the place of a crop to an image; returns None if the pool does not have the crop."""
        place = self._index.get(key)
        if place is None:
            return None
        self.num_lookups += 1
        self.num_hits += 1
        self._note_hit(key.namespace, now)
        self._places[place].num_leases += 1
        self._unused.pop(place, None)
        self._leases.setdefault(owner, []).append(place)
        return place

    def reserve(self, key: CropKey | LateKey, now: float = 0.0, *, replaces: bool = False) -> PlaceId | None:
        """Returns a place for a crop that a planned step encodes, or None if every place is in use.

        With `replaces` the crop was not looked for, and replaces what the pool has of it.
        """
        self.num_lookups += not replaces
        known = self._index.get(key) if isinstance(key, CropKey) else None
        if known is not None:
            self._unpublish(known)
        if not self._free:
            if not self._unused:
                return None
            self._unpublish(next(iter(self._unused)))
            self.num_evictions += 1
        place = self._free.pop()
        state = self._places[place]
        state.key, state.is_written, state.published_at = key, False, now
        if isinstance(key, CropKey):
            self._index[key] = place
        return place

    def fill(self, places: Iterable[PlaceId | None], step: StepId) -> None:
        """Records that `step`, which has been launched, writes these places; None stands for no place."""
        self._writing.setdefault(step, []).extend(place for place in places if place is not None)

    def complete(self, step: StepId, now: float = 0.0) -> None:
        """Ends the writing of a step that is complete. `now`: in seconds of any clock."""
        for place in self._writing.pop(step, ()):
            state = self._places[place]
            state.is_written = True
            if isinstance(state.key, LateKey):
                self._publish_late(place, state.key, now)
            self._settle(place)

    def release(self, owner: Hashable) -> None:
        """Ends the leases of an image, if it has any."""
        for place in self._leases.pop(owner, ()):
            self._places[place].num_leases -= 1
            self._settle(place)

    def forget(self, namespace: str | None = None) -> int:
        """Removes all crops of a namespace, or of all, from those that can be found; returns their number.

        A crop does not know its images, so those of one image cannot be removed alone.
        """
        num_before = self.num_published
        for place, state in enumerate(self._places):
            if state.key is not None and namespace in (None, state.key.namespace):
                self._unpublish(place)
        return num_before - self.num_published

    def reset(self) -> None:
        """Empties the pool and ends all leases after a failed step. No step may be in flight."""
        self._writing.clear()
        for state in self._places:
            state.is_written = True
        self.forget()
        for owner in list(self._leases):
            self.release(owner)
        self._free = list(range(self.num_places))[::-1]  # those that were planned, too

    def _publish_late(self, place: PlaceId, late: LateKey, now: float) -> None:
        digests = late.digests()
        key = CropKey(late.namespace, digests[late.crop]) if digests else None
        if key in self._index:  # it would have been found, had its digest been known
            self._note_hit(late.namespace, now)
            key = None
        state = self._places[place]
        state.key, state.published_at = key, now
        if key is not None:
            self._index[key] = place

    def _note_hit(self, namespace: str, now: float) -> None:
        self._hit_at[namespace] = now
        self._hit_at.move_to_end(namespace)
        if len(self._hit_at) > _MAX_KNOWN_NAMESPACES:
            self._hit_at.popitem(last=False)

    def _unpublish(self, place: PlaceId) -> None:
        state = self._places[place]
        if isinstance(state.key, CropKey):
            del self._index[state.key]
        state.key = None
        self._unused.pop(place, None)
        self._settle(place)

    def _settle(self, place: PlaceId) -> None:
        """Makes a place available again, if no step writes it and no image reads it."""
        state = self._places[place]
        if not state.is_written or state.num_leases:
            return
        if state.key is None:
            self._free.append(place)
        else:
            self._unused[place] = None
            self._unused.move_to_end(place)
