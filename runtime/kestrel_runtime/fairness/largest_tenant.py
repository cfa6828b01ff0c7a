"""Chooses what is evicted if tenants hold more of a resource than there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

Item = TypeVar("Item")


def oldest_of_largest_tenant(items: Mapping[Item, str]) -> Item:
    """Returns the first item of the tenant that has most; `items` maps each to its tenant, the oldest first."""
    counts = Counter(items.values())
    largest = max(counts, key=counts.__getitem__)
    return next(item for item, tenant in items.items() if tenant == largest)
