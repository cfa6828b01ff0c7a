"""Servers as processes on ports that they keep, and Envoy in front of them."""

import asyncio
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from bench.harness.envoy import Envoy, envoy
from tests.reference_fixtures import CHECKOUT

MAX_WAIT_S = 180.0
_PORT_OF_ANY = 0


class Host:
    """A fake server that can be killed, stopped and started again. Every answer of it is its name."""

    def __init__(self, name: str, news: threading.Condition) -> None:
        """`news` is notified of what its process prints."""
        self.name = name
        self.port = _PORT_OF_ANY
        self.asked: Counter[str] = Counter()
        """How often it has been asked each question."""
        self._news = news
        self._is_serving = False
        self.begin()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def begin(self) -> None:
        """Start a process; `wait_until_serving` waits for its port."""
        self._is_serving = False
        command = (sys.executable, "-m", "tests.scale.fake_server", self.name, str(self.port))
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def wait_until_serving(self) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self._is_serving, MAX_WAIT_S), f"{self.name} did not start"

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def release(self) -> None:
        """Let everything go on that it holds, now and later."""
        self.send(signal.SIGUSR1)

    async def ended(self) -> int:
        """Its exit status, once it has ended."""
        return await asyncio.to_thread(self._process.wait, MAX_WAIT_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(MAX_WAIT_S)
        self._reader.join(MAX_WAIT_S)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                with self._news:
                    if line.startswith("asked "):
                        self.asked[line.removeprefix("asked ").rstrip("\n")] += 1
                    elif line.startswith("kestrel-grpc serves"):
                        self.port = int(line.split(" on ")[1].split()[0].rpartition(":")[2])
                        self._is_serving = True
                    self._news.notify_all()


class Hosts:
    """Several of them, and Envoy."""

    def __init__(self, hosts: Sequence[Host], envoy: Envoy, news: threading.Condition) -> None:
        self.by_name = {host.name: host for host in hosts}
        self.envoy = envoy
        self._news = news

    def others(self, host: Host) -> list[Host]:
        return [other for other in self.by_name.values() if other is not host]

    async def asked(self, question: str, number: int) -> dict[str, int]:
        """How often each was asked a question, once that is so often in all; begins to count anew."""

        def wait() -> dict[str, int]:
            hosts = self.by_name.values()
            with self._news:
                assert self._news.wait_for(
                    lambda: sum(host.asked[question] for host in hosts) >= number, MAX_WAIT_S
                ), f"{question!r} did not come"
                return {host.name: host.asked.pop(question, 0) for host in hosts}

        return await asyncio.to_thread(wait)

    def wait_until_all_serve(self) -> None:
        self.envoy.wait_for(host.address for host in self.by_name.values())

    async def renew(self, host: Host) -> None:
        """Replace a process that has ended or holds nothing back any longer, and wait until it gets calls."""
        await asyncio.to_thread(self._renew, host)

    def _renew(self, host: Host) -> None:
        host.kill()
        host.begin()
        host.wait_until_serving()
        self.wait_until_all_serve()


@contextmanager
def serving_hosts(names: str, folder: Path) -> Iterator[Hosts]:
    """A server for each letter of `names`, behind an Envoy that waits for as long as a busy machine may need."""
    news = threading.Condition()
    hosts = [Host(name, news) for name in names]
    try:
        for host in hosts:
            host.wait_until_serving()
        with envoy([host.address for host in hosts], folder, _with_times("20s", "20s", "20s")) as balancer:
            yield Hosts(hosts, balancer, news)
    finally:
        for host in hosts:
            host.kill()


@contextmanager
def impatient_envoy(hosts: Hosts, folder: Path) -> Iterator[Envoy]:
    """Another Envoy in front of the same servers, which finds within a few seconds that one of them hangs."""
    addresses = [host.address for host in hosts.by_name.values()]
    with envoy(addresses, folder, _with_times("2s", "2s", "2s")) as balancer:
        yield balancer


@contextmanager
def weighing_envoy(hosts: Hosts, folder: Path) -> Iterator[Envoy]:
    """Another Envoy in front of the same servers, which weighs them by their load reports and keeps the reports."""
    addresses = [host.address for host in hosts.by_name.values()]
    be_patient = _with_times("20s", "20s", "20s")

    def change(configuration: dict[str, Any]) -> None:
        be_patient(configuration)
        weigh_servers(configuration)

    with envoy(addresses, folder, change) as balancer:
        yield balancer


def documented() -> list[Any]:
    """The parts of configurations of Envoy in docs/operation.md."""
    page = (CHECKOUT / "docs" / "operation.md").read_text(encoding="utf-8")
    section = page.partition("\n## Several hosts\n")[2].partition("\n## ")[0]
    return [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)]


def weigh_servers(configuration: dict[str, Any]) -> None:
    """Change the configuration as the documentation says about load reports."""
    resources = configuration["static_resources"]
    (policy,) = (found for found in documented() if "load_balancing_policy" in found)
    (filter_,) = (found for found in documented() if "header_mutation" in found.get("name", ""))
    (cluster,) = (cluster for cluster in resources["clusters"] if cluster["name"] == "kestrel")
    del cluster["lb_policy"]
    cluster |= policy
    resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"].insert(-1, filter_)


def _with_times(check_timeout: str, ping_interval: str, ping_timeout: str) -> Callable[[dict[str, Any]], None]:
    def change(configuration: dict[str, Any]) -> None:
        for cluster in configuration["static_resources"]["clusters"]:
            (check,) = cluster["health_checks"]
            check["timeout"] = check_timeout
            (options,) = cluster["typed_extension_protocol_options"].values()
            http2 = options["explicit_http_config"]["http2_protocol_options"]
            http2["connection_keepalive"] = {"interval": ping_interval, "timeout": ping_timeout}

    return change
