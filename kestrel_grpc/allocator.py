"""How Python and the C library keep memory that is free. Knows nothing of what is in it.

By default glibc learns from each large block that is freed to take the next one from its heaps, up to 32 MiB.
Images and activations of all sizes then leave holes there, and a server under mixed load grows by what nobody uses.
Python looks for old objects that hold only each other when there are a quarter more than the last time: beside all
that a model's libraries have, that takes long, and each request may have left an image.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Mapping

MAPPED_FROM_BYTES = 2 * 2**20
"""Blocks from this size on go back to the system at once; a smaller limit would have steps wait for fresh pages."""
KEPT_BYTES = 8 * 2**20
"""Free memory that stays at the end of a heap."""
HEAPS = 2
"""For all threads together: each heap keeps holes of its own, and the interpreter lets one thread run at a time."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def return_large_blocks(environment: Mapping[str, str] = os.environ) -> bool:
    """Have large blocks returned when they are freed, in this process from now on.

    Returns False where nothing was done: where the C library is another, or an operator has set it up by variables
    of its own.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in environment):
        return False
    if "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    limits = ((_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES), (_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_ARENA_MAX, HEAPS))
    return all(library.mallopt(name, value) for name, value in limits)


def set_apart_what_stays() -> None:
    """Have the garbage collector pass over whatever exists now: it then looks through the rest often, and soon."""
    gc.freeze()


def return_free_memory() -> None:
    """Collect garbage, and give back what is free between blocks in use, down to single pages. Wants glibc.

    Blocks. Other threads wait while garbage is collected, then those that allocate while their heap is trimmed.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
