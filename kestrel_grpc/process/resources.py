"""Sets up what a process gets from the system and how it uses it: event loop, descriptors, threads and memory.

After each large block that is freed, glibc by default takes the next block of that size from its heaps, up to
32 MiB. Images and activations of all sizes fragment these heaps, and a server under mixed load grows by unused
memory. Python's garbage collector examines old objects when their number has grown by a quarter: with the many
objects of a model's libraries that is rare, and until then each request may keep an image in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import os
import platform
import resource
from collections.abc import Mapping
from pathlib import Path

MAPPED_FROM_BYTES = 2 * 2**20
"""The size from which blocks are returned to the system when freed; a smaller one would cause page faults."""
KEPT_BYTES = 8 * 2**20
"""The free memory that is kept at the end of a heap, in bytes."""
HEAPS = 2
"""The number of heaps. Each is fragmented separately, and the interpreter runs one thread at a time."""
SWITCH_INTERVAL_S = 0.00005
"""The value for `sys.setswitchinterval`, in seconds.

The engine's thread and the event loop often release the interpreter's lock for a moment, for a kernel launch or a
write; the other thread then keeps it for at most this long.
"""
MAX_DESCRIPTORS = 16_384
"""The limit of open descriptors. An idle connection takes one and 12 KiB: with more, memory would run out first."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_GRPC_THREADS = ("event_engine", "lifeguard")
_GRPC_NICENESS = 10  # more than the event loop's
_RESOURCE_ERRORS = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
)


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """Returns the loop of uvloop if that is installed; None means the standard loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


def missing_resource(error: BaseException) -> str | None:
    """Returns the name of the resource that the system lacks, or None if the error has another cause.

    A resource is memory, a descriptor, space on the disk, or the permission to write to a file system.
    """
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    return error.strerror if isinstance(error, OSError) and error.errno in _RESOURCE_ERRORS else None


def raise_descriptor_limit() -> None:
    """Lets this process have `MAX_DESCRIPTORS` open files and connections, or as many as the system allows.

    Services often start with a limit of 1024 although the system allows more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS refuses some values below the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def lower_grpc_threads() -> None:
    """Lowers the priority of the threads in which gRPC accepts and reads connections. Linux only.

    Applies to the whole process. Call it once a `Server` has been made.

    Calls that arrive faster than the event loop serves them wait in gRPC, where each delays all others and takes
    memory. With equal priorities that happens when gRPC's many threads take the processors from the event loop.
    With lower ones, connections wait in the kernel instead. Threads that gRPC starts later inherit the priority.
    """
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + _GRPC_NICENESS
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            if (thread / "comm").read_text().startswith(_GRPC_THREADS):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)


def return_large_blocks(environment: Mapping[str, str] = os.environ) -> bool:
    """Has the C library return large blocks to the system when they are freed, in this process from now on.

    Returns False if nothing was changed: with another C library, or if environment variables configure it.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in environment):
        return False
    if "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    limits = ((_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES), (_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_ARENA_MAX, HEAPS))
    return all(library.mallopt(name, value) for name, value in limits)


def freeze_existing_objects(num_new_objects: int | None = None) -> None:
    """Excludes all objects that exist now from garbage collection, so that it examines the others often.

    Enables the collection if it was disabled during the start. With `num_new_objects` it begins when there are so
    many that can have references, in place of Python's 700.
    """
    gc.freeze()
    if num_new_objects is not None:
        gc.set_threshold(num_new_objects, *gc.get_threshold()[1:])
    gc.enable()


def return_free_memory() -> None:
    """Collects garbage, and returns free memory between used blocks to the system, down to single memory pages.

    Needs glibc. Other threads wait while garbage is collected; then those that allocate wait while heaps are
    trimmed.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
