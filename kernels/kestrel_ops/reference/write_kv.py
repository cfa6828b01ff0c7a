"""Store new keys and values in the pages of a cache."""

from torch import Tensor

from kestrel_ops.reference.pages import store_rows


def write_kv(
    key: Tensor,  # [T, G, D]
    value: Tensor,  # [T, G, D]
    key_pages: Tensor,  # [P, G, S, D], written in place
    value_pages: Tensor,  # [P, G, S, D], written in place
    slots: Tensor,  # [T] int64: page * S + place in the page; a negative slot stores nothing
    key_scale: Tensor | None = None,  # one element, float32, where the pages are float8: stored = key / scale
    value_scale: Tensor | None = None,
) -> None:
    """Write row t of `key` and `value` to slot `slots[t]`, unless that is negative.

    Values beyond the range of float8 become its largest number.
    """
    store_rows(key, key_pages, slots, key_scale)
    store_rows(value, value_pages, slots, value_scale)
