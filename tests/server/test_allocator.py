"""Memory that is free goes back, although something stands behind it."""

import subprocess
import sys

from kestrel_grpc.allocator import return_large_blocks

RETURNED = """
import ctypes
import os
from kestrel_grpc.allocator import return_large_blocks

MIB = 2**20
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
library.free.argtypes = (ctypes.c_void_p,)

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if {is_set_up}:
    assert return_large_blocks()
library.free(library.malloc(30 * MIB))  # from which the C library learns, unless it was told
large = library.malloc(20 * MIB)
ctypes.memset(large, 1, 20 * MIB)
behind = library.malloc(MIB)
before = resident_bytes()
library.free(large)
print((before - resident_bytes()) // MIB)
"""


def returned_mib(*, is_set_up: bool) -> int:
    """What comes back of 20 MiB, in a process of its own."""
    code = RETURNED.format(is_set_up=is_set_up)
    return int(subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True).stdout)


def test_a_large_block_goes_back_to_the_system_when_it_is_freed() -> None:
    assert returned_mib(is_set_up=False) <= 1
    assert returned_mib(is_set_up=True) >= 19


def test_what_an_operator_has_set_up_stays() -> None:
    assert not return_large_blocks({"MALLOC_ARENA_MAX": "2"})
    assert not return_large_blocks({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})
