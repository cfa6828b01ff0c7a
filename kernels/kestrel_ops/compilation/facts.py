"""Keeps what a start finds out in a file for later starts, in the folder where Triton keeps compiled kernels."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kestrel_ops.device_limits import DeviceLimits

_FILE = "start.json"
_SOURCES = (".py", ".cu")


class KeptFacts:
    """Facts by name, each of which can be written as JSON. Where the folder cannot be written, nothing is kept."""

    def __init__(self, folder: Any) -> None:
        """`folder`: a cache manager of Triton for one configuration; with None nothing is kept."""
        self._facts: dict[str, Any] = {}
        self._folder = folder
        with suppress(OSError):
            if folder is not None and (found := folder.get_file(_FILE)) is not None:
                self._facts = _read(Path(found))

    def get(self, name: str) -> Any:
        """Returns a fact; None where it is not kept."""
        return self._facts.get(name)

    def put(self, name: str, value: object) -> None:
        """Keeps a fact from now on."""
        self._facts[name] = value
        if self._folder is not None:
            with suppress(OSError):
                self._folder.put(json.dumps(self._facts), _FILE, binary=False)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except ValueError:  # written in part
        return {}
    return found if isinstance(found, dict) else {}


def device_facts() -> tuple[object, ...]:
    """Returns what distinguishes the current device and this torch, by `repr`."""
    if not torch.cuda.is_available():
        return (torch.__version__,)
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    limits = DeviceLimits.of(torch.device("cuda"))
    return torch.__version__, torch.version.cuda, found.name, found.total_memory, limits


def files_of(package: ModuleType) -> list[tuple[str, int, int]]:
    """Returns path, size and time of each source file of a package; reading the files would take longer."""
    root = Path(package.__path__[0])
    files = sorted(file for file in root.rglob("*") if file.suffix in _SOURCES)
    stats = [(file.relative_to(root).as_posix(), file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
