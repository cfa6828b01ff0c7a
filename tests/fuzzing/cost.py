"""What a piece of work costs this process: processor time, and memory at its peak where the system tells it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_RESET_PEAK = "5"  # see proc(5), /proc/[pid]/clear_refs


@dataclass(slots=True)
class Cost:
    """Of this thread and of the whole process; known when the work has ended."""

    cpu_s: float = 0.0
    added_bytes: int = 0


@contextmanager
def measured() -> Iterator[Cost]:
    """Measure what is done within."""
    cost, before_bytes, began = Cost(), _start_anew(), time.thread_time()
    try:
        yield cost
    finally:
        cost.cpu_s = time.thread_time() - began
        cost.added_bytes = max(0, _status_bytes("VmHWM") - before_bytes)


def _start_anew() -> int:
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return 2**63  # whatever the peak is, nothing was added that could be seen
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))
