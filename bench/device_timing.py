"""How long device work takes, and how fast the device copies and multiplies: what parts are measured against.

On a CUDA device calls are captured in a graph and its replays timed with events, so that the gaps between launches
do not count; elsewhere a clock reads a few plain calls, which says nothing but that they run.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

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
            lambda: torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
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
