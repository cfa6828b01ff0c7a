"""The server under load: our command as a child process, and what a machine and a server say of themselves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from kestrel_client import Client

_STOP_TIMEOUT_S = 40
_SOURCE_ROOTS = ("", "runtime", "kernels", "clients/python")


class CropCount(NamedTuple):
    """How many crops a server has encoded, of how many pictures."""

    num_crops: float
    num_pictures: float

    def per_picture(self, before: CropCount) -> float | None:
        """Crops encoded for each picture since a reading before; None without pictures."""
        num_pictures = self.num_pictures - before.num_pictures
        return (self.num_crops - before.num_crops) / num_pictures if num_pictures else None


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Where a server listens, how long its start took, and its process; 0 where it ran already."""

    address: str
    ready_s: float = 0.0
    pid: int = 0
    http_address: str = ""
    """Of its HTTP port; empty where it was not asked for one."""
    metrics_port: int = 0
    """0 where it has none."""

    def encoded_crops(self) -> CropCount | None:
        """Since its start; None where it has no port of metrics, or counts no crops."""
        if not self.metrics_port:
            return None
        found = _read_metrics(f"http://127.0.0.1:{self.metrics_port}/metrics")
        lookups, hits = (_of_tier(found, f"kestrel_cache_{what}_total", "crops") for what in ("lookups", "hits"))
        pictures = _of_tier(found, "kestrel_cache_lookups_total", "embeddings")
        return None if lookups is None or hits is None or pictures is None else CropCount(lookups - hits, pictures)

    def calls(self) -> Counter[str]:
        """How many gRPC calls have ended, by the process that took them; empty where it has no port of metrics."""
        return (
            _calls(_read_metrics(f"http://127.0.0.1:{self.metrics_port}/metrics"))
            if self.metrics_port
            else Counter()
        )

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
    options: Sequence[str], tree: Path | None = None, *, program: str = "kestrel_grpc", has_metrics: bool = False
) -> Iterator[RunningServer]:
    """`kestrel-grpc serve` with these options on a free port, until the block ends; with `has_metrics` on another
    one for metrics.

    With a `tree`, the code of that checkout is served instead of the code that runs. `program` is the module that
    stands for `kestrel-grpc`.
    """
    command = (sys.executable, "-m", program, "serve", "--port", "0", "--log-level", "warning", *options)
    metrics_port = _free_port() if has_metrics else 0
    if has_metrics:
        command += ("--metrics-port", str(metrics_port))
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tree, env=_environment(tree))
    assert process.stdout is not None, "asked for a pipe"
    try:
        line = process.stdout.readline()
        if " on " not in line:
            raise RuntimeError(f"the server did not start: {' '.join(command)}")
        address, ready_s = line.split(" on ")[1].split()[0], time.perf_counter() - started
        http_address = process.stdout.readline().split()[-1] if "--http-port" in options else ""
        yield RunningServer(address, ready_s, process.pid, http_address, metrics_port)
    finally:
        process.send_signal(signal.SIGINT)  # which, unlike SIGTERM, is not announced to balancers first
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _environment(tree: Path | None) -> dict[str, str]:
    """The variables of a process that runs the code of a checkout; None: the code that runs here."""
    environment = dict(os.environ)
    if tree is not None:
        sources = (str(tree.resolve() / folder) for folder in _SOURCE_ROOTS)
        environment["PYTHONPATH"] = os.pathsep.join((*sources, environment.get("PYTHONPATH", "")))
    return environment


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _read_metrics(address: str) -> dict[str, float]:
    """The values of all series."""
    with urllib.request.urlopen(address, timeout=_SCRAPE_TIMEOUT_S) as response:
        lines: list[str] = response.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def _calls(found: Mapping[str, float]) -> Counter[str]:
    """Calls by the name of the process, as `Vitals` has it."""
    counts: Counter[str] = Counter()
    for series, value in found.items():
        if series.startswith("rpc_server_call_duration_seconds_count"):
            process = re.search(r'process="([^"]+)"', series)
            counts["server" if process is None else process[1].replace("-", " ")] += int(value)
    return counts


def _of_tier(found: Mapping[str, float], name: str, tier: str) -> float | None:
    """The sum of a metric of one tier over all processes; None where there is none."""
    own = [
        value for series, value in found.items() if series.startswith(f"{name}{{") and f'tier="{tier}"' in series
    ]
    return sum(own) if own else None


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


_GAUGES = (
    *("kestrel_kv_cache_used", "kestrel_scheduler_running"),
    *("kestrel_scheduler_waiting", "kestrel_scheduler_preprocessing"),
)
_SCRAPE_TIMEOUT_S = 30
_LOG_S = 10


@dataclass(frozen=True, slots=True)
class ProcessVitals:
    """A look at one process. Bytes are those of resident memory."""

    pid: int
    rss_bytes: int
    num_descriptors: int
    num_threads: int
    cpu_s: float

    @staticmethod
    def of(pid: int) -> ProcessVitals:
        """Now. Raises `OSError` where the process has ended."""
        folder = Path("/proc") / str(pid)
        status = (folder / "status").read_text()
        times = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        return ProcessVitals(
            pid,
            rss_bytes=1024 * _number(status, "VmRSS"),
            num_descriptors=len(os.listdir(folder / "fd")),
            num_threads=_number(status, "Threads"),
            cpu_s=(int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"),
        )


@dataclass(frozen=True, slots=True)
class Vitals:
    """A look at a server: at each of its processes, and at all engines together."""

    processes: dict[str, ProcessVitals]
    """By name: `server`, or `supervisor`, `frontend 0`, `core 0` and so on."""
    num_used_pages: int
    num_running: int
    num_waiting: int
    """Requests that are prepared, or being prepared."""

    @property
    def rss_bytes(self) -> int:
        return sum(process.rss_bytes for process in self.processes.values())

    @property
    def num_descriptors(self) -> int:
        return sum(process.num_descriptors for process in self.processes.values())

    @property
    def num_threads(self) -> int:
        return sum(process.num_threads for process in self.processes.values())

    @property
    def cpu_s(self) -> float:
        return sum(process.cpu_s for process in self.processes.values())


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the process that was started holds, after a collection of garbage: of several, the supervisor."""

    num_tasks: int
    """asyncio's tasks that have not ended."""
    objects: Counter[str]
    """Objects that the collector knows, by the name of their type."""


class WatchedServer:
    """`kestrel-grpc serve` as a child; `address` takes calls."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        line = self._answer()
        if " on " not in line:
            raise RuntimeError(f"the server did not start; {log} says why")
        self.address = line.split(" on ")[1].split()[0]
        self._metrics = f"{self._metrics_address()}/metrics"

    @property
    def pid(self) -> int:
        return self._process.pid

    def processes(self) -> dict[str, int]:
        """The process ids of the server by name, as `Vitals` has them."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        named = {_process_name(int(child)): int(child) for child in children}
        own = {name: pid for name, pid in named.items() if name is not None}
        return {"supervisor" if own else "server": self.pid, **own}

    def metrics(self) -> dict[str, float]:
        """Every series that the server has now."""
        return _read_metrics(self._metrics)

    def calls(self) -> Counter[str]:
        """How many gRPC calls have ended, by the name of the process that took them, as `Vitals` has it."""
        return _calls(self.metrics())

    def vitals(self) -> Vitals:
        """How the processes do now. One that has just ended is left out."""
        sums: defaultdict[str, float] = defaultdict(float)
        for series, value in self.metrics().items():
            sums[series.partition("{")[0]] += value  # engines in processes of their own have labels
        used, running, waiting, preprocessing = (int(sums[name]) for name in _GAUGES)
        processes: dict[str, ProcessVitals] = {}
        for name, pid in self.processes().items():
            with contextlib.suppress(OSError):
                processes[name] = ProcessVitals.of(pid)
        return Vitals(processes, used, running, waiting + preprocessing)

    def holdings(self) -> Holdings:
        """What it holds now; asking stops it for as long as a collection takes."""
        assert self._process.stdin is not None, "asked for a pipe"
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = json.loads(self._answer())
        return Holdings(found["tasks"], Counter(found["objects"]))

    def troubles(self) -> list[str]:
        """Lines of the log at the levels of warning and error."""
        return re.findall(r"^\S+ (?:WARNING|ERROR|CRITICAL) .*$", self._log.read_text(), re.MULTILINE)

    def stop(self) -> int:
        """SIGTERM, and the status that the process ends with; after a while it is killed."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_STOP_TIMEOUT_S)
        self._process.kill()
        return self._process.wait()

    def _metrics_address(self) -> str:
        """From the log, which a thread of the server writes."""
        end = time.monotonic() + _LOG_S
        while time.monotonic() < end:
            if found := re.search(r"metrics and probes(?: of all processes)? on (\S+)", self._log.read_text()):
                return found[1]
            time.sleep(0.01)
        raise RuntimeError(f"no port for metrics in {self._log}")

    def _answer(self) -> str:
        assert self._process.stdout is not None, "asked for a pipe"
        return self._process.stdout.readline()


@contextlib.contextmanager
def watched_server(log: Path, options: Sequence[str], tree: Path | None = None) -> Iterator[WatchedServer]:
    """Serve the built-in model, unless the options say otherwise, with metrics, and each call in the file `log`.

    With a `tree`, the code of that checkout is served instead of the code that runs.
    """
    module = "bench.harness.serving"
    ports = ("--port", "0", "--metrics-port", "0", "--withdrawal-delay", "0")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stderr:
        process = subprocess.Popen(
            (sys.executable, "-m", module, "serve", *ports, *options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=tree,
            env=_environment(tree),
        )
    with process:
        try:
            yield WatchedServer(process, log)
        finally:
            process.kill()  # without effect where it has ended


def _process_name(pid: int) -> str | None:
    """What `ps` shows of a front end or a core behind the name of the program; None of anything else."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return None
    program, _, name = title.strip().partition(" ")
    return name if program == "kestrel-grpc" and name else None


def _number(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
    assert found is not None, f"/proc says nothing of {name}"
    return int(found[1])


def _count_when_asked() -> None:
    # Without Python's own buffer, whose lock would be missed when the process ends.
    while os.read(0, 1):
        gc.collect()
        objects = gc.get_objects()
        # By type, because some objects do something when they are asked for their class.
        answer: dict[str, Any] = {
            "tasks": sum(issubclass(type(item), asyncio.Task) and not item.done() for item in objects),
            "objects": Counter(f"{type(item).__module__}.{type(item).__qualname__}" for item in objects),
        }
        del objects
        os.write(1, f"{json.dumps(answer)}\n".encode())


def _run() -> int:
    from kestrel_grpc.__main__ import main

    threading.Thread(target=_count_when_asked, daemon=True).start()
    return main()


if __name__ == "__main__":
    sys.exit(_run())
