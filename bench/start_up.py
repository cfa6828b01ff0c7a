"""How long does a start take, stage by stage, and does traffic right after it wait for what the start left out?

Starts the server with an empty folder of compiled kernels, and again with that folder. Stages are told from the
lines of its log. After each start each workload is asked for two windows, from the first request on: the 99th
percentile of the first should not be far above that of the second, and nothing should be compiled or captured.

    python -m bench.start_up --model /tmp/md3 -- --precision float8
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.harness.load import LoadProcesses
from bench.harness.output import write_json
from bench.harness.rounds import Load
from bench.harness.serving import WatchedServer, machine_facts, watched_server
from bench.harness.summary import summarise
from kestrel_grpc.cli.bench_numbers import Objective

STAGES = (
    ("imports, weights", "loaded "),
    ("kernels compiled and loaded", "kernels are compiled"),
    ("paths, largest step", "memory of "),
    ("key-value cache", "KV cache: "),
    ("graphs", "captured "),
    ("first requests", "warmed up "),
)
"""What lies before a line of the log, and how the message begins. A line that does not come has no stage."""
ROWS = "cached:64,direct:64,text:16"
_OBJECTIVE = Objective(first_token_ms=1000.0, per_token_ms=50.0)
_LINE = re.compile(r"^(\S+)Z INFO \S+ (.*)$", re.MULTILINE)


def stage_seconds(log: str, began: float, opened: float) -> dict[str, float]:
    """Seconds of each stage, from the start of the process at `began` to the open port, in time since the epoch."""
    found: dict[str, float] = {}
    before = began
    times = [(datetime.fromisoformat(f"{at}+00:00").timestamp(), message) for at, message in _LINE.findall(log)]
    for stage, beginning in STAGES:
        at = next((at for at, message in times if message.startswith(beginning)), None)
        if at is not None:
            found[stage], before = at - before, at
    return {**found, "port": opened - before, "all": opened - began}


def traffic(server: WatchedServer, loads: Sequence[Load], window_s: float) -> Iterator[dict[str, Any]]:
    """A row for each load: rates and 99th percentiles of the first window and of the one after it."""
    for load in loads:
        with LoadProcesses(server.address, 4, 64) as processes:
            rows = [
                summarise(
                    load.workload.name,
                    load.concurrency,
                    processes.closed(load.workload, load.concurrency, window_s, 0.0),
                    load.workload.num_tokens,
                    _OBJECTIVE,
                    is_open=False,
                )
                for _ in range(2)
            ]
        yield {
            "load": str(load),
            "requests/s": [row.requests_per_s for row in rows],
            "p99 ms": [row.total_ms["p99"] for row in rows],
            "errors": sum(sum(row.errors.values()) for row in rows),
        }


def one_start(arguments: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Start, ask, and stop."""
    began = time.time()
    options = ("--model", arguments.model, "--log-level", "info", *arguments.server_options)
    with watched_server(log, options) as server:
        stages = stage_seconds(log.read_text(), began, time.time())
        print("  ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages.items()), flush=True)
        rows: list[dict[str, Any]] = []
        for row in traffic(server, [Load.of(text) for text in arguments.rows.split(",")], arguments.seconds):
            first, second = row["p99 ms"]
            rates = " and ".join(f"{rate:.1f}" for rate in row["requests/s"])
            print(f"{row['load']}: {rates} requests/s, p99 {first:.0f} and {second:.0f} ms", flush=True)
            rows.append(row)
        stalls = {name: value for name, value in server.metrics().items() if "engine_stalls_total" in name}
        print(f"stalls {stalls}", flush=True)
        server.stop()
    return {"stages, s": stages, "rows": rows, "stalls": stalls}


def main() -> int:
    """Measure, print and write; 1 where a request waited for a compilation or a capture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model; its answers must never end early")
    parser.add_argument("--rows", default=ROWS, help="workload:requests at once, … (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each of two windows (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("bench/out/start_up.json"), help="default: %(default)s")
    parser.add_argument("server_options", nargs="*", metavar="-- OPTION", help="options of `kestrel-grpc serve`")
    arguments = parser.parse_args()
    starts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "kernels")
        for name in ("first", "again"):
            print(f"== {name} start", flush=True)
            starts[name] = one_start(arguments, Path(folder) / f"{name}.log")
    options = {"model": arguments.model, "options": arguments.server_options}
    write_json(arguments.json, {"machine": machine_facts(), **options, "starts": starts})
    return int(any(value for start in starts.values() for value in start["stalls"].values()))


if __name__ == "__main__":
    sys.exit(main())
