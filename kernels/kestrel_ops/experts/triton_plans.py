"""How the products of experts are divided into programs, by type and number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kestrel_ops.device_limits import DeviceLimits


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """Divides one product of an item's tokens into programs."""

    rows: int
    """Rows of the weight per program; of each half in the first product. Also the columns that share a scale."""
    columns: int
    """Columns of the weight per iteration; in the second product in float8 at most those that share a scale."""
    num_warps: int
    num_stages: int
    """Iterations whose loads run concurrently, plus one."""
    is_read_once: bool = True
    """Whether the weight is not worth keeping in the cache."""
    prefetched_bytes: int = 0
    """In the second product: bytes of each row of the weight that a program has the cache load while it waits for
    the first product to end; a multiple of 16."""
    turns: int = 1
    """In the second product: blocks of columns per iteration, where these divide the columns."""


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """Divides a mixture of experts into programs."""

    block_tokens: int
    """The most tokens of an expert in one item; tensor cores need 16."""
    expand: ProductPlan
    contract: ProductPlan
    rounds_rows: bool = False
    """Whether a kernel of its own rounds the rows between the products to float8, with one scale for each row. The
    second product is then faster; else the first one rounds, each program its columns."""


@dataclass(frozen=True, slots=True)
class OneTokenPlan:
    """Divides a mixture of experts for one token into programs."""

    expand_bytes: int
    """Bytes of the first weight that a program loads, a power of two; at least a row of each half is loaded."""
    contract_bytes: int
    """The same of the second weight; at least a row of each chosen expert is loaded."""
    num_warps: int


_FEW_TOKENS = 32

ONE_TOKEN = OneTokenPlan(expand_bytes=32_768, contract_bytes=32_768, num_warps=4)


def plan_for(
    num_tokens: int,
    num_experts: int,
    choices: int,
    operand: torch.dtype,
    limits: DeviceLimits,
) -> ExpertsPlan:
    """The plan for so many tokens, the type that tensor cores multiply and the device.

    With less shared memory than Hopper has, fewer loads run concurrently. Without its products of warp groups,
    large tiles are divided among other numbers of warps.
    """
    plan = _measured(num_tokens, num_experts, choices, operand)
    if not limits.is_hopper and plan.block_tokens > _FEW_TOKENS and operand != torch.float32:
        if operand == torch.float8_e4m3fn:
            plan = replace(plan, expand=replace(plan.expand, num_warps=8))
        else:
            plan = replace(plan, contract=replace(plan.contract, num_warps=4))
    shared_bytes = limits.shared_bytes
    block, expand, contract = plan.block_tokens, plan.expand, plan.contract
    return replace(
        plan,
        expand=_fitting(expand, (2 * expand.rows + block) * expand.columns * operand.itemsize, shared_bytes),
        contract=_fitting(contract, (contract.rows + block) * contract.columns * operand.itemsize, shared_bytes),
    )


def _fitting(plan: ProductPlan, stage_bytes: int, shared_bytes: int) -> ProductPlan:
    return replace(plan, num_stages=min(plan.num_stages, max(shared_bytes // stage_bytes, 2)))


def _measured(num_tokens: int, num_experts: int, choices: int, operand: torch.dtype) -> ExpertsPlan:
    """The fastest plans on one H200 (`bench.experts --tune`)."""
    if operand == torch.float32:
        return ExpertsPlan(16, ProductPlan(64, 32, 4, 2), ProductPlan(64, 32, 4, 2))
    per_expert = num_tokens * choices / num_experts
    if operand == torch.float8_e4m3fn:
        if per_expert <= 16:
            return ExpertsPlan(
                16,
                ProductPlan(64, 256, 4, 3),
                ProductPlan(64, 64, 4, 3, turns=2),
            )
        if per_expert <= 48:
            return ExpertsPlan(
                32,
                ProductPlan(64, 128, 4, 4),
                ProductPlan(64, 64, 4, 5, prefetched_bytes=256),
            )
        return ExpertsPlan(
            128,
            ProductPlan(64, 128, 4, 3, is_read_once=False),
            ProductPlan(128, 128, 8, 3, is_read_once=False),
            rounds_rows=True,
        )
    if per_expert <= 16:
        return ExpertsPlan(16, ProductPlan(64, 64, 4, 4), ProductPlan(64, 64, 4, 5))
    if per_expert <= 48:
        return ExpertsPlan(32, ProductPlan(64, 64, 4, 4), ProductPlan(64, 64, 4, 5))
    return ExpertsPlan(
        128,
        ProductPlan(64, 64, 4, 3, is_read_once=False),
        ProductPlan(128, 64, 8, 3, is_read_once=False),
    )
