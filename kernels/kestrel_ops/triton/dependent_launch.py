"""Programmatic dependent launch: a kernel starts while the one before ends, and fetches its weights meanwhile."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor, cuda
from triton.language.extra import cuda as extra


def has_dependent_launch(tensor: Tensor) -> bool:
    """Whether the tensor's device can do it: CUDA devices since Hopper."""
    return tensor.device.type == "cuda" and cuda.get_device_capability(tensor.device)[0] >= 9


def launch(
    kernel: Any,
    grid: tuple[Any, ...],
    *arguments: Any,
    num_warps: int,
    num_stages: int,
    is_dependent: bool,
    **constants: Any,
) -> None:
    """Launch a kernel that has a constant `is_dependent` and waits by `wait_for_previous` where it is set."""
    options = {"launch_pdl": True} if is_dependent else {}
    kernel[grid](
        *arguments, is_dependent=is_dependent, num_warps=num_warps, num_stages=num_stages, **constants, **options
    )


@triton.jit
def wait_for_previous() -> None:
    """Wait until the kernel before has ended and its writes can be seen. Every program of a kernel must."""
    extra.gdc_wait()


@triton.jit
def let_next_start() -> None:
    """Allow the next kernel onto multiprocessors with free resources, up to its own wait.

    After this kernel's own wait, so that never more than one runs ahead: the weights of two would crowd the cache.
    """
    extra.gdc_launch_dependents()
