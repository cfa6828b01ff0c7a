"""Which page of the cache belongs to whom. Host-side bookkeeping; the tensors are `kv_cache.KVCache`."""

from __future__ import annotations


class PagePool:
    """A fixed number of equal pages, each free or owned by exactly one holder."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 0, "a cache needs a page"
        assert page_size > 0, "a page needs a slot"
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = [True] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller has checked `num_free`."""
        assert count <= self.num_free, "the caller checks num_free first"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back."""
        for page in pages:
            assert not self._is_free[page], f"page {page} is freed twice"
            self._is_free[page] = True
        self._free.extend(pages)
