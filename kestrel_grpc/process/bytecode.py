"""Keeps the bytecode of libraries that were installed without it, as in many containers.

Without bytecode Python compiles the sources of all modules at every start: those of torch alone take two seconds. A
process that begins without it has another one write it, once it serves, so that the first start does not wait for
thousands of files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

_FOLDER = "kestrel-bytecode"
_LARGEST_LIBRARY = "torch"
_NICENESS = 19


def use_kept_bytecode() -> None:
    """Has Python read and write bytecode in the folder of compiled kernels, where an earlier process has kept it.

    Call it before other imports.
    """
    folder = _folder()
    if folder is not None and _kept(folder).exists():
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False


def keep_bytecode() -> subprocess.Popen[bytes] | None:
    """Has a process of the lowest priority write the bytecode of all imported modules, for later starts.

    Returns the process, which a thread waits for. None if nothing is to be kept: torch has its bytecode, Python
    can write it next to the sources, PYTHONPYCACHEPREFIX says where it is, or the folder belongs to others.
    """
    folder = _folder()
    if folder is None or _kept(folder).exists():
        return None
    with contextlib.suppress(OSError, RuntimeError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(folder):
            return None
        # The largest library comes last: with it the folder is complete.
        files = sorted(_sources(), key=lambda file: file == _source_of_largest())
        command = (sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(folder))
        writing = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        threading.Thread(target=writing.communicate, args=("\n".join(files).encode(),), daemon=True).start()
        return writing
    return None


def _folder() -> Path | None:
    """Returns the folder of the bytecode; None if Python needs no such folder."""
    found = importlib.util.find_spec(_LARGEST_LIBRARY)
    if sys.pycache_prefix is not None or found is None or found.cached is None or found.origin is None:
        return None
    writes_itself = not sys.dont_write_bytecode and os.access(Path(found.origin).parent, os.W_OK)
    if writes_itself or Path(found.cached).exists():
        return None
    folder = Path(os.environ.get("TRITON_CACHE_DIR", "").strip() or Path("~/.triton/cache").expanduser(), _FOLDER)
    return folder if not folder.exists() or _is_own(folder) else None


def _is_own(folder: Path) -> bool:
    """Returns True if no other user can write to the folder, and so have this process run other code."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK)


def _source_of_largest() -> str:
    found = importlib.util.find_spec(_LARGEST_LIBRARY)
    assert found is not None
    assert found.origin is not None
    return found.origin


def _kept(folder: Path) -> Path:
    """Returns the file that is written last."""
    return _target(_source_of_largest(), folder)


def _target(source: str, folder: Path) -> Path:
    prefix, sys.pycache_prefix = sys.pycache_prefix, str(folder)
    try:
        return Path(importlib.util.cache_from_source(source))
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


def _write(folder: Path) -> None:
    """Compiles the files named on standard input, in their order."""
    import py_compile

    os.nice(_NICENESS)
    for source in sys.stdin.read().splitlines():
        with contextlib.suppress(OSError, py_compile.PyCompileError, ValueError):
            py_compile.compile(source, cfile=str(_target(source, folder)), doraise=True)


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
