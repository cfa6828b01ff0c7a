"""Exports the definition of each operation in plain torch, for any device."""

from kestrel_ops.attention.reference import (
    crop_attention,
    decode_attention,
    prefill_attention,
    rotary,
    rotary_decode_attention,
    rotary_write_kv,
    tau_scales,
    write_kv,
)
from kestrel_ops.experts.reference import mixture_of_experts
from kestrel_ops.experts.reference_int4 import INT4_GROUP, dequantise_int4, quantise_int4
from kestrel_ops.images.reference import RESAMPLE_WEIGHT_BITS, hash_words, resample
from kestrel_ops.invariant.reference import (
    invariant_attention,
    invariant_attention_bytes,
    invariant_experts,
    invariant_linear,
)
from kestrel_ops.linear.reference import (
    decode_contract,
    decode_expand,
    layer_norm_linear,
    scaled_linear,
    scaled_linear_add,
    scaled_linear_gelu,
)
from kestrel_ops.lora.reference import add_down_terms, add_low_rank, add_up_terms, rows_by_slot
from kestrel_ops.norms.reference import add_layer_norm, concat_gelu, quantise_rows
from kestrel_ops.sampling.reference import advance_rows, philox_uniform, pick_allowed, sample

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
    "advance_rows",
    "concat_gelu",
    "crop_attention",
    "decode_attention",
    "decode_contract",
    "decode_expand",
    "dequantise_int4",
    "hash_words",
    "invariant_attention",
    "invariant_attention_bytes",
    "invariant_experts",
    "invariant_linear",
    "layer_norm_linear",
    "mixture_of_experts",
    "philox_uniform",
    "pick_allowed",
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
