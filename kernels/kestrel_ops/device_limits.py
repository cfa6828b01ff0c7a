"""What a device can do, as far as implementations and their plans depend on it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

_HOPPER = (9, 0)
_FLOAT8_SINCE = (8, 9)
HOPPER_SHARED_BYTES = 227 * 1024
PORTABLE_SHARED_BYTES = 99 * 1024
"""Shared memory that a program may have on every card from Ampere on."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Of one device. Plans were measured on Hopper; all other devices use portable plans, which need nothing beyond
    compute capability 8.0."""

    capability: tuple[int, int] | None
    """The compute capability of a CUDA device; None for other devices."""
    shared_bytes: int
    """Of one program."""

    @property
    def is_hopper(self) -> bool:
        """Whether it has what portable plans do without: dependent launch, and the cache told what to load."""
        return self.capability == _HOPPER

    @property
    def has_float8(self) -> bool:
        """Whether Triton knows float8_e4m3fn on it."""
        return self.capability is None or self.capability >= _FLOAT8_SINCE

    @staticmethod
    def of(device: torch.device) -> DeviceLimits:
        """Those of a device that is here. Others can be put in the place of this function, as tests do."""
        return _limits(device)


@functools.cache
def _limits(device: torch.device) -> DeviceLimits:
    if device.type != "cuda":
        return DeviceLimits(None, HOPPER_SHARED_BYTES)
    properties = torch.cuda.get_device_properties(device)
    # With ROCm torch calls AMD's devices "cuda", too, and gives numbers that look like compute capabilities.
    capability = (0, 0) if torch.version.hip else (properties.major, properties.minor)
    return DeviceLimits(capability, getattr(properties, "shared_memory_per_block_optin", PORTABLE_SHARED_BYTES))
