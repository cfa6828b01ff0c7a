"""Finds the largest logit that is allowed. Programs find it in parts of a row, a second launch among the parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel_ops.compilation.triton_compilations import launcher
from kestrel_ops.compilation.triton_requirements import unsupported_device
from kestrel_ops.shapes import ModelShape

_PART = 4096
"""Logits of one program: 13 programs share a row of Moondream."""


def pick_allowed(
    logits: Tensor,  # [B, V]
    forbidden: Tensor,  # [S, V] bool
    rules: Tensor,  # [B] int64, may be strided: rows of `forbidden`
) -> Tensor:  # [B] int64
    """Picks the largest logit of each row that is not forbidden. Same contract as `reference.pick_allowed`."""
    batch, num_choices = logits.shape
    assert logits.is_contiguous()
    assert forbidden.is_contiguous()
    num_parts = triton.cdiv(num_choices, _PART)
    largest = torch.empty(batch, num_parts, dtype=torch.float32, device=logits.device)
    places = torch.empty(batch, num_parts, dtype=torch.int64, device=logits.device)
    picked = torch.empty(batch, dtype=torch.int64, device=logits.device)
    launcher(_pick_in_part, (num_parts, batch))(
        logits, forbidden, rules, largest, places, rules.stride(0), num_choices, part=_PART, num_warps=8
    )
    launcher(_pick_part, (batch,))(
        largest, places, picked, num_parts=num_parts, block=triton.next_power_of_2(num_parts), num_warps=1
    )
    return picked


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model."""
    return unsupported_device(model)


@triton.jit(do_not_specialize=["rule_stride"])
def _pick_in_part(logits, forbidden, rules, largest, places, rule_stride, num_choices, part: tl.constexpr):
    number, row = tl.program_id(0), tl.program_id(1)
    place = number * part + tl.arange(0, part)
    inside = place < num_choices
    rule = tl.load(rules + row * rule_stride)
    is_forbidden = tl.load(forbidden + rule * num_choices + place, mask=inside, other=1)
    logit = tl.load(logits + row.to(tl.int64) * num_choices + place, mask=inside, other=0).to(tl.float32)
    logit = tl.where((is_forbidden == 0) & (logit == logit), logit, float("-inf"))  # NaN is less than all
    most = tl.max(logit, axis=0)
    result = row * tl.num_programs(0) + number
    tl.store(largest + result, most)
    tl.store(places + result, tl.min(tl.where(logit == most, place, num_choices - 1), axis=0).to(tl.int64))


@triton.jit
def _pick_part(largest, places, picked, num_parts: tl.constexpr, block: tl.constexpr):
    row, part = tl.program_id(0), tl.arange(0, block)
    inside = part < num_parts
    most = tl.load(largest + row * num_parts + part, mask=inside, other=float("-inf"))
    place = tl.load(places + row * num_parts + part, mask=inside, other=0)
    first = tl.min(tl.where(inside & (most == tl.max(most, axis=0)), part, block - 1), axis=0)
    tl.store(picked + row, tl.sum(tl.where(part == first, place, 0), axis=0))
