"""Describes the limits of a device on which implementations and launch configurations depend."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

_HOPPER = (9, 0)
_FLOAT8_SINCE = (8, 9)
HOPPER_SHARED_BYTES = 227 * 1024
PORTABLE_SHARED_BYTES = 99 * 1024
"""Shared memory that a program may have on every card from Ampere on."""
_SHARED_BYTES = {(8, 0): 163 * 1024, (9, 0): HOPPER_SHARED_BYTES, (10, 0): HOPPER_SHARED_BYTES}
"""On cards on which it may have more."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Describes one device.

    Launch configurations were measured on Hopper; all other devices use portable ones, which need nothing beyond
    compute capability 8.0.
    """

    capability: tuple[int, int] | None
    """The compute capability of a CUDA device; None for other devices."""
    shared_bytes: int
    """The shared memory of one program, in bytes."""

    @classmethod
    def of_card(cls, capability: tuple[int, int]) -> DeviceLimits:
        """Returns the limits of a CUDA device that need not be present."""
        return cls(capability, _SHARED_BYTES.get(capability, PORTABLE_SHARED_BYTES))

    @property
    def is_hopper(self) -> bool:
        """Returns True for Hopper, whose launch configurations use dependent launch and prefetch into the cache."""
        return self.capability == _HOPPER

    @property
    def has_float8(self) -> bool:
        """Returns True if Triton supports float8_e4m3fn on the device."""
        return self.capability is None or self.capability >= _FLOAT8_SINCE

    @staticmethod
    def of(device: torch.device) -> DeviceLimits:
        """Returns the limits of a present device, or of the device that `meta` tensors stand for.

        Tests replace this function.
        """
        return (device.type == "meta" and _of_meta.get()) or _limits(device)


_of_meta: ContextVar[DeviceLimits | None] = ContextVar("_of_meta", default=None)


@contextmanager
def meta_stands_for(limits: DeviceLimits) -> Iterator[None]:
    """Has operations treat tensors of the device `meta` within the block as those of a device with these limits."""
    token = _of_meta.set(limits)
    try:
        yield
    finally:
        _of_meta.reset(token)


@functools.cache
def _limits(device: torch.device) -> DeviceLimits:
    if device.type != "cuda":
        return DeviceLimits(None, HOPPER_SHARED_BYTES)
    properties = torch.cuda.get_device_properties(device)
    # With ROCm torch calls AMD's devices "cuda", too, and gives numbers that look like compute capabilities.
    capability = (0, 0) if torch.version.hip else (properties.major, properties.minor)
    return DeviceLimits(capability, getattr(properties, "shared_memory_per_block_optin", PORTABLE_SHARED_BYTES))
