"""The definition of each operation in plain torch, for any device.

These operations read sizes from the device on the host, so no CUDA graph can capture them: add_low_rank,
invariant_attention, mixture_of_experts, prefill_attention, rotary_decode_attention, rotary_write_kv, write_kv.
"""
