"""The tenant that holds most loses its oldest item."""

import pytest

from kestrel_runtime.fairness.largest_tenant import oldest_of_largest_tenant


@pytest.mark.parametrize(
    ("tenants", "evicted"),
    [
        (["a"], 0),
        (["a", "b", "b"], 1),
        (["b", "a", "b", "a", "a"], 1),
        (["", "a", "a", "", ""], 0),
        (["a", "b", "b", "a"], 0),  # of equal tenants, the one with the oldest item
    ],
)
def test_the_oldest_item_of_the_largest_tenant_is_evicted(tenants: list[str], evicted: int):
    assert oldest_of_largest_tenant(dict(enumerate(tenants))) == evicted
