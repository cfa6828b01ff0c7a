"""How long device work takes, and how fast the device copies and multiplies: what parts are measured against.

On a CUDA device calls are captured in a graph and its replays timed with events, so that the gaps between launches
do not count; elsewhere a clock reads a few plain calls, which says nothing but that they run.
"""

import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kestrel_ops.norms.reference import quantise_rows

_FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Limits:
    """What this device reaches, in this run."""

    copy_bytes_per_s: float  # read and written together
    product_flops_per_s: dict[str, float]  # by "model" (bfloat16) and "float8", at a product that fills the device


def time_us(calls: Sequence[Callable[[], object]], *, replays: int = 7, rounds: int = 2) -> float:
    """Median time of one call, taken in turns over `calls`, which should not share what the cache could keep."""
    for call in calls:
        call()
    if not torch.cuda.is_available():
        started = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - started) / len(calls) * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def turns_us(calls: Mapping[str, Callable[[], object]], turns: int, repeats: int = 10) -> dict[str, list[float]]:
    """Times of each call in so many turns, in which all take part in an order that changes.

    A time is that of a graph of `repeats` calls over their number.
    """
    if not torch.cuda.is_available():
        return {name: [time_us([call]) for _ in range(turns)] for name, call in calls.items()}
    graphs = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(repeats):
                call()
        graphs[name].replay()
    order, times = list(calls), {name: [] for name in calls}
    for turn in range(turns):
        random.Random(turn).shuffle(order)
        for name in order:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / repeats)
    return times


def launch_us(call: Callable[[], object], repeats: int = 3) -> float:
    """Median time that the host needs to launch what `call` does, while the device has other work."""
    call()
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


def measure_limits(device: torch.device) -> Limits:
    """Copy a large buffer and multiply large matrices of random values."""
    is_cuda = device.type == "cuda"
    length, dim = (1 << 28, 8192) if is_cuda else (1 << 18, 64)
    source = torch.randint(0, 255, (length,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    # By a kernel: a graph records a plain copy as something else, which an H200 does at two thirds of the rate.
    copy_us = time_us([lambda: torch.neg(source, out=target)])
    left, right = (torch.randn(dim, dim, device=device).bfloat16() for _ in range(2))
    rates = {"model": 2 * dim**3 / time_us([lambda: left @ right.T]) * 1e6}
    scale = torch.ones(dim, 1, device=device)
    left8, right8 = left.to(_FLOAT8), right.to(_FLOAT8)
    float8_us = time_us(
        [
            lambda: torch._scaled_mm(
                left8, right8.t(), scale, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
            )
        ]
    )
    rates["float8"] = 2 * dim**3 / float8_us * 1e6
    return Limits(2 * source.nbytes / copy_us * 1e6, rates)


@contextmanager
def attempted(what: str) -> Iterator[None]:
    """Go on after a failure of `what`, with the whole of it printed."""
    try:
        yield
    except Exception:
        print(f"\n*** {what} failed\n{traceback.format_exc()}", flush=True)


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
