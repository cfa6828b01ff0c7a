"""Exports the operations of which models consist: tensors in, tensors out.

Other packages import only this module. It exports the definition of each operation in plain torch, from
`reference`.
Shapes: T tokens, B sequences, H query heads, G key/value heads, D head dimension, P pages, S slots in a page.
"""

from kestrel_ops.compilation.facts import KeptFacts
from kestrel_ops.device_limits import DeviceLimits, meta_stands_for
from kestrel_ops.dispatch import (
    COMPILED_AHEAD,
    Kernels,
    compiled_together,
    kept_facts,
    load_listed,
    measured_products,
    num_compilations,
    prepare_compilations,
    use_libraries,
)
from kestrel_ops.invariant.mode import InvariantMode, depends_on_chunks, depends_on_place
from kestrel_ops.lora.reference import BlockLowRank, ExpertAdapters, LowRank, RowsBySlot
from kestrel_ops.reference import (
    INT4_GROUP,
    RESAMPLE_WEIGHT_BITS,
    add_low_rank,
    decode_attention,
    dequantise_int4,
    hash_words,
    invariant_attention,
    invariant_attention_bytes,
    invariant_linear,
    mixture_of_experts,
    prefill_attention,
    quantise_int4,
    resample,
    rotary,
    sample,
    tau_scales,
    write_kv,
)
from kestrel_ops.shapes import ModelShape, TextShape, VisionShape, has_float8_product

__all__ = [
    "COMPILED_AHEAD",
    "INT4_GROUP",
    "RESAMPLE_WEIGHT_BITS",
    "BlockLowRank",
    "DeviceLimits",
    "ExpertAdapters",
    "InvariantMode",
    "KeptFacts",
    "Kernels",
    "LowRank",
    "ModelShape",
    "RowsBySlot",
    "TextShape",
    "VisionShape",
    "add_low_rank",
    "compiled_together",
    "decode_attention",
    "depends_on_chunks",
    "depends_on_place",
    "dequantise_int4",
    "has_float8_product",
    "hash_words",
    "invariant_attention",
    "invariant_attention_bytes",
    "invariant_linear",
    "kept_facts",
    "load_listed",
    "measured_products",
    "meta_stands_for",
    "mixture_of_experts",
    "num_compilations",
    "prefill_attention",
    "prepare_compilations",
    "quantise_int4",
    "resample",
    "rotary",
    "sample",
    "tau_scales",
    "use_libraries",
    "write_kv",
]
