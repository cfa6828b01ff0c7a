"""Parts of the processes of a server that need no server."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.multiprocess.supervision import supervisor as supervisor_module
from kestrel_grpc.multiprocess.supervision.layout import CorePlace, Layout
from kestrel_grpc.multiprocess.supervision.supervisor import Supervisor

_ORPHAN = """
import ctypes, os, subprocess
from kestrel_grpc.multiprocess.supervision.supervisor import collect_orphans

PR_SET_CHILD_SUBREAPER = 36  # as the first process of a container, this one becomes the parent of orphans
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
reader, writer = os.pipe()
parent = os.fork()
if parent == 0:
    orphan = os.fork()
    if orphan != 0:
        os.write(writer, str(orphan).encode())
    os._exit(0)
os.waitpid(parent, 0)
orphan = int(os.read(reader, 32))
os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
own = subprocess.Popen(("true",))
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
collect_orphans({own.pid, None})
try:
    os.waitpid(orphan, os.WNOHANG)
except ChildProcessError:
    print("collected")
print(own.wait())
collect_orphans(set())
"""


def test_the_first_process_of_a_container_collects_orphans_and_leaves_its_own_children() -> None:
    done = subprocess.run((sys.executable, "-c", _ORPHAN), capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["collected", "0"], "")


def test_a_front_end_imports_neither_torch_nor_frontends_that_it_was_not_asked_for() -> None:
    program = (
        "import sys, kestrel_grpc.multiprocess.supervision.frontend_process\n"
        "print(*(name for name in ('torch', 'pydantic', 'kestrel_grpc.frontends.triton.service') "
        "if name in sys.modules))"
    )
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == ([], "")


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        *((subprocess, "Popen", OSError(number, os.strerror(number))) for number in (errno.EAGAIN, errno.ENOMEM)),
        *((subprocess, "Popen", OSError(number, os.strerror(number))) for number in (errno.ENOENT, errno.EACCES)),
        (socket, "socketpair", OSError(errno.EMFILE, os.strerror(errno.EMFILE))),
        (subprocess, "Popen", subprocess.SubprocessError("Exception occurred in preexec_fn.")),
        (threading.Thread, "start", RuntimeError("can't start new thread")),
        (supervisor_module, "Link", ValueError("a mistake of ours")),
    ],
    ids=["EAGAIN", "ENOMEM", "ENOENT", "EACCES", "EMFILE", "SubprocessError", "no thread", "a bug"],
)
async def test_a_process_that_cannot_be_started_ends_the_start_of_the_server_with_its_reason(
    module: Any,
    name: str,
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    # Processes that are started all the same end at once.
    monkeypatch.setattr(sys, "executable", "/bin/false")
    folder = tmp_path / "private"
    folder.mkdir()
    server = Supervisor(ServerConfig(port=0), Layout(1, (CorePlace("cpu"),)), folder, os.open(folder, os.O_RDONLY))
    with monkeypatch.context() as failing:
        failing.setattr(module, name, refuse)
        assert await server.serve() == 1
    os.close(server.lock)
    if module is supervisor_module:
        not_kept = [f"{process} is not kept any more" for process in ("core-0", "frontend-0")]
        assert caplog.messages == [*not_kept, "core-0 cannot be kept"]
    else:
        assert caplog.messages == [f"core-0 cannot be started: {getattr(error, 'strerror', None) or error}"]


async def test_the_server_ends_where_its_folder_is_removed_before_a_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LOOK_INTERVAL_S", 0.01)
    folder = tmp_path / "private"
    folder.mkdir()
    server = Supervisor(ServerConfig(port=0), Layout(1, (CorePlace("cpu"),)), folder, 0)
    watching = asyncio.ensure_future(server._watch_folder())
    (folder / "images").rmdir()
    (folder / "incoming").rmdir()
    folder.rmdir()
    assert await server.must_end == f"the folder {folder} was removed"
    watching.cancel()
