"""Store new keys and values in the pages of a cache."""

from torch import Tensor


def write_kv(
    key: Tensor,  # [T, G, D]
    value: Tensor,  # [T, G, D]
    key_pages: Tensor,  # [P, S, G, D], written in place
    value_pages: Tensor,  # [P, S, G, D], written in place
    slots: Tensor,  # [T] int64: page * S + place in the page
) -> None:
    """Write row t of `key` and `value` to slot `slots[t]`."""
    key_pages.view(-1, *key_pages.shape[2:])[slots] = key
    value_pages.view(-1, *value_pages.shape[2:])[slots] = value
