"""Keeps the bytecode of libraries that were installed without it, as in many containers.

Without bytecode Python compiles the sources of all modules at every start: those of torch alone take two seconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

_FOLDER = "kestrel-bytecode"
_LARGEST_LIBRARY = "torch"


def keep_bytecode() -> None:
    """Have Python keep bytecode in the folder of compiled kernels, where torch has none and cannot get any.

    Nothing is changed where torch has its bytecode, where Python can write it beside the sources, where
    PYTHONPYCACHEPREFIX says where it is, and where the folder belongs to others. Call it before other imports.
    """
    found = importlib.util.find_spec(_LARGEST_LIBRARY)
    if sys.pycache_prefix is not None or found is None or found.cached is None or found.origin is None:
        return
    writes_itself = not sys.dont_write_bytecode and os.access(Path(found.origin).parent, os.W_OK)
    if writes_itself or Path(found.cached).exists():
        return
    kernels = os.environ.get("TRITON_CACHE_DIR", "").strip() or Path("~/.triton/cache").expanduser()
    folder = Path(kernels, _FOLDER)
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        # Whoever can write there could have this process run other code.
        if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK):
            sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
