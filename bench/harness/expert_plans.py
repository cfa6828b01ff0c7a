"""The plans of the experts' kernels that `bench.experts --tune` tries: one product in other ways at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from kestrel_ops.device_limits import DeviceLimits
from kestrel_ops.triton.expert_plans import ONE_TOKEN, ExpertsPlan, OneTokenPlan, ProductPlan, plan_for
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_3

_PREFETCHED = (0, 256, 512)


def cuts(precision: str, num_tokens: int) -> list[ExpertsPlan | OneTokenPlan]:
    """The plans to try, the one that is used first."""
    return list(dict.fromkeys(_cuts(precision, num_tokens)))


def _cuts(precision: str, num_tokens: int) -> Iterator[ExpertsPlan | OneTokenPlan]:
    if num_tokens == 1:
        yield ONE_TOKEN
        sizes = (8_192, 16_384, 32_768, 65_536)
        for first, second, warps in product(sizes, sizes, (4, 8)):
            yield OneTokenPlan(first, second, warps)
        return
    moe = MOONDREAM_3.text.moe
    assert moe is not None
    operand = torch.float8_e4m3fn if precision == "float8" else torch.bfloat16
    limits = DeviceLimits.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    used = plan_for(num_tokens, moe.num_experts, moe.experts_per_token, operand, limits)
    yield used
    if precision == "float8":
        yield replace(used, rounds_rows=not used.rounds_rows)
    block, most = used.block_tokens, used.block_tokens // 4
    for plan in _products(operand.itemsize, block):
        shared = (2 * plan.rows + block) * plan.columns * operand.itemsize * plan.num_stages
        if shared <= limits.shared_bytes and plan.rows * block <= most * 64 * plan.num_warps:
            yield replace(used, expand=replace(plan, is_read_once=used.expand.is_read_once))
    for plan, prefetched in product(_products(operand.itemsize, block), _PREFETCHED):
        shared = (plan.rows + block) * plan.columns * operand.itemsize * plan.num_stages
        if shared <= limits.shared_bytes:
            own = replace(plan, is_read_once=used.contract.is_read_once, prefetched_bytes=prefetched)
            yield replace(used, contract=own)


def _products(itemsize: int, block: int) -> Iterator[ProductPlan]:
    """Of few tokens tiles are small and what matters is how many are loaded at once."""
    shapes = ((64, 4), (128, 8)) if block <= 32 else ((64, 4), (128, 4), (128, 8))
    stages = (3, 4, 6, 8) if block <= 32 else (3, 4)
    for (rows, warps), line, num_stages in product(shapes, (64, 128, 256), stages):
        yield ProductPlan(rows, line // itemsize, warps, num_stages)


def plan_name(plan: ExpertsPlan | OneTokenPlan) -> str:
    """How it does it."""
    if isinstance(plan, OneTokenPlan):
        return f"bytes {plan.expand_bytes} and {plan.contract_bytes} warps {plan.num_warps}"
    first, second = (
        f"{each.rows}x{each.columns} w{each.num_warps} s{each.num_stages} p{each.prefetched_bytes}"
        for each in (plan.expand, plan.contract)
    )
    return f"tokens {plan.block_tokens}  expand {first}{'  rounded' * plan.rounds_rows}  contract {second}"
