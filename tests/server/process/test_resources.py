"""A process gives memory back and may have enough descriptors."""

import errno
import os
import resource
import subprocess
import sys
import weakref

import pytest

from kestrel_grpc.process.resources import (
    MAX_DESCRIPTORS,
    missing_resource,
    return_free_memory,
    return_large_blocks,
)
from tests.server.process.code_runs import run

RESIDENT = """
import ctypes
import os
from kestrel_grpc.process.resources import return_free_memory, return_large_blocks

MIB = 2**20
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
library.free.argtypes = (ctypes.c_void_p,)

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""


RETURNED = """
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


HOLES = """
assert return_large_blocks()
blocks = [library.malloc(64 * 2**10) for _ in range(1_000)]
for block in blocks:
    ctypes.memset(block, 1, 64 * 2**10)
for block in blocks[::2]:
    library.free(block)
before = resident_bytes()
return_free_memory()
print((before - resident_bytes()) // MIB)
"""


def printed(code: str) -> int:
    """The number that the code prints, in a process of its own."""
    command = (sys.executable, "-c", RESIDENT + code)
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def returned_mib(*, is_set_up: bool) -> int:
    """What comes back of 20 MiB."""
    return printed(RETURNED.format(is_set_up=is_set_up))


def test_a_large_block_goes_back_to_the_system_when_it_is_freed() -> None:
    assert returned_mib(is_set_up=False) <= 1
    assert returned_mib(is_set_up=True) >= 19


def test_holes_between_blocks_in_use_go_back_when_that_is_asked_for() -> None:
    assert printed(HOLES) >= 25  # of 31


def test_garbage_goes_too() -> None:
    class Holder:
        itself: object = None

    holder = Holder()
    holder.itself = holder
    held = weakref.ref(holder)
    del holder
    return_free_memory()
    assert held() is None


def test_the_collector_passes_over_what_was_there_at_the_start() -> None:
    code = "import gc\nfrom kestrel_grpc.process.resources import freeze_existing_objects\n"
    code += "before = gc.get_threshold()\n"
    assert printed(f"{code}freeze_existing_objects()\nprint(len(gc.get_objects()))") < 100
    code += "freeze_existing_objects()\nsame = gc.get_threshold() == before\nfreeze_existing_objects(3000)\n"
    assert printed(f"{code}print(gc.get_threshold()[0] * same)") == 3000


def test_what_an_operator_has_set_up_stays() -> None:
    assert not return_large_blocks({"MALLOC_ARENA_MAX": "2"})
    assert not return_large_blocks({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})


def test_as_many_descriptors_may_be_used_as_the_system_allows() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ended = run(
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))\n"
        "from kestrel_grpc.process.resources import raise_descriptor_limit; raise_descriptor_limit()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    allowed = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
    assert ended.stdout.split() == [str(allowed), str(hard)]


def test_a_higher_limit_of_descriptors_stays() -> None:
    ended = run(
        "from kestrel_grpc.process import resources; import resource; resources.MAX_DESCRIPTORS = 1\n"
        "before = resource.getrlimit(resource.RLIMIT_NOFILE); resources.raise_descriptor_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE) == before)"
    )
    assert ended.stdout == "True\n"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EROFS])
def test_what_the_system_lacks_is_told_apart_from_faults_of_the_program(number: int) -> None:
    assert missing_resource(OSError(number, os.strerror(number))) == os.strerror(number)
    assert missing_resource(MemoryError()) == os.strerror(errno.ENOMEM)
    assert missing_resource(FileNotFoundError(errno.ENOENT, "a bug")) is None
    assert missing_resource(ValueError()) is None
