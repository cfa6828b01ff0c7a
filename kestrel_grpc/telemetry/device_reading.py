"""Reads the memory in use and the utilization of a GPU from the management library of its driver (NVML).

A reading needs no CUDA context and waits for no kernel, so it also works while an engine computes or hangs. It
covers the whole device, other processes included.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """Holds a reading of a device: its memory in bytes, and its utilization."""

    used_bytes: int
    total_bytes: int
    utilization: float
    """The share of the last sampling period, up to a second, in which a kernel ran, from 0 to 1."""


def device_reader(uuid: str | None) -> Callable[[], DeviceReading | None]:
    """Returns a function that reads the device with this UUID; the function returns None if the device cannot be
    read."""
    if uuid is None:
        return _read_nothing
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        _log.info("memory and use of the GPU are not in the metrics: install nvidia-ml-py, or the extra gpu")
        return _read_nothing
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError as error:
        _log.warning("memory and use of the GPU are not in the metrics: %s", error)
        return _read_nothing

    def read() -> DeviceReading | None:
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            percent = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        except nvml.NVMLError:  # a device that has fallen off its bus must not end the scrape
            return None
        return DeviceReading(int(memory.used), int(memory.total), percent / 100.0)

    return read


def _read_nothing() -> None:
    return None
