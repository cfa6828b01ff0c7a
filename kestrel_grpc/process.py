"""The process of a server: its event loop, signals, limit of descriptors, threads, memory allocators, and its end.

After each large block that is freed, glibc by default takes the next block of that size from its heaps, up to
32 MiB. Images and activations of all sizes fragment these heaps, and a server under mixed load grows by unused
memory. Python's garbage collector examines old objects when their number has grown by a quarter: with the many
objects of a model's libraries that is rare, and until then each request may keep an image in memory.

At a normal exit Python waits for the threads and then destroys what they may still use. A thread may hang, for
example in a device call or an image decoder.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import faulthandler
import gc
import logging
import os
import platform
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

MAPPED_FROM_BYTES = 2 * 2**20
"""Blocks from this size on are returned to the system when freed; a smaller limit would cause page faults."""
KEPT_BYTES = 8 * 2**20
"""Free memory that is kept at the end of a heap."""
HEAPS = 2
"""For all threads together: each heap is fragmented separately, and the interpreter runs one thread at a time."""
SWITCH_INTERVAL_S = 0.00005
"""For `sys.setswitchinterval`. The engine's thread and the event loop often release the interpreter's lock for a
moment, for a kernel launch or a write; the other thread then keeps it for at most this long."""
END_TIMEOUT_S = 20.0
"""For a process to end once its engine is closed or dead. Normally that takes a few seconds."""
MAX_DESCRIPTORS = 16_384
"""An idle connection takes a descriptor and 12 KiB of memory: with more of them, memory would run out first."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_GRPC_THREADS = ("event_engine", "lifeguard")
_GRPC_NICENESS = 10  # more than the event loop's
_WANTS = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
)
_STANDARD_INPUT, _STANDARD_ERROR = 0, 2
_TERMINAL_GOES_S = 2.0

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_log = logging.getLogger(__name__)


def printable(text: str) -> str:
    """Returns the text with escapes such as `\\x1b` for what a terminal would act on, but line feeds and tabs.

    Names and answers of others may hold control characters, marks that reverse the direction of what follows, and
    halves of surrogate pairs.
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_json(document: str) -> str:
    """Returns the JSON with escapes such as `\\u009b` in its texts for what a terminal would act on."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def complain(text: str) -> None:
    """Print one line on standard error. Without effect where that cannot be written."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"kestrel-grpc: {printable(text)}", file=sys.stderr)


def want_of(error: BaseException) -> str | None:
    """Returns what the system lacks, or does not let be written, by an error that is no fault of the program.

    None for other errors.
    """
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    return error.strerror if isinstance(error, OSError) and error.errno in _WANTS else None


def open_standard_streams() -> None:
    """Open standard input, output and error where they are closed, so that nothing is read from or written to them.

    The next file or socket would get the number of a closed one, and what libraries print with it.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            mode = "r" if descriptor == _STANDARD_INPUT else "w"
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed, else the standard loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


class StopSignals:
    """Futures for the first and the second request to stop.

    SIGHUP is the first where standard input was a terminal that is gone. Elsewhere it calls `reload`.
    """

    def __init__(self, reload: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._reload = reload
        self._had_terminal = os.isatty(_STANDARD_INPUT)
        self.first: asyncio.Future[signal.Signals] = self._loop.create_future()
        self.second: asyncio.Future[signal.Signals] = self._loop.create_future()

    def note(self, number: signal.Signals) -> None:
        """SIGTERM or SIGINT has come."""
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(number)
                return

    def hang_up(self) -> None:
        """SIGHUP has come."""
        if self._note_lost_terminal():
            return
        if self._had_terminal:  # a shell that ends sends the signal before its terminal goes
            self._loop.call_later(_TERMINAL_GOES_S, self._note_lost_terminal)
        self._reload()

    def _note_lost_terminal(self) -> bool:
        is_lost = self._had_terminal and not os.isatty(_STANDARD_INPUT)
        if is_lost and not self.first.done():  # the kernel and a shell may send one each: it is never the second
            _log.info("the terminal is gone")
            self.first.set_result(signal.SIGHUP)
        return is_lost


@contextlib.contextmanager
def stop_signals(reload: Callable[[], object] | None = None) -> Iterator[StopSignals]:
    """Handles SIGTERM and SIGINT on the running event loop, for the length of the `with`.

    With `reload`, which reads files again, also SIGHUP, unless the process was started to ignore it (`nohup`).
    """
    loop = asyncio.get_running_loop()
    signals = StopSignals(reload or (lambda: None))
    handlers: dict[signal.Signals, Callable[[], object]] = {
        number: partial(signals.note, number) for number in (signal.SIGTERM, signal.SIGINT)
    }
    if reload is not None and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = signals.hang_up
    before = {number: signal.getsignal(number) for number in handlers if number is not signal.SIGINT}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield signals
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
        # Removing leaves the default, with which a signal would be a failure while the process ends.
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Interruption:
    """Notes the first SIGINT or SIGTERM during a `with` without an event loop, whose work looks at `number`.

    A SIGINT after that raises KeyboardInterrupt. A second SIGTERM does nothing: `timeout` sends it to a process and
    to its group, so it comes twice. Outside the main thread, where Python has no signals, nothing is noted.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number = signal.Signals(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


def raise_descriptor_limit() -> None:
    """Let this process have `MAX_DESCRIPTORS` open files and connections, or as many as the system allows.

    Services often start with a limit of 1024 although the system allows more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS refuses some values below the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def lower_grpc_threads() -> None:
    """Lower the priority of the threads in which gRPC accepts and reads connections. Linux only.

    For the whole process, once a `Server` has been made.

    Calls that arrive faster than the event loop takes them up wait in gRPC, where each delays all others and takes
    memory. With equal priorities that happens where the threads, which are many, take the processors from the event
    loop. With these, connections wait in the kernel instead. Threads that gRPC starts later inherit the priority.
    """
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + _GRPC_NICENESS
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            if (thread / "comm").read_text().startswith(_GRPC_THREADS):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)


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
    """Exclude all objects that exist now from garbage collection, so that it examines the others often.

    Begins it, where it was off during the start.
    """
    gc.freeze()
    gc.enable()


def return_free_memory() -> None:
    """Collect garbage, and return free memory between used blocks to the system, down to single pages. Needs glibc.

    Blocks. Other threads wait while garbage is collected; then those that allocate wait while heaps are trimmed.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def end_within(timeout_s: float) -> None:
    """Unless the process has ended by then, print the stack of every thread, and exit with status 1.

    A thread of faulthandler does so, which does not need the interpreter's lock. Calling this again restarts the
    time.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=_STANDARD_ERROR)


def end_now(status: int) -> NoReturn:
    """Exit without waiting for any thread. What was logged and printed is written first."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or its reader has gone
            stream.flush()
    os._exit(status)
