"""The stages of the experts' kernels, each alone.

Kernels that start before the one before has ended overlap, and the profiler counts what they wait as their own.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bench.device_timing import time_us
from kestrel_ops.shapes import FLOAT8
from kestrel_ops.triton.dependent_launch import has_dependent_launch
from kestrel_ops.triton.expert_plans import ExpertsPlan
from kestrel_ops.triton.expert_products import combine, contract, expand, rounded
from kestrel_ops.triton.expert_routing import route


@torch.no_grad()
def stage_times(
    stacks: list[tuple[Tensor, ...]],  # of each layer: both weights and, where they are float8, their scales
    tokens: list[tuple[Tensor, Tensor]],  # of each layer: rows and logits
    choices: int,
    plan: ExpertsPlan,
) -> dict[str, float]:
    """Microseconds of a layer by stage."""
    hidden = tokens[0][0]
    quantises = stacks[0][0].dtype == FLOAT8 and hidden.dtype != torch.float32
    rounds = quantises and plan.rounds_rows
    block, between = plan.block_tokens, FLOAT8 if quantises and not rounds else hidden.dtype
    times: dict[str, float] = {}

    def stage(name: str, calls: list[partial[object]]) -> list[object]:
        times[name] = time_us(calls, replays=5)
        return [call() for call in calls]

    later = partial(partial, is_dependent=has_dependent_launch(hidden))
    scales = [stack[2:] or (None, None) for stack in stacks]
    routings = stage("route", [later(route, *own, choices, block, quantises=quantises) for own in tokens])
    each = list(zip(routings, stacks, scales, strict=True))
    inner = stage(
        "expand",
        [
            later(expand, routing, stack[0], own[0], None, plan.expand, block, between)
            for routing, stack, own in each
        ],
    )
    if rounds:
        inner = stage("round", [later(rounded, rows) for rows in inner])
    rows = stage(
        "contract",
        [
            later(contract, routing, own, stack[1], scale[1], None, plan.contract, block, hidden.dtype)
            for own, (routing, stack, scale) in zip(inner, each, strict=True)
        ],
    )
    stage("combine", [later(combine, routing, own) for routing, own in zip(routings, rows, strict=True)])
    return times
