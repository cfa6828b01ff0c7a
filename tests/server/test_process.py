"""The process of a server gives memory back, may have enough descriptors, and ends whatever its threads do."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import termios
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from kestrel_grpc.process import (
    MAX_DESCRIPTORS,
    Interruption,
    return_free_memory,
    return_large_blocks,
    want_of,
)

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


_HANGS_UP = """
import asyncio, os, signal, sys
from kestrel_grpc.process import stop_signals

async def main():
    read = asyncio.Event()
    with stop_signals(lambda: (print("reads again", flush=True), read.set())) as signals:
        print("ready", flush=True)
        await asyncio.wait((signals.first, asyncio.ensure_future(read.wait())), return_when=asyncio.FIRST_COMPLETED)
        if signals.first.done():
            signals.hang_up()  # a shell sends another
            print(signals.first.result().name, signals.second.done(), flush=True)

asyncio.run(main())
"""


def _has_terminal(descriptor: int) -> Callable[[], None]:
    def take() -> None:
        os.setsid()
        fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)

    return take


def test_a_terminal_that_is_gone_asks_the_process_to_stop_once() -> None:
    terminal, inner = os.openpty()
    process = subprocess.Popen(
        (sys.executable, "-c", _HANGS_UP),
        stdin=inner,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_has_terminal(inner),
    )
    os.close(inner)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.close(terminal)
        assert process.stdout.read() == "SIGHUP False\n"
    assert process.returncode == 0


@pytest.mark.parametrize("has_terminal", [False, True])
def test_sighup_without_a_lost_terminal_reads_files_again(has_terminal: bool) -> None:
    terminal, inner = os.openpty()
    with subprocess.Popen(
        (sys.executable, "-c", _HANGS_UP),
        stdin=inner if has_terminal else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.read() == "reads again\n"
    assert process.returncode == 0
    os.close(inner)
    os.close(terminal)


def test_a_process_that_was_started_to_ignore_sighup_goes_on_to_do_so() -> None:
    ended = run(
        "import asyncio, os, signal\n"
        "from kestrel_grpc.process import stop_signals\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "async def main():\n"
        "    with stop_signals(lambda: print('reads again')):\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "        await asyncio.sleep(0)\n"
        "asyncio.run(main())\n"
        "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    )
    assert (ended.returncode, ended.stdout) == (0, "True\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_give_their_numbers_to_no_file(closed: str, tmp_path: Path) -> None:
    script = (
        "import os, sys; from kestrel_grpc.process import complain, open_standard_streams\n"
        "open_standard_streams()\n"
        "file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY); print('a line', flush=True); complain('another')\n"
        "os.write(1, b'one'); os.write(2, b'two'); os.read(0, 1)\n"
        "child = os.spawnv(os.P_WAIT, '/bin/sh', ['sh', '-c', 'echo x && echo y >&2'])\n"
        "sys.exit(file <= 2 or child)\n"
    )
    target = tmp_path / "other"
    command = ("sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", script, str(target))
    assert subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0
    assert target.read_bytes() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("streams", "status"), [(">/dev/full", 1), (">&-", 0), (">/dev/full 2>/dev/full", 1)])
def test_a_command_whose_output_is_not_taken_says_so_in_one_line(streams: str, status: int) -> None:
    command = ("sh", "-c", f'"$0" "$@" {streams}', sys.executable, "-m", "kestrel_grpc", "completion", "bash")
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == status
    said = "kestrel-grpc: the output cannot be written: No space left on device\n"
    assert ended.stderr == (said if streams == ">/dev/full" else "")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EROFS])
def test_what_the_system_lacks_is_told_apart_from_faults_of_the_program(number: int) -> None:
    assert want_of(OSError(number, os.strerror(number))) == os.strerror(number)
    assert want_of(MemoryError()) == os.strerror(errno.ENOMEM)
    assert want_of(FileNotFoundError(errno.ENOENT, "a bug")) is None
    assert want_of(ValueError()) is None
