"""The process of a server gives memory back, may have enough descriptors, and ends whatever its threads do."""

import resource
import signal
import subprocess
import sys
import weakref

import pytest

from kestrel_grpc.process import MAX_DESCRIPTORS, Interruption, return_free_memory, return_large_blocks

MAX_WAIT_S = 60
RESIDENT = """
import ctypes
import os
from kestrel_grpc.process import return_free_memory, return_large_blocks

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
    code = "import gc\nfrom kestrel_grpc.process import set_apart_what_stays\nset_apart_what_stays()\n"
    assert printed(f"{code}print(len(gc.get_objects()))") < 100


def test_the_first_signal_is_noted_and_an_interrupt_after_it_raises() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interruption() as interruption:
        assert interruption.number is None
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
            assert interruption.number is signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_an_operator_has_set_up_stays() -> None:
    assert not return_large_blocks({"MALLOC_ARENA_MAX": "2"})
    assert not return_large_blocks({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})


def test_as_many_descriptors_may_be_used_as_the_system_allows() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ended = run(
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))\n"
        "from kestrel_grpc.process import raise_descriptor_limit; raise_descriptor_limit()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    allowed = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
    assert ended.stdout.split() == [str(allowed), str(hard)]


def test_a_higher_limit_of_descriptors_stays() -> None:
    ended = run(
        "from kestrel_grpc import process; import resource; process.MAX_DESCRIPTORS = 1\n"
        "before = resource.getrlimit(resource.RLIMIT_NOFILE); process.raise_descriptor_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE) == before)"
    )
    assert ended.stdout == "True\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=MAX_WAIT_S)


@pytest.mark.parametrize(
    "hangs",
    ["threading.Event().wait()", "sum(range(10**13))", "threading.Thread(target=threading.Event().wait).start()"],
    ids=["in the main thread", "with the interpreter's lock", "in a thread that Python waits for"],
)
def test_a_process_that_does_not_end_by_itself_is_ended_and_says_where_it_was(hangs: str) -> None:
    ended = run(f"import threading; from kestrel_grpc.process import end_within; end_within(0.2); {hangs}")
    assert ended.returncode == 1
    assert 'File "<string>", line 1' in ended.stderr or "threading.py" in ended.stderr


def test_a_process_that_ends_in_time_is_left_alone() -> None:
    ended = run("import sys; from kestrel_grpc.process import end_within; end_within(30); sys.exit(3)")
    assert (ended.returncode, ended.stderr) == (3, "")


def test_ending_now_waits_for_no_thread_and_loses_no_line() -> None:
    ended = run(
        "import threading; from kestrel_grpc.process import end_now;"
        "threading.Thread(target=threading.Event().wait).start(); print('said', end=''); end_now(4)"
    )
    assert (ended.returncode, ended.stdout) == (4, "said")


def test_ending_now_needs_no_standard_output() -> None:
    assert (
        run("import sys; from kestrel_grpc.process import end_now; sys.stdout = None; end_now(5)").returncode == 5
    )
