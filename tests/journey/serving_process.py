"""The command `kestrel-grpc serve` in a process of its own, and a look at that process from outside."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FEW_PAGES = ("--kv-pages", "512")
"""For servers of the built-in model, which take 2,048 by default: to allocate those is a quarter of a start."""
_COMMAND = (sys.executable, "-m", "kestrel_grpc", "serve", "--port", "0", "--withdrawal-delay", "0", *FEW_PAGES)


@dataclass(frozen=True)
class ServingProcess:
    """A server that runs, seen through /proc."""

    pid: int
    address: str

    @property
    def rss_bytes(self) -> int:
        """Memory in use."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_s(self) -> float:
        """Processor time spent so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def num_descriptors(self) -> int:
        """Open files and sockets."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@contextmanager
def serving_process(*options: str, env: Mapping[str, str] | None = None) -> Iterator[ServingProcess]:
    """Run the built-in model, unless the options say otherwise; the server must end with success."""
    command = (*_COMMAND, "--log-level", "error", *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert " on " in line, "the server did not start"
            yield ServingProcess(process.pid, line.split(" on ")[1].split()[0])
        finally:
            process.terminate()
    assert process.returncode == 0
