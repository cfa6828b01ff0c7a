"""Real servers of a capacity that is stated (`delayed_server.py`), behind Envoy, measured for `bench.capacity`."""

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness.envoy import envoy
from bench.harness.load import LoadProcesses
from bench.harness.output import Progress, write_json
from bench.harness.queueing import Curve, Mix, distinct_servers
from bench.harness.serving import machine_facts
from bench.harness.summary import Row, summarise
from bench.harness.workload import WORKLOADS
from kestrel_grpc.cli.bench.numbers import Objective

FACTOR = 50
"""Of the time of a GPU: two processors then hold four servers, Envoy and the load, also beside other work."""
SERVERS = (1, 2, 4)
AT_ONCE = (1, 2, 4, 8, 16)
QUESTIONS = WORKLOADS["returning-5"].num_questions
_LOADS = (
    ("direct", "fewer requests of two", 0.85),
    ("returning-5", "by image, 400%", 0.85),
    ("returning-5", "by image, 150%", 0.85),
    ("returning-5", "random", 0.85),
)
"""Workload, routing, and the share of the rate that the servers can answer by the model."""
_OF_SEVERAL = ("random", "by image, 150%")
"""Routes that differ from others only where there are several servers."""
_NUM_PICTURES = 16
_ROW_GAP = 1_000_000
"""Between the numbers of the first requests of two rows, so that no picture of a row is known from another."""
_MAX_WAIT_S = 60.0


def measure(file: Path, window_s: float) -> dict[str, Any]:
    """The curves of one server, and the open loop on 1, 2 and 4; left in a file as well."""
    loads = [
        (workload, route, share, num_servers)
        for num_servers in SERVERS
        for workload, route, share in _LOADS
        if num_servers > 1 or route not in _OF_SEVERAL
    ]
    progress = Progress(2 * len(AT_ONCE) + len(loads))
    rates: dict[str, dict[str, float]] = {"direct": {}, "cached": {}}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_server()) for _ in range(max(SERVERS))]
        with LoadProcesses(servers[0], 1, _NUM_PICTURES) as load:
            for name, found in rates.items():
                for at_once in AT_ONCE:
                    recording = load.closed(WORKLOADS[name], at_once, max(window_s / 3, 6.0), _MAX_WAIT_S)
                    row = summarise(name, at_once, recording, 3, Objective(), is_open=False)
                    found[str(at_once)] = row.requests_per_s
                    progress.end(f"{name}, {at_once} at once: {row.requests_per_s:.1f} requests/s")
        direct, cached = (Curve.of_rates({int(n): rate for n, rate in found.items()}) for found in rates.values())
        rows: list[dict[str, Any]] = []
        for workload, route, share, num_servers in loads:
            spread = num_servers if route == "random" else 1
            new_share = distinct_servers(QUESTIONS, spread) / QUESTIONS if workload != "direct" else 1.0
            most_per_s = Mix(((new_share, direct), (1 - new_share, cached))).most_per_s
            first = (1 + len(rows)) * _ROW_GAP
            row = _open(servers[:num_servers], workload, route, share * num_servers * most_per_s, window_s, first)
            rows.append({"servers": num_servers, "route": route, "first_number": first, **_facts(row)})
            progress.end(f"{num_servers} servers, {workload}, {route}")
    progress.close()
    result = {"machine": machine_facts(), "factor": FACTOR, "curves": rates, "rows": rows}
    write_json(file, result)
    return result


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """The address of one in a process of its own."""
    command = (sys.executable, "-m", "bench.harness.delayed_server", str(FACTOR))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "asked for a pipe"
        try:
            line = process.stdout.readline()
            if " on " not in line:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            yield line.split(" on ")[1].split()[0]
        finally:
            process.kill()


def _open(
    addresses: list[str], workload: str, route: str, rate_per_s: float, window_s: float, first_number: int
) -> Row:
    is_by_image, bound = route.startswith("by image"), re.search(r"(\d+)%", route)

    def change(configuration: dict[str, Any]) -> None:
        for cluster in configuration["static_resources"]["clusters"]:
            if route == "random" and cluster["name"] == "kestrel":
                cluster["lb_policy"] = "RANDOM"
            if bound is not None and cluster["name"] == "kestrel-images":
                consistent = cluster["common_lb_config"]["consistent_hashing_lb_config"]
                consistent["hash_balance_factor"] = int(bound[1])

    with (
        tempfile.TemporaryDirectory() as folder,
        envoy(addresses, Path(folder), change) as balancer,
        LoadProcesses(balancer.address, 1, _NUM_PICTURES, (), first_number, names_images=is_by_image) as load,
    ):
        recording = load.open(WORKLOADS[workload], rate_per_s, window_s, _MAX_WAIT_S)
    return summarise(workload, rate_per_s, recording, 3, Objective(), is_open=True)


def _facts(row: Row) -> dict[str, Any]:
    facts = row.as_json()
    if facts["errors"]:
        raise RuntimeError(f"requests failed: {facts['errors']}")
    names = ("workload", "window_s", "num_requests", "total_ms", "hit_share", "busiest_client", "client_lag_ms")
    return {"sent_per_s": row.load, **{name: facts[name] for name in names}}
