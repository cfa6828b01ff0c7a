"""Runs a starter: imports the packages, and forks a process for each request on its socket.

`python -m tests.warm DESCRIPTOR` runs it until the other end of the socket is closed. It has one thread, no gRPC
channel and no event loop, none of which survives a fork.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import types
from collections.abc import Mapping
from typing import NoReturn

from setproctitle import setproctitle

from tests.warm import (
    EXITS_AS_USUAL,
    HUB_VARIABLES,
    MAX_DESCRIPTORS,
    MAX_REQUEST_BYTES,
    TITLE,
    Start,
    Starter,
    moved,
    start_by,
)

_IGNORED = (signal.SIGINT, signal.SIGTERM)
"""They may be sent to a group of processes, to which a starter belongs."""


PACKAGES = (
    *("uvloop", "kestrel_grpc.cli.commands", "kestrel_grpc.server"),
    *(
        "kestrel_grpc.cli.accept",
        "kestrel_grpc.cli.ask",
        "kestrel_grpc.cli.batch.command",
        "kestrel_grpc.cli.bench.command",
    ),
    *("kestrel_grpc.cli.demo", "kestrel_grpc.cli.health", "kestrel_grpc.cli.status", "kestrel_grpc.cli.verify"),
    *(
        "kestrel_grpc.multiprocess.supervision.supervisor",
        "kestrel_grpc.multiprocess.supervision.core_process",
        "kestrel_grpc.multiprocess.supervision.frontend_process",
    ),
    *(
        "kestrel_runtime.engine.engine",
        "kestrel_runtime.engine.warm_up",
        "kestrel_grpc.multiprocess.engine_channel.core_server",
    ),
    "kestrel_runtime.models.background_load",
    *("kestrel_grpc.frontends.http.frontend", "kestrel_grpc.frontends.web_ui.web_ui"),
    *("kestrel_grpc.frontends.openai.service", "kestrel_grpc.frontends.rest.service"),
    *("kestrel_grpc.frontends.triton.service", "uvicorn.lifespan.off"),
    *("kestrel_runtime.models.moondream.family", "kestrel_runtime.models.moondream.prepared"),
    *("PIL.GifImagePlugin", "PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.PpmImagePlugin"),
)
"""The modules that servers, their commands and their benches import, at their start or on first use."""


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


def begin(start: Start, descriptors: list[int]) -> NoReturn:
    """Set up this process as the one that was asked for, run its program, and exit."""
    if start.is_session_leader:
        os.setsid()
    _begin_starter(descriptors)
    aside = [moved(descriptor) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(aside, start.numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    soft, hard = start.descriptor_limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if _of_hub(os.environ) != _of_hub(start.variables):
        _forget_hub()
    os.chdir(start.folder)
    for name in os.environ.keys() - start.variables.keys():
        del os.environ[name]
    os.environ.update(start.variables.items() - os.environ.items())
    setproctitle(" ".join((sys.executable, *start.arguments)))
    signal.pthread_sigmask(signal.SIG_SETMASK, start.blocked_signals)
    try:
        _run(start)
        sys.exit()
    except SystemExit as error:
        if EXITS_AS_USUAL in start.variables or not isinstance(error.code, int | None):
            raise
        _leave(error.code or 0)


def _run(start: Start) -> None:
    kind, program, *words = start.arguments
    if kind == "-m":
        sys.path[0], sys.argv = start.folder, [program, *words]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = "", ["-c", *words]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(module))


def _leave(status: int) -> NoReturn:
    """Exit as Python does, but for destroying all that is imported, which takes longer than most commands."""
    vars(threading)["_shutdown"]()  # waits for threads, as `multiprocessing` has it do
    vars(atexit)["_run_exitfuncs"]()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)


def _of_hub(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(HUB_VARIABLES)}


def _forget_hub() -> None:
    """Have the library of the hub imported again, and our packages, whose modules hold what they took from it."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("huggingface_hub", "kestrel_grpc", "kestrel_runtime"):
            del sys.modules[name]


def _begin_starter(descriptors: list[int]) -> None:
    """Have this process ask a starter of its own, which is as this process is now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        for descriptor in descriptors:
            os.close(descriptor)
        begin(*next_process(theirs))
    theirs.close()
    start_by(Starter(ours, os.environ))


if __name__ == "__main__":
    connection = socket.socket(fileno=int(sys.argv[1]))
    import_packages()
    begin(*next_process(connection))
