"""The plans of the experts' kernels that `bench.experts --tune` tries: one product in other ways at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from bench.random_weights import MOONDREAM_3
from kestrel_ops.triton.expert_plans import ONE_TOKEN, ExpertsPlan, OneTokenPlan, ProductPlan, plan_for

_SHARED_MEMORY = 227 * 1024
_PREFETCHED = (0, 256, 512, 1024)


def cuts(precision: str, num_tokens: int) -> list[ExpertsPlan | OneTokenPlan]:
    """The plans to try, the one that is used first."""
    return list(dict.fromkeys(_cuts(precision, num_tokens)))


def _cuts(precision: str, num_tokens: int) -> Iterator[ExpertsPlan | OneTokenPlan]:
    if num_tokens == 1:
        yield ONE_TOKEN
        sizes = (16_384, 32_768, 65_536)
        for first, second, warps, prefetches in product(sizes, sizes, (4, 8), (True, False)):
            yield OneTokenPlan(first, second, warps, prefetches)
        return
    moe = MOONDREAM_3.text.moe
    assert moe is not None
    operand = torch.float8_e4m3fn if precision == "float8" else torch.bfloat16
    used = plan_for(num_tokens, moe.num_experts, moe.experts_per_token, operand)
    yield used
    if precision == "float8":
        yield replace(used, rounds_rows=not used.rounds_rows)
    block, most = used.block_tokens, used.block_tokens // 4
    for plan in _products(operand.itemsize, block):
        shared = (2 * plan.rows + block) * plan.columns * operand.itemsize * plan.num_stages
        if shared <= _SHARED_MEMORY and plan.rows * block <= most * 64 * plan.num_warps:
            own = replace(plan, is_read_once=used.expand.is_read_once)
            yield replace(used, expand=own)
    for plan in _products(operand.itemsize, block):
        shared = (plan.rows + block) * plan.columns * operand.itemsize * plan.num_stages
        if shared <= _SHARED_MEMORY:
            yield replace(used, contract=replace(plan, is_read_once=used.contract.is_read_once))


def _products(itemsize: int, block: int) -> Iterator[ProductPlan]:
    """Of few tokens tiles are small and what matters is how early they are loaded."""
    shapes = ((64, 4), (128, 8)) if block <= 32 else ((64, 4), (128, 4), (128, 8))
    prefetched = _PREFETCHED if block <= 32 else (0, 512)
    for (rows, warps), line, stages, more in product(shapes, (64, 128, 256), (3, 4, 6), prefetched):
        if more == 0 or stages != 6:
            yield ProductPlan(rows, line // itemsize, warps, stages, prefetched_bytes=more)


def plan_name(plan: ExpertsPlan | OneTokenPlan) -> str:
    """How it does it."""
    if isinstance(plan, OneTokenPlan):
        more = " prefetched" if plan.prefetches else ""
        return f"bytes {plan.expand_bytes} and {plan.contract_bytes} warps {plan.num_warps}{more}"
    first, second = (
        f"{each.rows}x{each.columns} w{each.num_warps} s{each.num_stages} p{each.prefetched_bytes}"
        for each in (plan.expand, plan.contract)
    )
    return f"tokens {plan.block_tokens}  expand {first}{'  rounded' * plan.rounds_rows}  contract {second}"
