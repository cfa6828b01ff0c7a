"""Of many values those that were used last are kept."""

from kestrel_runtime.engine.recent.values import LruCache


def test_the_value_that_was_not_used_for_the_longest_time_leaves_first():
    values: LruCache[str, int] = LruCache(2)
    values.put("a", 1)
    values.put("b", 2)
    assert values.get("a") == 1
    values.put("c", 3)
    assert [values.get(key) for key in "abc"] == [1, None, 3]


def test_a_value_that_is_put_again_replaces_the_first_and_takes_no_other_place():
    values: LruCache[str, int] = LruCache(2)
    for value in (1, 2, 3):
        values.put("a", value)
    values.put("b", 4)
    assert (values.get("a"), values.get("b")) == (3, 4)
