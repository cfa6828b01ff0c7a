"""Measures how much memory and how many processors of its host this process may use.

A container sees the whole machine in `/proc`; its limits are set in its control groups. The limit of a group also
holds for the groups below it, so this module reads the group of the process and all visible ancestors, of version 1
and 2.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_KIB = 1024


def available_memory_bytes(proc: Path = _PROC) -> int:
    """Returns the bytes that can still be allocated on the machine, within every limit of the control groups.

    Page cache that was not used lately counts as available, since the kernel gives it up first.
    """
    return max(0, min((_machine_bytes(proc), *_group_bytes(proc))))


def total_memory_bytes(proc: Path = _PROC) -> int:
    """Returns the bytes of the machine's memory, or the smallest limit of the control groups."""
    return min((_machine_total_bytes(proc), *(limit for limit, _ in _group_limits(proc))))


def available_processors(proc: Path = _PROC) -> int:
    """Returns the number of processors this process may use, by its affinity and the quotas of its control groups.

    It is rounded up, and at least 1.
    """
    return math.ceil(processor_quota(proc))


def processor_quota(proc: Path = _PROC) -> float:
    """Returns the processor time that this process may use, in seconds per second: any number above 0."""
    return min((_machine_processors(), *_group_processors(proc)))


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """A mounted tree of control groups, and where in it this process is."""

    is_unified: bool
    """True for version 2, which has all controllers in one tree."""
    own: Path
    top: Path

    def groups(self) -> Iterator[Path]:
        """Yields the folders of the process's own group and of all its visible ancestors."""
        yield self.own
        if self.own != self.top:
            for parent in self.own.parents:
                yield parent
                if parent == self.top:
                    return


def _machine_bytes(proc: Path) -> int:
    available = _meminfo_bytes(proc, "MemAvailable")
    # Not Linux: the available memory is unknown. Half of the total leaves enough for other processes.
    return _physical_bytes() // 2 if available is None else available


def _machine_total_bytes(proc: Path) -> int:
    total = _meminfo_bytes(proc, "MemTotal")
    return _physical_bytes() if total is None else total


def _meminfo_bytes(proc: Path, wanted: str) -> int | None:
    for line in _lines(proc / "meminfo"):
        name, _, rest = line.partition(":")
        if name == wanted:
            return int(rest.split()[0]) * _KIB
    return None


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_bytes(proc: Path) -> Iterator[int]:
    """Yields the available bytes within each limit."""
    return (limit - used for limit, used in _group_limits(proc))


def _group_limits(proc: Path) -> Iterator[tuple[int, int]]:
    """Yields each limit, and the bytes in use within it that the kernel does not give up first."""
    for hierarchy in _hierarchies(proc, "memory"):
        for group in hierarchy.groups():
            stat = _table(group / "memory.stat")
            if hierarchy.is_unified:
                # Above `memory.high` a group is throttled until it hardly moves, which is no better than its end.
                limits = [_number(group / "memory.max"), _number(group / "memory.high")]
                used, idle_cache = _number(group / "memory.current"), stat.get("inactive_file", 0)
            else:
                # The second covers ancestors that are not visible from inside a container.
                limits = [_number(group / "memory.limit_in_bytes"), stat.get("hierarchical_memory_limit")]
                used, idle_cache = _number(group / "memory.usage_in_bytes"), stat.get("total_inactive_file", 0)
            if used is not None:
                yield from ((limit, used - idle_cache) for limit in limits if limit is not None)


def _machine_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _group_processors(proc: Path) -> Iterator[float]:
    for hierarchy in _hierarchies(proc, "cpu"):
        for group in hierarchy.groups():
            if hierarchy.is_unified:
                quota, period = [*_text(group / "cpu.max").split(), "", ""][:2]
            else:
                quota, period = (_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
            # No quota is "max", or in version 1 -1.
            if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
                yield int(quota) / int(period)


def _hierarchies(proc: Path, controller: str) -> Iterator[_Hierarchy]:
    """Yields the mounted hierarchies with this controller that this process has a place in."""
    own_paths: dict[frozenset[str], str] = {}  # by controllers; version 2 has none here
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        own_paths[frozenset(filter(None, controllers.split(",")))] = path
    for line in _lines(proc / "self" / "mountinfo"):
        # ID, parent, device, root in the file system, mount point, options …, "-", type, source, its options.
        before, _, after = line.partition(" - ")
        root, mount_point = map(_unescaped, before.split()[3:5])
        kind, _, options = after.split(maxsplit=2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        is_unified = kind == "cgroup2"
        for controllers, path in own_paths.items():
            if not controllers if is_unified else controller in controllers <= set(options.split(",")):
                top = Path(mount_point)
                yield _Hierarchy(is_unified, _own_folder(top, root, path), top)


def _own_folder(top: Path, root: str, path: str) -> Path:
    """Returns the folder of the group at `path`, in a tree at `top` whose uppermost visible group is `root`."""
    try:
        below = Path(path).relative_to(root)
    except ValueError:  # the path is the host's, and the container sees its own group as the uppermost
        return top
    own = top / below
    return own if ".." not in below.parts and own.is_dir() else top


def _unescaped(name: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not there, or not for us: then it limits nothing that could be known
        return ""


def _lines(file: Path) -> list[str]:
    return _text(file).splitlines()


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _table(file: Path) -> dict[str, int]:
    rows = (line.split() for line in _lines(file))
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
