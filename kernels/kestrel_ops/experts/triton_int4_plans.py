"""How the products of experts of 4 bits are divided into programs, by type and number of tokens."""

from __future__ import annotations

import torch

from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.experts.reference_int4 import INT4_GROUP
from kestrel_ops.experts.triton_plans import ExpertsPlan, OneTokenPlan, ProductPlan
from kestrel_ops.shapes import FLOAT8

_PAIR = 2 * INT4_GROUP

ONE_TOKEN_INT4 = OneTokenPlan(expand_bytes=16_384, contract_bytes=32_768, num_warps=4)


def int4_plan_for(
    num_tokens: int, num_experts: int, choices: int, operand: torch.dtype, limits: DeviceLimits
) -> ExpertsPlan:
    """The plan for so many tokens, the type that tensor cores multiply and the device.

    Those in float8 are the fastest that were tried on one H200 (`bench.experts --tune`). Operands of 16 bits take
    more registers and shared memory.
    """
    per_expert = num_tokens * choices / num_experts
    if operand == torch.float32:
        return ExpertsPlan(16, ProductPlan(64, _PAIR, 4, 2), ProductPlan(64, _PAIR, 4, 2))
    if operand != FLOAT8:
        block, warps = (16, 4) if per_expert <= 16 else (32, 8) if per_expert <= 48 else (64, 8)
        return ExpertsPlan(block, ProductPlan(64, _PAIR, warps, 3), ProductPlan(64, _PAIR, warps, 3))
    if per_expert <= 12:
        warps = 4 if per_expert <= 4 else 8
        return ExpertsPlan(16, ProductPlan(64, _PAIR, warps, 3), ProductPlan(128, _PAIR, 4, 3))
    if per_expert <= 48:
        block = 32 if per_expert <= 32 else 64
        return ExpertsPlan(block, ProductPlan(64, _PAIR, 4, 4), ProductPlan(64, _PAIR, 4, 5), rounds_rows=True)
    is_small = limits.shared_bytes < 128 * 1024
    return ExpertsPlan(
        128,
        ProductPlan(64, _PAIR, 8, 3, is_read_once=False),
        ProductPlan(64, _PAIR, 4, 2 if is_small else 3, is_read_once=False),
        rounds_rows=True,
    )
