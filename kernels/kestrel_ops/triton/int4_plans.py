"""How the products of experts of 4 bits are divided into programs, by type and number of tokens."""

from __future__ import annotations

import torch

from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.reference.int4 import INT4_GROUP
from kestrel_ops.triton.expert_plans import ExpertsPlan, ProductPlan

_PAIR = 2 * INT4_GROUP


def int4_plan_for(
    num_tokens: int, num_experts: int, choices: int, operand: torch.dtype, limits: DeviceLimits
) -> ExpertsPlan:
    """The plan for so many tokens, the type that tensor cores multiply and the device."""
    per_expert = num_tokens * choices / num_experts
    if operand == torch.float32:
        return ExpertsPlan(16, ProductPlan(64, _PAIR, 4, 2), ProductPlan(64, _PAIR, 4, 2))
    if per_expert <= 16:
        return ExpertsPlan(16, ProductPlan(64, _PAIR, 4, 5), ProductPlan(64, _PAIR, 4, 6))
    if per_expert <= 48:
        return ExpertsPlan(32, ProductPlan(64, _PAIR, 4, 4), ProductPlan(64, _PAIR, 4, 5))
    return ExpertsPlan(
        128,
        ProductPlan(64, _PAIR, 8, 3, is_read_once=False),
        ProductPlan(128, _PAIR, 8, 3, is_read_once=False),
        rounds_rows=True,
    )
