"""Binds a process to the processors near its GPU: those of the NUMA node that the GPU is attached to.

Linux lists them for each device of the PCI bus. Memory that a bound process takes afterwards is of the same node,
and transfers between host and GPU do not cross the link between two sockets.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_THREADS = Path("/proc/self/task")
_MIN_PROCESSORS = 2
"""An engine on a GPU takes one to two processors. Fewer would slow it down more than a distant node does."""
_CPULIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")

_log = logging.getLogger(__name__)


def bind_near(pci_address: str | None, *, pci_devices: Path = _PCI_DEVICES, threads: Path = _THREADS) -> None:
    """Binds all threads of this process, and those that they create, to the processors near a device of the PCI
    bus.

    `pci_address` is written as in sysfs, such as "0000:1b:00.0". Does nothing with None, off Linux, and if
    `near_processors` finds nothing to bind to.
    """
    if pci_address is None or not hasattr(os, "sched_setaffinity"):
        return
    near = near_processors(pci_address, os.sched_getaffinity(0), pci_devices)
    if near is None:
        return
    for thread in threads.iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            os.sched_setaffinity(int(thread.name), near)
    _log.info("bound to the %d processors near the GPU at %s: %s", len(near), pci_address, cpulist(near))


def near_processors(
    pci_address: str, allowed: Collection[int], pci_devices: Path = _PCI_DEVICES
) -> frozenset[int] | None:
    """Returns the `allowed` processors that are near a device.

    Returns None if there is no reason to bind to them: all allowed ones are near, as on a host with one NUMA node;
    fewer than two are; or sysfs has no list, as in containers without it.
    """
    try:
        text = (pci_devices / pci_address / "local_cpulist").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    near = processors_in(text) & frozenset(allowed)
    return near if _MIN_PROCESSORS <= len(near) < len(allowed) else None


def processors_in(text: str) -> frozenset[int]:
    """Returns the processors in a list as the kernel writes it, such as "0-3,8-11"; none if it is no such list."""
    if _CPULIST.fullmatch(text.strip()) is None:
        return frozenset()
    bounds = (part.partition("-") for part in text.strip().split(","))
    return frozenset(number for first, _, last in bounds for number in range(int(first), int(last or first) + 1))


def cpulist(processors: Iterable[int]) -> str:
    """Returns the list that `processors_in` reads."""
    ranges: list[list[int]] = []
    for number in sorted(processors):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
