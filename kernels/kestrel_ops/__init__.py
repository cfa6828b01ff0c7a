"""The operations the models are made of: tensors in, tensors out.

Nothing below this module is imported from outside the package. Knows nothing about requests, sequences or
models. Every operation has a plain-torch definition under `reference/`; that is what is exported here.
Shapes: T tokens, B sequences, H query heads, G key/value heads, D head dimension, P pages, S slots in a page.
"""

from kestrel_ops.dispatch import Kernels
from kestrel_ops.reference.decode_attention import decode_attention
from kestrel_ops.reference.mixture_of_experts import mixture_of_experts
from kestrel_ops.reference.prefill_attention import prefill_attention
from kestrel_ops.reference.resample import RESAMPLE_WEIGHT_BITS, resample
from kestrel_ops.reference.rotary import rotary
from kestrel_ops.reference.sample import sample
from kestrel_ops.reference.write_kv import write_kv
from kestrel_ops.shapes import ModelShape, TextShape, VisionShape, has_float8_product

__all__ = [
    "RESAMPLE_WEIGHT_BITS",
    "Kernels",
    "ModelShape",
    "TextShape",
    "VisionShape",
    "decode_attention",
    "has_float8_product",
    "mixture_of_experts",
    "prefill_attention",
    "resample",
    "rotary",
    "sample",
    "write_kv",
]
