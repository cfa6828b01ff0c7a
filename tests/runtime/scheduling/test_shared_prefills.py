"""One sequence computes what several need; the others come back when it has, or when it leaves."""

from __future__ import annotations

from kestrel_runtime.scheduling.prefix_keys import Digest
from kestrel_runtime.scheduling.shared_prefills import SharedPrefills
from tests.runtime.sequences import new_sequence

KEY, OTHER_KEY = Digest(b"key"), Digest(b"other key")


def test_who_waits_comes_back_in_order_when_the_filler_ends():
    prefills, (filler, first, second) = SharedPrefills(), [new_sequence() for _ in range(3)]
    prefills.begin(KEY, filler)
    assert prefills.is_filled(KEY)
    assert not prefills.is_filled(OTHER_KEY)
    prefills.park(KEY, first)
    prefills.park(KEY, second)
    assert list(prefills) == [first, second]
    assert len(prefills) == 2
    assert prefills.end(filler) == [first, second]
    assert not prefills.is_filled(KEY)
    assert prefills.end(filler) == []


def test_a_second_filler_of_one_key_ends_nothing():
    prefills, (filler, second) = SharedPrefills(), [new_sequence() for _ in range(2)]
    prefills.begin(KEY, filler)
    prefills.begin(KEY, second)
    assert prefills.end(second) == []
    assert prefills.is_filled(KEY)


def test_who_leaves_while_parked_does_not_come_back():
    prefills, (filler, parked) = SharedPrefills(), [new_sequence() for _ in range(2)]
    prefills.begin(KEY, filler)
    prefills.park(KEY, parked)
    prefills.remove(parked)
    assert prefills.end(filler) == []
