"""Each operation in plain torch: the definition of right, on any device.

These wait for the device to learn how much there is to do, so that work which contains them cannot be captured as a
CUDA graph: mixture_of_experts, prefill_attention, rotary_decode_attention, rotary_write_kv, write_kv.
"""
