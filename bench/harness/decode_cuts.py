"""The cuts of the decode kernels that `bench.decode_step --tune` tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kestrel_ops.triton.rotary_decode_attention import AttentionPlan
from kestrel_ops.triton.single_token import SingleTokenPlan
from kestrel_ops.triton.small_batch import SmallBatchPlan

_FLOAT8 = torch.float8_e4m3fn
_LONG = (746, 1002)


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to run one kernel in one case."""

    operation: str
    precision: Literal["model", "float8"]
    batch: int
    plan: SmallBatchPlan | SingleTokenPlan | AttentionPlan
    dtype: torch.dtype = torch.bfloat16
    """The cache's type, for attention."""
    contexts: tuple[int, int] = (0, 0)
    num_parts: int = 1

    def case(self) -> str:
        """What is done, by any cut."""
        if isinstance(self.plan, AttentionPlan):
            return (
                f"{self.operation} {str(self.dtype)[6:]} {self.contexts[0]}..{self.contexts[1]} batch {self.batch}"
            )
        return f"{self.operation} {self.precision} batch {self.batch}"

    def name(self) -> str:
        """How this one does it."""
        plan = self.plan
        if isinstance(plan, AttentionPlan):
            way = " in steps" if plan.in_steps else ""
            return f"tile {plan.tile} warps {plan.num_warps} stages {plan.num_stages} parts {self.num_parts}{way}"
        if isinstance(plan, SingleTokenPlan):
            return f"n {plan.block_n} warps {plan.num_warps} bytes {plan.tile_bytes} in registers"
        return (
            f"n {plan.block_n} k {plan.block_k} warps {plan.num_warps} stages {plan.num_stages}"
            f" splits {plan.num_splits}"
        )


def _products() -> Iterator[Cut]:
    shapes: dict[Literal["model", "float8"], tuple[tuple[int, int, int, int], ...]] = {
        "float8": (
            (32, 128, 4, 4),
            (32, 256, 4, 4),
            (64, 128, 4, 3),
            (64, 128, 4, 4),
            (64, 128, 4, 5),
            (64, 256, 4, 3),
            (128, 64, 8, 4),
            (128, 128, 8, 3),
            (128, 128, 4, 3),
        ),
        "model": (
            (32, 128, 4, 4),
            (64, 64, 4, 4),
            (64, 64, 4, 6),
            (64, 128, 4, 3),
            (64, 128, 4, 4),
            (128, 64, 8, 4),
            (128, 64, 4, 4),
        ),
    }
    for precision in shapes:
        for block_n, warps in ((2, 4), (4, 4), (4, 8), (8, 4), (8, 8), (16, 4), (16, 8)):
            plan = SingleTokenPlan(block_n, warps)
            yield Cut("decode_expand", precision, 1, plan)
            for tile_bytes in (1024, 2048):
                yield Cut("decode_contract", precision, 1, replace(plan, tile_bytes=tile_bytes))
    for precision, cuts in shapes.items():
        for batch in (1, 16, 64, 128):
            for block_n, block_k, warps, stages in cuts:
                yield Cut("decode_expand", precision, batch, SmallBatchPlan(block_n, block_k, warps, stages))
                for splits in (5, 8, 16) if precision == "float8" else (8,):
                    plan = SmallBatchPlan(block_n, block_k, warps, stages, splits)
                    yield Cut("decode_contract", precision, batch, plan)


def _attentions() -> Iterator[Cut]:
    tiles = ((16, 2, 1), (32, 2, 1), (32, 4, 1), (32, 4, 2), (32, 4, 3), (64, 4, 1), (64, 8, 1))
    steps = ((16, 1, 3), (16, 1, 4), (16, 2, 4), (32, 1, 1), (32, 2, 3), (32, 2, 4), (32, 4, 3))
    plans = [AttentionPlan(*shape) for shape in tiles] + [AttentionPlan(*shape, in_steps=True) for shape in steps]
    for dtype in (_FLOAT8, torch.bfloat16):
        for batch, all_parts in ((1, (16, 32)), (16, (1, 2, 4)), (64, (1, 2))):
            for num_parts in all_parts:
                for plan in plans:
                    yield Cut("rotary_decode_attention", "float8", batch, plan, dtype, _LONG, num_parts)


CUTS = (*_products(), *_attentions())
"""Every one, in the order in which they are timed."""
