"""Assigns pages of the KV cache to sequences, and finds published pages again by their content.

A page is `page_size` positions of keys and values of all layers.

Invariants
  B1  A page is in one of four states: free, quarantined, held (it has references), or cached (published, no
      references, evictable unless quarantined).
  B2  Published positions are never written again. The sequence that published a partial page may write behind the
      published positions in place; every other sequence gets a copy of that page before it writes.
  B3  Only `publish` makes a page findable, and the caller publishes completed positions only.
  B4  A page that a prefill step in flight writes is quarantined until that step is complete. A page that only a
      decode step in flight writes can be allocated at once: the scheduler has the first step of each new owner run
      after the decode steps of sequences that have left.
  B5  Eviction takes cached pages only: least recently used first, and the end of a chain before its beginning.
  B6  No page is pinned: when all sequences have left and all steps are complete, every page can be allocated.
  B7  Cached pages that were published as transient are evicted before all others, so they take the place of none.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, NewType, TypeAlias, cast

from msgspec import Struct, field

from kestrel_runtime.scheduling.cache_keys import EVERYBODY, CacheScope, Digest, PrefixKeys

PageId: TypeAlias = int
"""Index of a page of the KV cache."""
SequenceId: TypeAlias = int
"""Unique among the sequences of an engine."""
StepId = NewType("StepId", int)
"""Number of a launched step of an engine. Numbers rise and are never reused."""
Dropped: TypeAlias = "Counter[PageId | tuple[PageId, ...]]"
"""References of pages that are given up, and owners of runs of pages that are shared."""

_RUN_PAGES = 8
"""Runs of pages that are counted together are multiples of this."""


def first_value(index: Mapping[Any, int]) -> int | None:
    """Returns the value that has been in a dict longest, or None. Other threads may change the dict."""
    while True:
        try:
            return next(iter(index.values()), None)
        except RuntimeError:  # another thread has changed the dict just now
            continue


class PrefixMatch(Struct, frozen=True):
    """Published pages that hold the first `num_positions` positions of a prompt."""

    pages: tuple[PageId, ...] = ()
    num_positions: int = 0
    is_partial_last: bool = False
    """True if the last page is shared up to a share point inside it, so that a new owner needs a copy."""

    @property
    def num_shared(self) -> int:
        """The number of pages that a new owner shares: all but one that it copies."""
        return len(self.pages) - self.is_partial_last

    @property
    def run(self) -> tuple[PageId, ...]:
        """The first of the shared pages, whose owners are counted together. Sequences about one image have the same
        run, also if some of them share a few pages of text behind it."""
        return self.pages[: (len(self.pages) - self.is_partial_last) // _RUN_PAGES * _RUN_PAGES]


class PageCopy(NamedTuple):
    """A copy of a whole page that a step makes before it reads or writes the target."""

    source: PageId
    target: PageId


class Allocation(NamedTuple):
    """Pages for a sequence, in the order of its positions, and the copies that its first step makes."""

    pages: tuple[PageId, ...]
    copies: tuple[PageCopy, ...]


class _Page(Struct):
    references: int = 0
    """One for each run of pages that sequences share, for each sequence outside of its run, and for each copy."""
    keys: list[Digest] = field(default_factory=list)
    scope: CacheScope = EVERYBODY
    """The namespace and images of its content, if it has keys."""
    published_at: float = 0.0
    """The time at which the page got the first of its keys."""
    is_transient: bool = False
    """True if all that have published the page did so as transient."""
    writing: set[StepId] = field(default_factory=set)
    """Prefill steps in flight: the page is quarantined until they are complete."""


class _Owner(Struct):
    pages: list[PageId]
    num_shared: int
    """Leading pages that were found published: this sequence never writes them."""
    run: tuple[PageId, ...]
    """The first of these, whose owners are counted together."""
    num_published: int
    """Full pages that have been published or were found published."""
    sources: list[PageId]
    """Sources of copies that no launched step makes yet."""
    is_transient: bool = False
    """True if the sequence has published pages as transient."""


class PageManager:
    """A fixed number of pages of equal size, shared by reference. Belongs to one thread, except for `has` and
    `oldest_published_at`."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 0, "a cache needs a page"
        assert page_size > 0, "a page needs a position"
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_findable = 0
        """Published pages, whether they are held or not."""
        self.num_evictions = 0
        self._pages = [_Page() for _ in range(num_pages)]
        self._free: list[PageId] = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[PageId, None] = OrderedDict()  # evictable, least recently used first
        self._index: dict[Digest, PageId] = {}  # in the order of publication
        self._owners: dict[SequenceId, _Owner] = {}
        # How many owners share a run of pages. An image has dozens of pages, so they are counted together.
        self._num_sharing: dict[tuple[PageId, ...], int] = {}
        self._steps: defaultdict[StepId, list[PageId]] = defaultdict(list)  # whose end concerns these pages
        self._copy_sources: defaultdict[StepId, list[PageId]] = defaultdict(list)

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: free ones, and cached ones that can be evicted."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Pages that cannot be allocated now."""
        return self.num_pages - self.num_available

    def pages_for(self, num_positions: int) -> int:
        """Returns the number of pages that hold `num_positions` positions."""
        return -(-num_positions // self.page_size)

    def has(self, key: Digest) -> bool:
        """Returns True if a page is published under a key. In other threads the answer may be out of date."""
        return key in self._index

    def oldest_published_at(self) -> float | None:
        """Returns when the oldest findable page was published, or None if there is none. May be called from any
        thread."""
        page = first_value(self._index)
        return None if page is None else self._pages[page].published_at

    def match(self, keys: PrefixKeys, max_positions: int) -> PrefixMatch:
        """Returns the longest published prefix of at most `max_positions` positions that splits no span."""
        # A prefix with an image has dozens of pages, so no loop goes over them.
        page_size, boundaries = self.page_size, keys.boundaries
        found = list(map(self._index.get, keys.pages[: max_positions // page_size]))
        pages = cast("list[PageId]", found[: found.index(None)] if None in found else found)
        matched = len(pages) * page_size
        while True:
            most = min(max_positions, matched + page_size - 1)
            for share_point in sorted(boundaries, reverse=True) if boundaries else ():
                if matched < share_point <= most and (page := self._index.get(boundaries[share_point])) is not None:
                    return PrefixMatch((*pages[: matched // page_size], page), share_point, is_partial_last=True)
            shareable = keys.shareable(matched)
            if shareable == matched:
                return PrefixMatch(tuple(pages[: matched // page_size]), matched)
            # The matched pages end inside a span: go back to a page end, or a share point, before the span.
            matched = shareable // page_size * page_size

    def num_needed(self, match: PrefixMatch, num_positions: int) -> int:
        """Returns how much of `num_available` an allocation takes: new pages, a copy, and cached pages that become
        held."""
        num_revived = sum(map(self._cached.__contains__, match.pages))
        return self.pages_for(num_positions) - match.num_shared + num_revived

    def allocate(self, owner: SequenceId, match: PrefixMatch, num_positions: int) -> Allocation:
        """Allocates pages for a sequence that has none: those of `match`, and new ones up to `num_positions`.

        The caller has compared `num_needed` with `num_available`. A partial last page is copied; the source is held
        until `commit_copies` names the step that copies it and that step is complete.
        """
        assert owner not in self._owners, "a sequence is given its first pages once"
        found, num_shared, run = match.pages, match.num_shared, match.run
        pages, sources = list(found[:num_shared]), list(found[num_shared:])
        own = self._owners[owner] = _Owner(pages, num_shared, run, num_shared, sources)
        num_sharing = self._num_sharing.get(run, 0)
        self._num_sharing[run] = num_sharing + 1
        for page in found[len(run) :] if num_sharing else found:
            state = self._pages[page]
            if not state.references:
                self._cached.pop(page, None)
            state.references += 1
        self._grow(own, num_positions)
        copies = (PageCopy(sources[0], pages[num_shared]),) if sources else ()
        return Allocation(tuple(pages), copies)

    def append(self, owner: SequenceId, num_positions: int) -> list[PageId]:
        """Allocates further pages for a sequence, up to `num_positions` positions in all; returns the new ones.

        The caller has checked `num_available`.
        """
        return self._grow(self._owners[owner], num_positions)

    def dropped_with(self, match: PrefixMatch) -> Dropped:
        """Returns what `num_freed` counts up if a sequence starts with `match` before others leave."""
        return Counter(dict.fromkeys((*match.pages, match.run), -1))

    def num_freed(self, owner: SequenceId, dropped: Dropped) -> int:
        """Returns how many pages become available when a sequence releases its pages.

        `dropped` has what is given up before; that of this sequence is added. Pages that steps in flight write are
        not counted.
        """
        own, num_freed = self._owners[owner], 0
        dropped[own.run] += 1
        is_last = dropped[own.run] == self._num_sharing[own.run]
        for page in (*own.pages[0 if is_last else len(own.run) :], *own.sources):
            dropped[page] += 1
            num_freed += dropped[page] == self._pages[page].references and not self._pages[page].writing
        return num_freed

    def commit_copies(self, owner: SequenceId, step: StepId) -> None:
        """Records that `step`, which has been launched, makes the sequence's copies. Their sources are held until
        the step is complete."""
        own = self._owners[owner]
        self._copy_sources[step] += own.sources
        own.sources = []

    def publish(
        self,
        owner: SequenceId,
        keys: PrefixKeys,
        num_positions: int,
        *,
        replaces: bool = False,
        is_transient: bool = False,
        now: float = 0.0,
    ) -> None:
        """Publishes the sequence's pages up to `num_positions` positions, all of which completed steps have
        written.

        If the same content is already published, its pages stay findable; with `replaces` the sequence's pages
        replace them. With `is_transient` they are the first to be evicted. `now`: in seconds of any clock.
        """
        own = self._owners[owner]
        own.is_transient = is_transient
        page_size, num_published = self.page_size, own.num_published
        for place in range(num_published, min(num_positions // page_size, len(keys.pages))):
            page, key = own.pages[place], keys.pages[place]
            self._publish_page(page, key, keys.scope, now, replaces=replaces, is_transient=is_transient)
            own.num_published = place + 1
        for share_point, key in keys.boundaries.items():
            if num_published * page_size <= share_point <= num_positions:
                page = own.pages[share_point // page_size]
                self._publish_page(page, key, keys.scope, now, replaces=replaces, is_transient=is_transient)

    def release(self, owner: SequenceId, writing: Collection[StepId] = ()) -> None:
        """Releases all pages of a sequence. Has no effect if it holds none.

        `writing` are the prefill steps in flight that write its pages.
        """
        own = self._owners.pop(owner, None)
        if own is None:
            return
        for step in writing:
            for page in own.pages[own.num_shared :]:
                self._pages[page].writing.add(step)
                self._steps[step].append(page)
        run = own.run
        num_sharing = self._num_sharing.pop(run) - 1
        if num_sharing:
            self._num_sharing[run] = num_sharing
        # The end of the chain is cached first, so that it is evicted before the pages that it continues.
        for page in (*own.pages[len(run) if num_sharing else 0 :][::-1], *own.sources):
            self._drop(page)
        if own.is_transient:  # again the end of the chain first
            for page in own.pages:
                if page in self._cached and self._pages[page].is_transient:
                    self._cached.move_to_end(page, last=False)

    def complete(self, step: StepId) -> None:
        """Ends the quarantines and copy references that wait for a step, which is complete."""
        for page in self._steps.pop(step, ()):
            state = self._pages[page]
            state.writing.remove(step)
            if not state.references and not state.writing:
                self._settle(page)
        for page in self._copy_sources.pop(step, ()):
            self._drop(page)

    def forget_cached(self, namespace: str | None = None, image: bytes | None = None) -> int:
        """Removes the keys of the pages of a namespace, or of an image in it; of all pages if both are None.

        Returns the number of pages. Sequences that hold them continue, and may publish again.
        """
        forgotten = {page for page in self._index.values() if self._pages[page].scope.is_part_of(namespace, image)}
        for page in forgotten:
            state = self._pages[page]
            for key in list(state.keys):
                del self._index[key]
                self._forget_key(page, key)
        return len(forgotten)

    def _grow(self, own: _Owner, num_positions: int) -> list[PageId]:
        num_new = self.pages_for(num_positions) - len(own.pages)
        pages: list[PageId] = []
        free, states = self._free, self._pages
        assert num_new <= len(free) + len(self._cached), "the caller checks num_available first"
        for _ in range(num_new):
            page = free.pop() if free else self._evict()
            state = states[page]
            assert not state.references, "a page that is allocated has no owner"
            assert not state.writing, "a page that is allocated is not quarantined"
            state.references = 1
            pages.append(page)
        own.pages += pages
        return pages

    def _evict(self) -> PageId:
        page, _ = self._cached.popitem(last=False)
        state = self._pages[page]
        for key in state.keys:
            del self._index[key]
        state.keys.clear()
        self.num_findable -= 1
        self.num_evictions += not state.is_transient
        return page

    def _publish_page(
        self, page: PageId, key: Digest, scope: CacheScope, now: float, *, replaces: bool, is_transient: bool
    ) -> None:
        # Two sequences may have computed the same content: the pages that were published first are found.
        known = self._index.get(key)
        if known is not None and not is_transient:
            self._pages[known].is_transient = False
        if known == page or (known is not None and not replaces):
            return
        if known is not None:
            del self._index[key]
            self._forget_key(known, key)
        self._index[key] = page
        state = self._pages[page]
        if not state.keys:
            self.num_findable += 1
            state.published_at, state.is_transient = now, is_transient
        state.keys.append(key)
        state.scope = scope

    def _forget_key(self, page: PageId, key: Digest) -> None:
        state = self._pages[page]
        state.keys.remove(key)
        if not state.keys:
            self.num_findable -= 1
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def _drop(self, page: PageId) -> None:
        state = self._pages[page]
        assert state.references, f"page {page} is released more often than it was taken"
        state.references -= 1
        if not state.references and not state.writing:
            self._settle(page)

    def _settle(self, page: PageId) -> None:
        """Caches a page without references and quarantine if it is published, and frees it otherwise."""
        state = self._pages[page]
        if state.keys:
            self._cached[page] = None
            if state.is_transient:
                self._cached.move_to_end(page, last=False)
        else:
            self._free.append(page)
