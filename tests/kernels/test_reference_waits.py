"""Which definitions wait for the device: on tensors without values they cannot go on."""

import functools

import pytest
import torch

from kestrel_ops import BlockLowRank, LowRank, RowsBySlot, reference

NO_OPERATIONS = {
    "INT4_GROUP",
    "RESAMPLE_WEIGHT_BITS",
    "WAITING_FOR_DEVICE",
    "dequantise_int4",
    "invariant_attention_bytes",
    "quantise_int4",
}


def blank(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def longs(*shape):
    return blank(*shape, dtype=torch.int64)


def ints(*shape):
    return blank(*shape, dtype=torch.int32)


def float8(*shape):
    return blank(*shape, dtype=torch.float8_e4m3fn)


def pages():
    return blank(5, 2, 4, 8), blank(5, 2, 4, 8)  # 5 pages of 4 positions, 2 heads of 8


def adapters():
    """Two slots of a block whose rows are of 16 columns."""
    layer = LowRank(blank(2, 4, 16), blank(2, 4, 16))
    flags = blank(3, dtype=torch.bool)
    return BlockLowRank(
        (layer, layer), (layer, layer), blank(16), blank(16), flags, blank(6, 16), RowsBySlot(longs(6))
    )


# Six tokens of three sequences, 2 heads of 8; or rows of 16.
OPERANDS = {
    "add_low_rank": lambda: (*(blank(6, 16), blank(6, 16)), *(LowRank(blank(2, 4, 16), blank(2, 4, 16)), longs(6))),
    "add_down_terms": lambda: (blank(6, 16), blank(6, 32), None, adapters()),
    "add_layer_norm": lambda: (blank(6, 16), blank(6, 16), 1e-5, torch.float32),
    "add_up_terms": lambda: (blank(6, 32), adapters()),
    "concat_gelu": lambda: (blank(6, 16), blank(6, 16), torch.float32),
    "crop_attention": lambda: (blank(6, 48), 3, 2),
    "decode_attention": lambda: (blank(3, 2, 8), *pages(), longs(3, 2), longs(3)),
    "decode_contract": lambda: (blank(3, 16), blank(16, 16), None, blank(16), blank(3, 16)),
    "decode_expand": lambda: (
        *(blank(3, 16), blank(32, 16), None, blank(32), blank(32), 1e-5),
        *(16, blank(3, 16), blank(3, 16)),
    ),
    "invariant_attention": lambda: (blank(6, 2, 8), *pages(), ints(3, 2), ints(4), ints(3), ints(6), 2),
    "invariant_experts": lambda: (blank(6, 16), blank(6, 4), blank(4, 32, 16), blank(4, 16, 16), 2),
    "invariant_linear": lambda: (blank(6, 16), blank(9, 16), blank(9)),
    "layer_norm_linear": lambda: (blank(6, 16), blank(16), blank(16), 1e-5, blank(4, 16), blank(4)),
    "mixture_of_experts": lambda: (blank(6, 16), blank(6, 4), blank(4, 32, 16), blank(4, 16, 16), 2),
    "pick_allowed": lambda: (blank(3, 9), blank(2, 9, dtype=torch.bool), longs(3)),
    "advance_rows": lambda: (longs(5, 6), blank(5, 2), longs(3, 4), longs(3), longs(3)),
    "philox_uniform": lambda: (longs(3), longs(3)),
    "prefill_attention": lambda: (
        *(blank(6, 2, 8) for _ in range(3)),
        *(*pages(), ints(3, 2), ints(4), ints(3), ints(6), 2),
    ),
    "quantise_rows": lambda: (blank(6, 16),),
    "hash_words": lambda: (ints(3, 5), longs(4, 5)),
    "resample": lambda: (blank(4, 4, 3, dtype=torch.uint8), ints(3, 5), 0),
    "rotary": lambda: (blank(6, 2, 8), blank(6, 2), blank(6, 2)),
    "rotary_decode_attention": lambda: (
        *(blank(3, 48), longs(3), blank(9, 2), blank(9, 2), *pages(), ints(3, 2), blank(3, 16)),
        *(None, None, None, None, blank(1), ints(1)),
    ),
    "rotary_write_kv": lambda: (blank(6, 48), longs(6), blank(9, 2), blank(9, 2), *pages(), longs(6)),
    "rows_by_slot": lambda: (longs(6), ints(4, 2), 4),
    "sample": lambda: (blank(3, 9), blank(3), blank(3), blank(3)),
    "scaled_linear": lambda: (blank(6, 16), None, blank(16, 16), None, None, torch.float32),
    "scaled_linear_add": lambda: (float8(6, 16), blank(1), float8(16, 16), blank(1), blank(16), blank(6, 16)),
    "scaled_linear_gelu": lambda: (float8(6, 16), blank(1), float8(16, 16), blank(1), blank(16), blank(1)),
    "tau_scales": lambda: (blank(6, 48), longs(6), blank(2, 48), blank(2, 48), blank(2)),
    "write_kv": lambda: (blank(6, 2, 8), blank(6, 2, 8), *pages(), longs(6)),
}


def test_every_definition_is_looked_at():
    assert set(reference.__all__) - NO_OPERATIONS == OPERANDS.keys()


@pytest.mark.parametrize("operation", OPERANDS)
def test_those_that_wait_for_the_device_are_named(operation):
    run = getattr(reference, operation)
    if operation == "rows_by_slot":
        run = functools.partial(run, is_decode=True, dtype=torch.float32)
    if operation in reference.WAITING_FOR_DEVICE:
        with pytest.raises(NotImplementedError):
            run(*OPERANDS[operation]())
    else:
        run(*OPERANDS[operation]())
