"""Processes that are forked from a starter are as others are to those who start them."""

import asyncio
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

pytestmark = pytest.mark.usefixtures("warm_starts")

HAS_TORCH = "import sys; print('torch' in sys.modules)"
SAYS_WHAT_IT_IS = """
import json, os, signal, sys
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "folder": os.getcwd(),
    "arguments": sys.argv, "variable": os.environ.get("KESTREL_SAID"), "others": "PATH" in os.environ,
    "read": sys.stdin.read(), "name": __name__, "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
    "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "torch": "torch" in sys.modules,
}))
print("complaint", file=sys.stderr)
sys.exit(7)
"""


def printed(*command: str, **options: Any) -> str:
    done = subprocess.run((sys.executable, *command), capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_is_a_child_with_what_it_was_given(tmp_path: Path):
    variables = {**os.environ, "KESTREL_SAID": "yes"}
    reader, writer = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    with os.fdopen(reader), os.fdopen(writer):
        process = subprocess.Popen(
            (sys.executable, "-c", SAYS_WHAT_IT_IS, "a", "b c"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=variables,
            pass_fds=(writer,),
            start_new_session=True,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        out, err = process.communicate("hello")
    told = json.loads(out)
    assert (process.returncode, err) == (7, "complaint\n")
    assert (told["pid"], told["parent"], told["session"]) == (process.pid, os.getpid(), process.pid)
    assert (told["folder"], told["arguments"], told["read"]) == (str(tmp_path), ["-c", "a", "b c"], "hello")
    assert (told["variable"], told["others"], told["name"], told["torch"]) == ("yes", True, "__main__", True)
    assert told["blocked"] == [signal.SIGTERM]
    # Beside these it has the folder that it lists, and the socket of its starter.
    assert {0, 1, 2, writer} <= set(told["descriptors"])
    assert len(told["descriptors"]) == 6


def test_it_is_ended_by_a_signal_and_fails_by_an_exception():
    waits = "import time; print('there', flush=True); time.sleep(3600)"
    with subprocess.Popen((sys.executable, "-c", waits), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.terminate()
    assert process.returncode == -signal.SIGTERM
    failed = subprocess.run((sys.executable, "-c", "1 / 0"), capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_the_processes_that_it_starts_are_its_children_and_begin_so_too():
    told = (
        "import os, subprocess, sys; print(os.getpid(), flush=True); code = 'import os, sys; "
        "print(os.getppid(), \"torch\" in sys.modules)'; sys.exit(subprocess.call((sys.executable, '-c', code)))"
    )
    own, parent, has_torch = printed("-c", told).split()
    assert (parent, has_torch) == (own, "True")


async def test_asyncio_and_multiprocessing_start_them_so():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HAS_TORCH, stdout=subprocess.PIPE)
    assert await process.communicate() == (b"True\n", None)
    assert process.returncode == 0
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_tell, args=(theirs,))
    child.start()
    assert ours.recv() == (child.pid, os.getpid(), True)
    child.join()
    assert child.exitcode == 0
    for connection in (ours, theirs):
        connection.close()


def _tell(connection: Any) -> None:
    connection.send(
        (os.getpid(), os.getppid(), "kestrel_grpc.multiprocess.supervision.core_process" in sys.modules)
    )


def test_it_has_the_limit_of_descriptors_of_the_process_that_asks():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
    try:
        code = "import resource, sys; print('torch' in sys.modules, *resource.getrlimit(resource.RLIMIT_NOFILE))"
        assert printed("-c", code) == f"True {before[0] - 1} {before[1]}"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_other_variables_of_the_hub_are_read_although_its_library_had_been_imported():
    code = (
        "import sys; print('torch' in sys.modules); from huggingface_hub import constants; "
        "from kestrel_runtime.loading import hub; print(constants.ENDPOINT, hub.constants.ENDPOINT)"
    )
    address = "http://127.0.0.1:9"
    assert printed("-c", code, env={**os.environ, "HF_ENDPOINT": address}).split() == ["True", address, address]


def test_objects_are_destroyed_at_the_exit_only_where_that_is_asked_for():
    code = (
        "import atexit, threading\n"
        "class Told:\n"
        "    def __del__(self): print('destroyed', flush=True)\n"
        "told = Told(); atexit.register(print, 'exits')\n"
        "threading.Thread(target=print, args=('thread',)).start()"
    )
    assert printed("-c", code).split() == ["thread", "exits"]
    asking = {**os.environ, warm.EXITS_AS_USUAL: "yes"}
    assert printed("-c", code, env=asking).split() == ["thread", "exits", "destroyed"]


def test_where_it_would_make_a_difference_it_is_started_as_usual():
    assert printed("-c", HAS_TORCH) == "True"
    assert printed("-c", HAS_TORCH, env={**os.environ, "OMP_NUM_THREADS": "3"}) == "False"
    assert printed("-I", "-c", HAS_TORCH) == "False"
    assert printed("-c", HAS_TORCH, umask=0o77) == "False"
    with warm.as_usual():
        assert printed("-c", HAS_TORCH) == "False"
    assert printed("-c", HAS_TORCH) == "True"
