"""Decides which processes a server has, and on which device each engine runs."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kestrel_grpc.config.options import ConfigurationError, ServerConfig
from kestrel_runtime.memory.host_limits import available_processors
from kestrel_runtime.models.background_load import torch_has_cuda

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_THREADS = "OMP_NUM_THREADS"
_MAX_AUTO = 4
_PROCESSORS_PER_FRONTEND = 4
_MIN_AUTO_PROCESSORS = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CorePlace:
    """The device that an engine core runs on."""

    device: str
    """A value of the option `--device`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its process that select the device."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The processes of a server."""

    num_frontends: int
    """0: one process serves calls and runs the only engine."""
    cores: tuple[CorePlace, ...]


def layout_of(config: ServerConfig, environment: Mapping[str, str]) -> Layout:
    """Returns the processes that the options ask for. Raises `ConfigurationError`."""
    cores = _cores(config, environment)
    num_frontends = config.frontends
    if isinstance(num_frontends, str):
        num_frontends = _auto_frontends(cores[0])
        if config.unix_socket is not None or config.triton_shared_memory is not None:
            num_frontends = min(num_frontends, 1)
        _log.log(logging.INFO if num_frontends else logging.DEBUG, "--frontends auto: %d", num_frontends)
    if len(cores) > 1 and num_frontends == 0:
        _log.info("several devices need a front end of their own: there is one process for calls")
        num_frontends = 1
    return Layout(num_frontends, cores)


def placed(config: ServerConfig, place: CorePlace) -> ServerConfig:
    """Returns the configuration with the device of this place."""
    return replace(config, engine=replace(config.engine, device=place.device))


def _cores(config: ServerConfig, environment: Mapping[str, str]) -> tuple[CorePlace, ...]:
    if config.devices is None:
        return (CorePlace(config.engine.device),)
    if config.devices[0] == "cpu":
        count = len(config.devices)
        if count == 1:
            return (CorePlace("cpu"),)
        # If each core used all processors, their threads would wait for each other.
        num_threads = str(max(1, available_processors() // count))
        return (CorePlace("cpu", {_THREADS: environment.get(_THREADS, num_threads)}),) * count
    visible = environment.get(_VISIBLE)
    known = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    numbers = range(_num_gpus()) if config.devices == ("all",) else map(int, config.devices)
    names: list[str] = []
    for number in numbers:
        if known is not None and number >= len(known):
            raise ConfigurationError((f"--devices: there is no GPU {number} in {_VISIBLE}={visible}",))
        names.append(str(number) if known is None else known[number])
    if not names:
        raise ConfigurationError(("--devices all: torch finds no GPU",))
    return tuple(CorePlace("cuda", {_VISIBLE: name}) for name in names)


def _auto_frontends(core: CorePlace) -> int:
    """Returns the number of front ends for the processors of this machine; 0 if they would not speed up a GPU."""
    processors = available_processors()
    if sys.platform != "linux" or processors < _MIN_AUTO_PROCESSORS or core.device == "cpu":
        return 0
    if core.device == "auto" and _num_gpus() == 0:
        return 0
    return min(_MAX_AUTO, processors // _PROCESSORS_PER_FRONTEND)


def _num_gpus() -> int:
    """Returns the number of GPUs that torch can use. Creates no context; does not import torch, which is slow."""
    if not torch_has_cuda():
        return 0
    count = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):  # there is no driver
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return 0
    return count.value
