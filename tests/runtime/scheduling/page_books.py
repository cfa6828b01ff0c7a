"""What always holds for the books of a page manager: B1, B3 and B4 of `kestrel_runtime.scheduling.page_manager`."""

from __future__ import annotations

from collections import Counter

from kestrel_runtime.scheduling.page_manager import PageManager


def check_books(manager: PageManager) -> None:
    """Raise AssertionError where an invariant does not hold."""
    books = vars(manager)
    pages, free, cached, index = books["_pages"], books["_free"], books["_cached"], books["_index"]
    holders: Counter[int] = Counter()
    for owner in books["_owners"].values():
        holders.update([*owner.pages, *owner.sources])
    for sources in books["_copy_sources"].values():
        holders.update(sources)
    assert len(free) == len(set(free))
    for page, state in enumerate(pages):
        assert state.references == holders[page], "references count the owners, and the copies in flight"
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
