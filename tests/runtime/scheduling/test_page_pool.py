import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel_runtime.scheduling.page_pool import PagePool


def test_all_pages_are_free_at_first():
    pool = PagePool(5, 16)
    assert (pool.num_pages, pool.num_free, pool.num_used) == (5, 5, 0)


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (730, 46)])
def test_a_page_begun_counts_as_a_page(num_tokens, num_pages):
    assert PagePool(1, 16).pages_for(num_tokens) == num_pages


@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_every_page_is_free_or_has_one_holder(num_pages, seed):
    draw, pool, holders = random.Random(seed), PagePool(num_pages, 1), []
    for _ in range(60):
        if holders and draw.random() < 0.4:
            pool.free(holders.pop(draw.randrange(len(holders))))
        else:
            holders.append(pool.allocate(draw.randint(0, pool.num_free)))
        held = [page for pages in holders for page in pages]
        assert len(held) == len(set(held)) == pool.num_used
        assert set(held) <= set(range(num_pages))
        assert pool.num_used + pool.num_free == num_pages


def test_the_whole_pool_can_be_taken_again_and_again():
    pool = PagePool(7, 4)
    for _ in range(3):
        pages = pool.allocate(7)
        assert sorted(pages) == list(range(7))
        pool.free(pages)
    assert pool.num_free == 7


def test_a_page_freed_twice_is_a_bug():
    pool = PagePool(2, 1)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(pages)


def test_more_pages_than_are_free_is_a_bug():
    pool = PagePool(2, 1)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="num_free"):
        pool.allocate(2)


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 1), (1, 0), (-1, 1)])
def test_a_pool_without_room_is_a_bug(num_pages, page_size):
    with pytest.raises(AssertionError):
        PagePool(num_pages, page_size)
