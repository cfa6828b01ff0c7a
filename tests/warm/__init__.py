"""Starts Python programs with the packages imported already, for tests that start many of them.

The imports of a server take 2.5 seconds of processor time, a fork 0.05. Within `starts`, `subprocess`, `asyncio`
and `multiprocessing` ask a *starter* (`__main__.py`), a process that has imported the packages, to fork a process
where they would start Python. The new process is a child of the one that asked, with a process id, an exit status,
descriptors, variables, a folder and signals of its own, and it runs its program from the first line. The processes
that it starts itself are forked as well, from a starter that is a child of its own.

It differs from other processes in three ways: it has modules that its program may not have imported, it has the
hash seed of the starter, and it exits without destroying its objects unless it has the variable `EXITS_AS_USUAL`,
since that takes 0.2 seconds. Tests of the start itself use `as_usual`. A process is also started as usual if the
difference might matter: with other variables that libraries read while they are imported, with flags of Python,
and on systems other than Linux. If variables of the hub of models differ, the new process imports its library
anew, and what imports it.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import contextlib
import ctypes
import fcntl
import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

EXITS_AS_USUAL = "PYTEST_EXITS_AS_USUAL"
"""A variable for programs whose exit is tested; any value."""
TITLE = "starter of tests"
"""The name of starters in `ps`."""
MAX_REQUEST_BYTES = 128 * 1024
MAX_DESCRIPTORS = 64
HUB_VARIABLES = "HF_"
"""The beginning of the names of variables that the library of the hub reads while it is imported."""
_FREE_VARIABLES = (
    *("KESTREL_", "PYTEST_", "TMPDIR", "PATH", "POISON", "NO_PROXY", "ENGINE_CHANNEL", HUB_VARIABLES),
    "TORCHINDUCTOR_CACHE_DIR",  # set by torch itself, when a test has it import its compiler
)
"""Beginnings of names of variables that no other library reads while it is imported."""
_PR_SET_CHILD_SUBREAPER = 36
_CHECKOUT = Path(__file__).resolve().parents[2]
_SOURCES = {str(_CHECKOUT / folder) for folder in ("", "runtime", "kernels", "clients/python")}
"""Where a starter has imported the packages from."""
_fork_exec = _posixsubprocess.fork_exec


@dataclass(frozen=True)
class Start:
    """Describes a process to start; its descriptors are sent with it, in the order of their numbers here."""

    arguments: Sequence[str]
    """After the path of Python: `-m`, the module and its arguments, or `-c`, the code and its arguments."""
    folder: str
    variables: Mapping[str, str]
    numbers: Sequence[int]
    blocked_signals: Sequence[int]
    descriptor_limits: Sequence[int]
    """Soft and hard."""
    is_session_leader: bool

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Start:
        return cls(**json.loads(data))


class Starter:
    """Asks the starter of this process for new processes."""

    def __init__(self, connection: socket.socket, variables: Mapping[str, str]) -> None:
        """`variables` are those of the starter, while it imported."""
        self._connection = connection
        self._variables = dict(variables)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends the starter; the processes that it has started go on."""
        self._connection.close()

    def fork_exec(self, *values: Any) -> int:
        """Replaces `_posixsubprocess.fork_exec`, which `subprocess` and `multiprocessing` call."""
        arguments, _, closes, kept, folder, variables, stdin, _, _, stdout, _, stderr, _, ends, *rest = values
        _, is_session_leader, group, *identity, preexec, _ = rest
        words, flags = [os.fsdecode(word) for word in arguments[1:]], _own_flags()
        start = Start(
            # `multiprocessing` passes the flags of this process on; the starter has them.
            arguments=words[len(flags) :] if words[: len(flags)] == flags else words,
            folder=os.path.abspath(os.fsdecode(folder or ".")),
            variables=_named(variables),
            numbers=[0, 1, 2, *(number for number in kept if number > 2 and number != ends)],
            blocked_signals=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            descriptor_limits=resource.getrlimit(resource.RLIMIT_NOFILE),
            is_session_leader=bool(is_session_leader),
        )
        is_plain = closes and group == -1 and identity == [None, None, None, -1] and preexec is None
        if not (is_plain and os.fsdecode(arguments[0]) == sys.executable and self._serves(start)):
            return _fork_exec(*values)
        streams = [default if given == -1 else given for default, given in enumerate((stdin, stdout, stderr))]
        with self._lock, _parent_of_orphans():
            data = [start.to_bytes()]
            socket.send_fds(self._connection, data, [*streams, *start.numbers[3:]])
            answer = self._connection.recv(MAX_REQUEST_BYTES)
        if not answer:
            raise RuntimeError("the starter has ended")
        return int(answer)

    def _serves(self, start: Start) -> bool:
        """Returns True if the process would be as if it had been started as usual."""
        own, wanted = _without_sources(self._variables), _without_sources(start.variables)
        differing = (name for name in {*own, *wanted} if own.get(name) != wanted.get(name))
        return (
            start.arguments[:1] in (["-m"], ["-c"])
            and all(name.startswith(_FREE_VARIABLES) for name in differing)
            and Path(start.folder).is_dir()
        )


def _without_sources(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without the folders of this checkout in the path of Python."""
    folders = variables.get("PYTHONPATH", "").split(os.pathsep)
    others = os.pathsep.join(folder for folder in folders if folder and folder not in _SOURCES)
    return {**variables, "PYTHONPATH": others}


def _own_flags() -> list[str]:
    return vars(subprocess)["_args_from_interpreter_flags"]()


def _named(variables: Sequence[bytes] | None) -> dict[str, str]:
    """Returns the variables by name, and the one that `kestrel_grpc.__main__` sets before its imports."""
    named = dict(os.environ)
    if variables is not None:
        named = {name: value for name, _, value in (os.fsdecode(pair).partition("=") for pair in variables)}
    return {"GRPC_VERBOSITY": "NONE", **named}


@contextlib.contextmanager
def _parent_of_orphans() -> Iterator[None]:
    """Within the block, descendants whose parents end become children of this process, as those of a starter do."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextlib.contextmanager
def starts() -> Iterator[None]:
    """Within the block, programs that this process starts begin with the packages imported."""
    if sys.platform != "linux":
        yield
        return
    with _starting_by(_own_starter().fork_exec):
        yield


def as_usual() -> contextlib.AbstractContextManager[None]:
    """Within the block, also if it is within one of `starts`, programs import what they need."""
    return _starting_by(_fork_exec)


def start_by(starter: Starter) -> None:
    """Has that starter fork the programs that this process starts from here on."""
    subprocess._fork_exec = starter.fork_exec  # pyrefly: ignore[missing-attribute]
    _posixsubprocess.fork_exec = starter.fork_exec


@contextlib.contextmanager
def _starting_by(fork_exec: Callable[..., int]) -> Iterator[None]:
    with (
        mock.patch.object(subprocess, "_fork_exec", fork_exec),
        mock.patch.object(_posixsubprocess, "fork_exec", fork_exec),
    ):
        yield


@functools.cache
def _own_starter() -> Starter:
    """Returns the starter of this process, started at the first call; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = {"GRPC_VERBOSITY": "NONE", **os.environ}
    command = (sys.executable, *_own_flags(), "-m", "tests.warm", str(theirs.fileno()))
    with as_usual():
        process = subprocess.Popen(
            command, cwd=_CHECKOUT, env=variables, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
        )
    theirs.close()
    starter = Starter(ours, variables)

    @atexit.register
    def end() -> None:
        starter.close()
        process.wait()

    return starter


def moved(descriptor: int) -> int:
    """Returns a copy of a descriptor with a number above all those with which a process begins."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512)
