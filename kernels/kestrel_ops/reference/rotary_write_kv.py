"""Apply the rotary embedding to queries and keys of packed tokens, and store keys and values in the cache."""

from torch import Tensor

from kestrel_ops.reference.pages import store_rows
from kestrel_ops.reference.rotary import rotary

WAITS_FOR_DEVICE = True
"""Reads the number of rows on the host: no graph can capture it."""


def rotary_write_kv(
    qkv: Tensor,  # [T, (H + 2 * G) * D], rows may be strided; rotated in place
    positions: Tensor,  # [T] int64
    cosine: Tensor,  # [longest context, R / 2] float32
    sine: Tensor,  # [longest context, R / 2] float32
    key_pages: Tensor,  # [P, G, S, D] in the type of `qkv` or float8_e4m3fn, written in place
    value_pages: Tensor,  # [P, G, S, D], likewise
    slots: Tensor,  # [T] int64: page * S + place in the page; tokens with a negative one are not stored
    key_scale: Tensor | None = None,  # [1] float32: factor of stored keys when they are read
    value_scale: Tensor | None = None,  # [1] float32
    query_scale: Tensor | None = None,  # [T, H]: multiplies queries before the rotation
    value_factor: Tensor | None = None,  # [T, G]: multiplies values before they are stored
) -> tuple[Tensor, Tensor, Tensor]:  # query [T, H, D], key [T, G, D], value [T, G, D]: views of `qkv`
    """Rows of `qkv` hold queries, keys and values; see `rotary` for the rotation. Computed in float32.

    Float8 pages have scales: stored values are divided by them and clipped to the largest float8 value.
    """
    num_groups, head_dim = key_pages.shape[1], key_pages.shape[3]
    key_value = num_groups * head_dim
    parts = qkv.split((qkv.shape[1] - 2 * key_value, key_value, key_value), dim=1)
    query, key, value = (part.unflatten(1, (-1, head_dim)) for part in parts)
    turned = query.float()
    if query_scale is not None:
        turned = turned * query_scale[..., None].float()
    cosine, sine = cosine[positions], sine[positions]
    query.copy_(rotary(turned, cosine, sine))
    key.copy_(rotary(key.float(), cosine, sine))
    if value_factor is not None:
        value.copy_(value.float() * value_factor[..., None].float())
    store_rows(key, key_pages, slots, key_scale)
    store_rows(value, value_pages, slots, value_scale)
    return query, key, value
