"""The command `kestrel-grpc serve` with several processes, seen from outside: lines, processes and ports."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests import warm
from tests.journey.serving_process import FEW_PAGES

MAX_WAIT_S = 120.0
_OPTIONS = ("--port", "0", "--metrics-port", "0", "--withdrawal-delay", "0", "--log-format", "json", *FEW_PAGES)


class HostProcess:
    """A server that starts or runs. Its log is JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        """The log."""
        self.complaints: list[str] = []
        """Other lines of standard error."""
        self._news = threading.Condition()
        self._announced: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_log, daemon=True),
            threading.Thread(target=self._read_output, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def address(self) -> str:
        """Of gRPC; waits for the line that says it."""
        return self._announced_address("kestrel-grpc serves")

    @property
    def http_address(self) -> str:
        return self._announced_address("HTTP is served")

    @property
    def machine_address(self) -> str:
        """Of metrics and probes."""
        return str(self.wait_for("metrics and probes of all processes")["message"]).rsplit(" ", 1)[1]

    def wait_for(self, text: str) -> dict[str, Any]:
        """The first line of the log whose message contains a text; waits for it."""

        def find() -> dict[str, Any] | None:
            return next((line for line in self.lines if text in line["message"]), None)

        with self._news:
            assert self._news.wait_for(find, MAX_WAIT_S), f"{text!r} is not in the log: {self.lines}"
            found = find()
        assert found is not None
        return found

    def wait_for_each(self, text: str, processes: Iterable[str], *, behind: int) -> None:
        """Waits until each process has logged a line that contains a text, not among the first `behind`."""

        def have_all() -> bool:
            return {line["process"] for line in self.lines[behind:] if text in line["message"]} >= {*processes}

        with self._news:
            assert self._news.wait_for(have_all, MAX_WAIT_S), f"{text!r} is not in the log of each: {self.lines}"

    def processes(self) -> dict[str, int]:
        """Process ids by the titles that `ps` shows: the supervisor and its children, but for `tests.warm`."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = {_title(pid): pid for pid in (self.process.pid, *map(int, children))}
        return {title: pid for title, pid in found.items() if title != warm.TITLE}

    def kill(self, title: str) -> int:
        """Send SIGKILL to the process with this title; returns its id."""
        pid = self.processes()[title]
        os.kill(pid, signal.SIGKILL)
        return pid

    def metrics(self) -> dict[str, Metric]:
        """What the metrics port answers, by name."""
        return {item.name: item for item in text_string_to_metric_families(self.get("/metrics"))}

    def get(self, path: str) -> str:
        """The body of an answer of the metrics port. Raises `HTTPError`."""
        with urllib.request.urlopen(self.machine_address + path, timeout=MAX_WAIT_S) as answer:
            return answer.read().decode()

    def end(self) -> int:
        """SIGTERM; returns the exit status."""
        self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        """The exit status, once it has ended and all that was written is read."""
        status = self.process.wait(MAX_WAIT_S)
        for reader in self._readers:
            reader.join(MAX_WAIT_S)
        return status

    def _announced_address(self, text: str) -> str:
        def find() -> str | None:
            return next((line for line in self._announced if line.startswith(text)), None)

        with self._news:
            assert self._news.wait_for(find, MAX_WAIT_S), (
                f"the server did not start: {self.lines} {self.complaints}"
            )
            found = re.search(r" on (\S+)", find() or "")
        assert found is not None
        return found[1]

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                if line.startswith("{"):
                    self.lines.append(json.loads(line))
                else:
                    self.complaints.append(line.rstrip("\n"))
                self._news.notify_all()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._announced.append(json.loads(line)["message"])
                self._news.notify_all()


@contextmanager
def host_process(*options: str, program: str = "", in_own_group: bool = False) -> Iterator[HostProcess]:
    """Run the built-in model. What still runs at the end is killed.

    `program` is Python code that runs before the command.
    """
    start = f"{program}\nimport sys\nfrom kestrel_grpc.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    command = (sys.executable, "-c", start, "serve", *_OPTIONS, *options)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=in_own_group
    ) as process:
        host = HostProcess(process)
        try:
            yield host
        finally:
            if process.poll() is None:
                own = host.processes()
                for pid in own.values():
                    os.kill(pid, signal.SIGKILL)
            host.wait()


def samples_by_process(metric: Metric, suffix: str = "") -> dict[str, float]:
    """The sum of a metric's samples for each process or engine."""
    sums: defaultdict[str, float] = defaultdict(float)
    for sample in metric.samples:
        if sample.name.endswith(suffix):
            sums[sample.labels.get("process") or f"engine-{sample.labels['engine']}"] += sample.value
    return dict(sums)


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0 ").replace("\0", " ")
