"""Names the machine: its processors and its system, for reports of measurements."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

_PROC = Path("/proc")


def processors(proc: Path = _PROC) -> str:
    """Returns name and number of the processors that this process may use, such as "AMD EPYC, 2 processors"."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{_processor_name(proc)}, {count} processor{'' if count == 1 else 's'}"


def machine_facts() -> Mapping[str, str]:
    """Returns what a report says about the machine that it was made on."""
    return {"processors": processors(), "system": platform.platform(), "python": platform.python_version()}


def _processor_name(proc: Path) -> str:
    """Returns the name of the processor if the system reports it, else its architecture."""
    try:
        lines = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
