"""The definition of each operation in plain torch, for any device."""

from kestrel_ops.reference.attention import (
    crop_attention,
    decode_attention,
    prefill_attention,
    rotary_decode_attention,
    tau_scales,
)
from kestrel_ops.reference.cache import rotary, rotary_write_kv, write_kv
from kestrel_ops.reference.experts import mixture_of_experts
from kestrel_ops.reference.images import RESAMPLE_WEIGHT_BITS, resample
from kestrel_ops.reference.int4 import INT4_GROUP, dequantise_int4, quantise_int4
from kestrel_ops.reference.invariant import (
    invariant_attention,
    invariant_attention_bytes,
    invariant_experts,
    invariant_linear,
)
from kestrel_ops.reference.linear import (
    decode_contract,
    decode_expand,
    layer_norm_linear,
    scaled_linear,
    scaled_linear_add,
    scaled_linear_gelu,
)
from kestrel_ops.reference.low_rank import add_down_terms, add_low_rank, add_up_terms, rows_by_slot
from kestrel_ops.reference.rows import add_layer_norm, concat_gelu, quantise_rows
from kestrel_ops.reference.sampling import philox_uniform, sample

WAITING_FOR_DEVICE = frozenset(
    {
        "add_low_rank",
        "invariant_attention",
        "invariant_experts",
        "mixture_of_experts",
        "prefill_attention",
        "rotary_decode_attention",
        "rotary_write_kv",
        "write_kv",
    }
)
"""The definitions that read sizes from the device on the host, so that no CUDA graph can capture them."""

__all__ = [
    "INT4_GROUP",
    "RESAMPLE_WEIGHT_BITS",
    "WAITING_FOR_DEVICE",
    "add_down_terms",
    "add_layer_norm",
    "add_low_rank",
    "add_up_terms",
    "concat_gelu",
    "crop_attention",
    "decode_attention",
    "decode_contract",
    "decode_expand",
    "dequantise_int4",
    "invariant_attention",
    "invariant_attention_bytes",
    "invariant_experts",
    "invariant_linear",
    "layer_norm_linear",
    "mixture_of_experts",
    "philox_uniform",
    "prefill_attention",
    "quantise_int4",
    "quantise_rows",
    "resample",
    "rotary",
    "rotary_decode_attention",
    "rotary_write_kv",
    "rows_by_slot",
    "sample",
    "scaled_linear",
    "scaled_linear_add",
    "scaled_linear_gelu",
    "tau_scales",
    "write_kv",
]
