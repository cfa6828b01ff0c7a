"""The server that is attacked: a process started as a user would, with tokens, and its memory from /proc."""

import contextlib
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kestrel_grpc.access.token_file import Scope, line_for, new_secret

_EVERY_S = 0.025
# Looking for children costs more than reading a number, and they come seldom.
_CHILDREN_EVERY = 10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Every request fills the cache of keys and values. It has a fixed size, so memory that grows is due to an attack.
_OPTIONS = ("--port", "0", "--kv-pages", "1024", "--withdrawal-delay", "0", "--drain-timeout", "5")


class Target:
    """A server that runs. Belongs to one thread; another of its own watches the memory."""

    def __init__(
        self, process: subprocess.Popen[str], address: str, http_port: int, tokens: dict[str, str], log: Path
    ) -> None:
        self.address = address
        self.http_port = http_port
        self.tokens = tokens
        """By name: `alice` is the legitimate caller's, `mallory` the attacker's."""
        self.end_s: float | None = None
        self.exit_status: int | None = None
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        """What it has logged so far."""
        return self._log.read_text(errors="replace")

    def log_bytes(self) -> int:
        """How much it has logged so far."""
        return self._log.stat().st_size

    def terminate(self, timeout_s: float) -> None:
        """SIGTERM; sets `end_s` and `exit_status`. After `timeout_s` it is killed, and `end_s` stays None."""
        began = time.monotonic()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
                self.end_s = time.monotonic() - began
            except subprocess.TimeoutExpired:
                kill_tree(self.pid)
        self.exit_status = self._process.wait()


@contextlib.contextmanager
def started_target(
    folder: Path, options: Sequence[str], num_descriptors: int | None, *, attacker_is_operator: bool = False
) -> Iterator[Target]:
    """The built-in model behind tokens, with these options besides; its log is in the folder. Killed in the end."""
    tokens = {name: new_secret() for name in ("alice", "mallory")}
    usual = frozenset((Scope.INFER, Scope.IMAGES))
    scopes = {"alice": usual, "mallory": usual | {Scope.ADMIN} if attacker_is_operator else usual}
    file, log = folder / "tokens.toml", folder / "server.log"
    file.write_text("".join(f"{line_for(name, secret, scopes[name])}\n" for name, secret in tokens.items()))
    command = (sys.executable, "-m", "kestrel_grpc", "serve", "--tokens", str(file), *_OPTIONS, *options)
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, preexec_fn=_limiting(num_descriptors)
        )
    with process:
        try:
            assert process.stdout is not None, "asked for a pipe"
            found = re.search(r" on (\S+) ", process.stdout.readline())
            if found is None:
                raise RuntimeError(f"the server did not start: {log.read_text()}")
            http_port = 0
            if "--http-port" in options:
                http_port = int(process.stdout.readline().rsplit(":", 1)[1])
            yield Target(process, found[1], http_port, tokens, log)
        finally:
            # Of a process that was waited for, another may bear the number by now.
            if process.poll() is None:
                kill_tree(process.pid)


def _limiting(num_descriptors: int | None) -> Callable[[], None] | None:
    if num_descriptors is None:
        return None
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (num_descriptors, num_descriptors))


class MemoryWatch:
    """Samples the resident memory of a process and all its children, and kills them above a limit."""

    def __init__(self, pid: int, limit_bytes: int) -> None:
        self.was_killed = False
        self._pid = pid
        self._limit_bytes = limit_bytes
        self._peak_bytes = 0
        # The kernel's own record of the most there was begins anew.
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def peak_bytes(self) -> int:
        """The most there was since the watch began; of the process itself also between two looks."""
        return max(self._peak_bytes, _high_water_bytes(self._pid))

    def stop(self) -> None:
        """Look no more."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        pids = [self._pid]
        number = 0
        while not self._is_over.wait(_EVERY_S):
            if number % _CHILDREN_EVERY == 0:
                pids = tree_of(self._pid)
            number += 1
            now_bytes = sum(map(_rss_bytes, pids))
            self._peak_bytes = max(self._peak_bytes, now_bytes)
            if now_bytes > self._limit_bytes:
                self.was_killed = True
                kill_tree(self._pid)
                return


def resident_bytes(pid: int) -> int:
    """Of a process and all its children, now."""
    return sum(map(_rss_bytes, tree_of(pid)))


def tree_of(pid: int) -> list[int]:
    """A process and its children, and theirs."""
    found = [pid]
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                for child in path.read_text().split():
                    found += tree_of(int(child))
    return found


def kill_tree(pid: int) -> None:
    """End a process and its children at once. Without effect where they have ended."""
    for process in tree_of(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, 9)


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _high_water_bytes(pid: int) -> int:
    try:
        found = re.search(r"^VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0
