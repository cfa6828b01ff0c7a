"""The starter: imports the packages, and forks a process for each request that comes over its socket.

`python -m tests.warm DESCRIPTOR` runs it until the other end of the socket is closed. It has one thread, no gRPC
channel, no context of ZeroMQ and no event loop, none of which survives a fork.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import types

from setproctitle import setproctitle

from tests.warm import MAX_DESCRIPTORS, MAX_REQUEST_BYTES, TITLE, Start, Starter, moved, start_by

_IGNORED = (signal.SIGINT, signal.SIGTERM)
"""They may be sent to a group of processes, to which a starter belongs."""


PACKAGES = (
    *("uvloop", "kestrel_grpc.cli.commands", "kestrel_grpc.server"),
    *("kestrel_grpc.host.supervisor", "kestrel_grpc.host.core", "kestrel_grpc.host.frontend"),
)
"""What servers, their commands and their benches import."""


def import_packages() -> None:
    gc.disable()
    for name in PACKAGES:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    # No collection touches what is imported, so that processes go on to share it.
    gc.freeze()
    gc.enable()


def next_process(connection: socket.socket) -> tuple[Start, list[int]]:
    """Fork a process for each request. Returns in the new processes only, each with its descriptors."""
    setproctitle(TITLE)  # the first call finds where the title is, before variables are set
    before = [signal.signal(number, signal.SIG_IGN) for number in _IGNORED]
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        if not data:
            os._exit(0)
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            # Its child is an orphan when it exits, and so becomes a child of the process that asked.
            is_orphan, is_parent = os.pipe()
            child = os.fork()
            if child != 0:
                os.write(writer, str(child).encode())
                os._exit(0)
            os.close(is_parent)
            os.read(is_orphan, 1)  # the end of the file comes with that of the parent
            for descriptor in (reader, writer, is_orphan):
                os.close(descriptor)
            connection.close()
            for number, handler in zip(_IGNORED, before, strict=True):
                signal.signal(number, handler)
            return Start.from_bytes(data), descriptors
        os.waitpid(middle, 0)
        connection.send(os.read(reader, 32))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def begin(start: Start, descriptors: list[int]) -> None:
    """Set up this process as the one that was asked for, and run its program."""
    if start.is_session_leader:
        os.setsid()
    _begin_starter(descriptors)
    aside = [moved(descriptor) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(aside, start.numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(start.folder)
    for name in os.environ.keys() - start.variables.keys():
        del os.environ[name]
    os.environ.update(start.variables.items() - os.environ.items())
    setproctitle(" ".join((sys.executable, *start.arguments)))
    signal.pthread_sigmask(signal.SIG_SETMASK, start.blocked_signals)
    kind, program, *words = start.arguments
    if kind == "-m":
        sys.path[0], sys.argv = start.folder, [program, *words]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = "", ["-c", *words]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(module))


def _begin_starter(descriptors: list[int]) -> None:
    """Have this process ask a starter of its own, which is as this process is now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        for descriptor in descriptors:
            os.close(descriptor)
        begin(*next_process(theirs))
        sys.exit()
    theirs.close()
    start_by(Starter(ours, os.environ))


if __name__ == "__main__":
    connection = socket.socket(fileno=int(sys.argv[1]))
    import_packages()
    begin(*next_process(connection))
