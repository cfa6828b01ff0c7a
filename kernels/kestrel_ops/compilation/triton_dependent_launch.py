"""Launches kernels by programmatic dependent launch: a kernel starts while the previous one ends, and loads its
weights meanwhile."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.language.extra import cuda as extra

from kestrel_ops.compilation.triton_compilations import launcher
from kestrel_ops.device_limits import DeviceLimits


def has_dependent_launch(tensor: Tensor) -> bool:
    """Returns True on Hopper, the device for which the gain of dependent launch was measured."""
    return DeviceLimits.of(tensor.device).is_hopper


def launch(
    kernel: Any,
    grid: tuple[Any, ...],
    *arguments: Any,
    num_warps: int,
    num_stages: int,
    is_dependent: bool,
    **constants: Any,
) -> None:
    """Launches a kernel that has a constant `is_dependent` and calls `wait_for_previous` if it is set."""
    options = {"launch_pdl": True} if is_dependent else {}
    launcher(kernel, grid)(
        *arguments, is_dependent=is_dependent, num_warps=num_warps, num_stages=num_stages, **constants, **options
    )


@triton.jit
def wait_for_previous() -> None:
    """Waits until the previous kernel has ended and its writes are visible. Every program must call it."""
    extra.gdc_wait()


@triton.jit
def let_next_start() -> None:
    """Allows the next kernel to start on multiprocessors with free resources; it runs up to its own wait.

    Call it after this kernel's own wait. Then at most one kernel runs ahead, and the weights of only one more
    kernel take space in the cache.
    """
    extra.gdc_launch_dependents()
