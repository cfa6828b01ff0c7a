"""Single launches of a model, timed alone at the sizes that they have in it, beside their limits in the same run.

A limit is the larger of a launch's operations over a large product's rate and its bytes over that of a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from bench.device_timing import Limits, attempted, time_us
from kestrel_ops.reference.quantise_rows import quantise_rows

NUM_INPUT_SETS = 3
"""Taken in turns, so that the cache does not hold them all."""


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of launch: what it costs once, how often it runs in the whole, and its limit."""

    name: str
    us: float
    calls: int
    limit_us: float


class PartTimer:
    """Times and prints one part after the other; one that fails is left out."""

    def __init__(
        self,
        device: torch.device,
        limits: Limits,
        precision: Literal["model", "float8"],
        of: str,
        *,
        shares: int = 1,
        share: str = "",
    ) -> None:
        """`precision` is that of products, `of` says what the parts are of; each of `shares` is told its time."""
        self.parts: list[Part] = []
        self._device = device
        self._limits = limits
        self._precision: Literal["model", "float8"] = precision
        self._of = of
        self._shares = shares
        self._share = share

    def time(
        self,
        name: str,
        call: Callable[..., Any],
        inputs: Callable[[], tuple[Any, ...]],
        *,
        calls: int,
        flops: float = 0,
        size: float,
    ) -> None:
        """`inputs` makes fresh ones; `size` is bytes, read and written. A product's name begins with that word."""
        with attempted(f"{name}, {self._of}"), torch.no_grad():
            sets = [inputs() for _ in range(NUM_INPUT_SETS)]
            us = time_us([partial(call, *values) for values in sets])
            rate = self._limits.product_flops_per_s[self._precision if name.startswith("product") else "model"]
            limit_us = max(flops / rate, size / self._limits.copy_bytes_per_s) * 1e6
            self.parts.append(Part(name, us, calls, limit_us))
            ms = us * calls / 1e3 / self._shares
            print(
                f"  {name:<28}{us:>9.1f} us  x{calls:<3}{ms:>8.3f} ms{self._share}   limit {limit_us:>7.1f} us"
                f"   {us / limit_us:>5.2f}x",
                flush=True,
            )

    def time_product(
        self, name: str, operation: Callable[..., Any], rows: int, out_dim: int, in_dim: int, *, calls: int
    ) -> None:
        """A `scaled_linear` of random values, with a scale for every row where it is in float8."""
        weight, weight_scale, bias = random_linear(out_dim, in_dim, self._precision, self._device)

        def inputs() -> tuple[Any, ...]:
            wide = torch.randn(rows, in_dim, device=self._device)
            x, x_scale = quantise_rows(wide) if self._precision == "float8" else (wide.bfloat16(), None)
            return x, x_scale, weight, weight_scale, bias, torch.bfloat16

        size = weight.itemsize * in_dim * (rows + out_dim) + 2 * rows * out_dim
        self.time(f"product {name}", operation, inputs, calls=calls, flops=2.0 * rows * in_dim * out_dim, size=size)


def random_linear(
    out_dim: int, in_dim: int, precision: Literal["model", "float8"], device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Weight [N, K], the scale of each of its rows [N] float32 where it is in float8, and a bfloat16 bias [N]."""
    weight = 0.02 * torch.randn(out_dim, in_dim, device=device)
    bias = torch.randn(out_dim, device=device).bfloat16()
    if precision == "model":
        return weight.bfloat16(), None, bias
    short, scale = quantise_rows(weight)
    return short, scale[:, 0].contiguous(), bias
