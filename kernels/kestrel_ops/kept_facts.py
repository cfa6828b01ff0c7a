"""Keeps what a start finds out in a file for later starts, in the folder where Triton keeps compiled kernels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kestrel_ops.device_limits import DeviceLimits

_FILE = "start.json"
_SOURCES = (".py", ".cu")


class KeptFacts:
    """Facts by name, each of which can be written as JSON; those of other configurations are in other files.

    Without Triton, and where its folder cannot be written, nothing is kept.
    """

    def __init__(self, identity: Iterable[object], packages: Iterable[ModuleType]) -> None:
        """`identity`: values on whose `repr` the facts depend, beside the device, torch, and the files of
        `packages`."""
        import kestrel_ops

        self._facts: dict[str, Any] = {}
        self._cache: Any = None
        files = [_files_of(package) for package in (kestrel_ops, *packages)]
        with suppress(ImportError, OSError):
            import triton
            from triton.runtime.cache import get_cache_manager

            own = (*identity, *_device_facts(), triton.__version__, files)
            self._cache = get_cache_manager(hashlib.sha256(repr(own).encode()).hexdigest())
            if (found := self._cache.get_file(_FILE)) is not None:
                self._facts = _read(Path(found))

    def get(self, name: str) -> Any:
        """A fact; None where it is not kept."""
        return self._facts.get(name)

    def put(self, name: str, value: object) -> None:
        """Keep a fact from now on."""
        self._facts[name] = value
        if self._cache is not None:
            with suppress(OSError):
                self._cache.put(json.dumps(self._facts), _FILE, binary=False)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except ValueError:  # written in part
        return {}
    return found if isinstance(found, dict) else {}


def _device_facts() -> tuple[object, ...]:
    if not torch.cuda.is_available():
        return (torch.__version__,)
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    limits = DeviceLimits.of(torch.device("cuda"))
    return torch.__version__, torch.version.cuda, found.name, found.total_memory, limits


def _files_of(package: ModuleType) -> list[tuple[str, int, int]]:
    """Path, size and time of each source file. Reading all of them would take longer."""
    root = Path(package.__path__[0])
    files = sorted(file for file in root.rglob("*") if file.suffix in _SOURCES)
    stats = [(file.relative_to(root).as_posix(), file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
