"""Keeps the bytecode of libraries that were installed without it, as in many containers.

Without bytecode Python compiles the sources of all modules at every start: those of torch alone take two seconds.
The first start has several processes compile them, ahead of the imports. Once it serves, another process of the
lowest priority writes the bytecode of what else was imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_FOLDER = "kestrel-bytecode"
_LARGEST_LIBRARY = "torch"
_OWN_PACKAGES = ("kestrel_client", "kestrel_grpc", "kestrel_ops", "kestrel_runtime")
_MOST_PROCESSES = 8


def use_kept_bytecode() -> None:
    """Has Python read and write bytecode in the folder of compiled kernels, where an earlier process has kept it.

    While that folder is being filled, it is only read. Call it before other imports.
    """
    folder = _folder()
    if folder is not None and folder.exists():
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), not _kept(folder).exists()


def compile_ahead(modules: Sequence[str]) -> subprocess.Popen[bytes] | None:
    """Has processes write the bytecode of these modules, and of all that they import, unless it is kept already.

    Call it before `use_kept_bytecode`. A name that ends in ".*" stands for all modules of a package. Returns the
    first of the processes; None where one processor would do all the work.
    """
    if not hasattr(os, "sched_getaffinity") or (folder := _folder()) is None or _kept(folder).exists():
        return None
    num_processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2)
    if num_processes < 1:
        return None
    specs = [(name, importlib.util.find_spec(name)) for name in _OWN_PACKAGES]
    folders = {name: str(Path(spec.origin).parent) for name, spec in specs if spec and spec.origin}
    asked = {"modules": modules, "folders": folders, "path": sys.path, "num_processes": num_processes}
    return _written(folder, asked)


def keep_bytecode() -> subprocess.Popen[bytes] | None:
    """Has a process of the lowest priority write the bytecode of all imported modules, for later starts.

    Returns the process, which a thread waits for. None if nothing is to be kept: torch has its bytecode, Python
    can write it next to the sources, PYTHONPYCACHEPREFIX says where it is, or the folder belongs to others.
    """
    folder = _folder()
    if folder is None or _kept(folder).exists():
        return None
    is_all = _LARGEST_LIBRARY in sys.modules  # other processes have imported less
    return _written(folder, {"files": sorted(_sources()), "last": str(_kept(folder)) if is_all else None})


def _written(folder: Path, asked: Mapping[str, object]) -> subprocess.Popen[bytes] | None:
    """Has a process write to the folder what `bytecode_writer.py` is asked for; None if it cannot."""
    with contextlib.suppress(OSError, RuntimeError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(folder):
            return None
        script = Path(__file__).resolve().with_name("bytecode_writer.py")
        writing = subprocess.Popen(
            (sys.executable, "-I", "-S", str(script), str(folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        threading.Thread(target=writing.communicate, args=(json.dumps(asked).encode(),), daemon=True).start()
        return writing
    return None


def _folder() -> Path | None:
    """Returns the folder of the bytecode; None if Python needs no such folder."""
    found = importlib.util.find_spec(_LARGEST_LIBRARY)
    if found is None or found.cached is None or found.origin is None:
        return None
    folder = Path(os.environ.get("TRITON_CACHE_DIR", "").strip() or Path("~/.triton/cache").expanduser(), _FOLDER)
    if sys.pycache_prefix != str(folder):
        writes_itself = not sys.dont_write_bytecode and os.access(Path(found.origin).parent, os.W_OK)
        if sys.pycache_prefix is not None or writes_itself or Path(found.cached).exists():
            return None
    return folder if not folder.exists() or _is_own(folder) else None


def _is_own(folder: Path) -> bool:
    """Returns True if no other user can write to the folder, and so have this process run other code."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK)


def _kept(folder: Path) -> Path:
    """Returns the file that is written last, for the largest library that is installed now."""
    found = importlib.util.find_spec(_LARGEST_LIBRARY)
    assert found is not None
    assert found.origin is not None
    prefix, sys.pycache_prefix = sys.pycache_prefix, str(folder)
    try:
        return Path(importlib.util.cache_from_source(found.origin)).with_suffix(".kept")
    finally:
        sys.pycache_prefix = prefix


def _sources() -> set[str]:
    """Returns the sources of all imported modules without bytecode."""
    found: set[str] = set()
    for module in list(sys.modules.values()):
        with contextlib.suppress(Exception):  # some objects in place of modules raise errors at every access
            spec = module.__spec__
            if spec is None or spec.origin is None or spec.cached is None or not spec.origin.endswith(".py"):
                continue
            if not Path(spec.cached).exists():
                found.add(spec.origin)
    return found
