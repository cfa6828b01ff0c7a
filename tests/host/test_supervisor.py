"""Parts of the processes of a server that need no server."""

from __future__ import annotations

import subprocess
import sys

_ORPHAN = """
import ctypes, os, subprocess
from kestrel_grpc.host.supervisor import collect_orphans

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
        "import sys, kestrel_grpc.host.frontend\n"
        "print(*(name for name in ('torch', 'pydantic', 'kestrel_grpc.frontends.triton.service') "
        "if name in sys.modules))"
    )
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == ([], "")
