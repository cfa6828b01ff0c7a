"""Settings of the memory allocators of Python and the C library.

After each large block that is freed, glibc by default takes the next block of that size from its heaps, up to
32 MiB. Images and activations of all sizes fragment these heaps, and a server under mixed load grows by unused
memory. Python's garbage collector examines old objects when their number has grown by a quarter: with the many
objects of a model's libraries that is rare, and until then each request may keep an image in memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Mapping

MAPPED_FROM_BYTES = 2 * 2**20
"""Blocks from this size on are returned to the system when freed; a smaller limit would cause page faults."""
KEPT_BYTES = 8 * 2**20
"""Free memory that is kept at the end of a heap."""
HEAPS = 2
"""For all threads together: each heap is fragmented separately, and the interpreter runs one thread at a time."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def return_large_blocks(environment: Mapping[str, str] = os.environ) -> bool:
    """Return large blocks to the system when they are freed, in this process from now on.

    Returns False where nothing was changed: with another C library, or where environment variables configure it.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in environment):
        return False
    if "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    limits = ((_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES), (_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_ARENA_MAX, HEAPS))
    return all(library.mallopt(name, value) for name, value in limits)


def set_apart_what_stays() -> None:
    """Exclude all objects that exist now from garbage collection, so that it examines the others often."""
    gc.freeze()


def return_free_memory() -> None:
    """Collect garbage, and return free memory between used blocks to the system, down to single pages. Needs glibc.

    Blocks. Other threads wait while garbage is collected; then those that allocate wait while heaps are trimmed.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
