"""The server under load: our command as a child process, and what a machine and a server say of themselves."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kestrel_client import Client

_STOP_TIMEOUT_S = 40
_SOURCE_ROOTS = ("", "runtime", "kernels", "clients/python")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Where a server listens, how long its start took, and its process; 0 where it ran already."""

    address: str
    ready_s: float = 0.0
    pid: int = 0

    def facts(self) -> dict[str, Any]:
        """What it says of itself."""
        with Client(self.address, wait_for_ready=True) as client:
            info, (model, *_) = client.server_info(), client.list_models()
        return {
            "version": info.server_version,
            "model": model.name,
            "architecture": model.architecture,
            "device": model.device,
            "dtype of the weights as loaded": model.dtype,
            "parameters": model.parameter_count,
            "max_batch_size": info.limits.max_running_requests,
            "ready_s": self.ready_s,
        }


@contextlib.contextmanager
def started_server(
    options: Sequence[str], tree: Path | None = None, *, program: str = "kestrel_grpc"
) -> Iterator[RunningServer]:
    """`kestrel-grpc serve` with these options on a free port, until the block ends.

    With a `tree`, the code of that checkout is served instead of the code that runs. `program` is the module that
    stands for `kestrel-grpc`.
    """
    command = (sys.executable, "-m", program, "serve", "--port", "0", "--log-level", "warning", *options)
    started = time.perf_counter()
    environment = dict(os.environ)
    if tree is not None:
        sources = (str(tree.resolve() / folder) for folder in _SOURCE_ROOTS)
        environment["PYTHONPATH"] = os.pathsep.join((*sources, environment.get("PYTHONPATH", "")))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tree, env=environment)
    assert process.stdout is not None, "asked for a pipe"
    try:
        line = process.stdout.readline()
        if " on " not in line:
            raise RuntimeError(f"the server did not start: {' '.join(command)}")
        yield RunningServer(line.split(" on ")[1].split()[0], time.perf_counter() - started, process.pid)
    finally:
        process.send_signal(signal.SIGINT)  # which, unlike SIGTERM, is not announced to balancers first
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def machine_facts() -> dict[str, Any]:
    """What numbers are to be read beside."""
    import torch

    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "grpcio": grpc.__version__,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
        facts["cuda"] = torch.version.cuda
    return facts


def _commit() -> str:
    """The checkout's commit, with `-dirty` where the files are not those of it."""
    try:
        answer = subprocess.run(
            ("git", "describe", "--always", "--dirty", "--exclude", "*"),
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
            check=False,
        )
    except OSError:  # no git there
        return "unknown"
    return answer.stdout.strip() or "unknown"
