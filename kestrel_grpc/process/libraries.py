"""Loads the shared libraries of torch in a thread, while the process imports modules."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from contextlib import suppress
from pathlib import Path

_IN_TORCH = ("lib/libtorch_global_deps.so", "lib/libtorch.so")


def load_torch_libraries() -> threading.Thread:
    """Begins to load the libraries that `import torch` waits for, half a second for those of CUDA.

    An import keeps the interpreter's lock while the system loads a library, also while it waits for another one to
    be loaded; a call of the system's function by ctypes does not. So wait for the returned thread before the
    import. Where a library cannot be loaded, the import reports it.
    """
    found = importlib.util.find_spec("torch")
    folders = () if found is None else found.submodule_search_locations or ()
    paths = [Path(folder, name) for folder in folders for name in _IN_TORCH]
    loading = threading.Thread(target=_load, args=(paths,), name="kestrel-libraries", daemon=True)
    loading.start()
    return loading


def _load(paths: list[Path]) -> None:
    with suppress(OSError, AttributeError):
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.restype = ctypes.c_void_p
        for path in paths:
            dlopen(os.fsencode(path), os.RTLD_LAZY)
