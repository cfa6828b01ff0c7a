"""How long does a start take, stage by stage, and does traffic right after it wait for what the start left out?

Starts the server with an empty folder of compiled kernels, and again with that folder. Stages follow from the lines
of its log. The start ends when 64 requests at once, sent the moment the port opens, are answered at the rate that
the server has later: `until full rate` is the moment from which answers at the later rate would have been as many
as came. The later rate is measured after a quiet time, in which the server may capture what it has left out.

The load goes on for two windows, and so do other workloads after it: the rate of the first should be that of the
second, and nothing should be compiled or captured while requests wait. With `--before` another checkout is started
in turns with this one, each with a folder of kernels of its own.

    python -m bench.start_up --model /tmp/md3 --before /tmp/older -- --precision float8
"""

import argparse
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.harness.load import LoadProcesses
from bench.harness.output import parser_of, write_json
from bench.harness.rounds import Load
from bench.harness.serving import WatchedServer, machine_facts, watched_server
from bench.harness.summary import summarise
from kestrel_grpc.cli.bench.numbers import Objective

STAGES = (
    ("imports, weights", "loaded "),
    ("kernels compiled and loaded", "kernels are compiled"),
    ("paths, largest step", "memory of "),
    ("key-value cache", "KV cache: "),
    ("graphs", "captured "),
    ("first requests", "warmed up "),
)
"""Names what lies before a line of the log, and how its message begins. A line that does not come has no stage.
What ran in parallel with the stage before counts there."""
ROWS = "cached:64,text:16"
FIRST_LOAD = "direct:64"
_PROCESSES, _PICTURES = 4, 64
_OBJECTIVE = Objective(first_token_ms=1000.0, per_token_ms=50.0)
_LINE = re.compile(r"^(\S+)Z INFO (?:\S+ )?kestrel\S+ (.*)$", re.MULTILINE)


def stage_seconds(log: str, began: float, opened: float) -> dict[str, float]:
    """Seconds of each stage, from the start of the process at `began` to the open port, in time since the epoch."""
    found: dict[str, float] = {}
    before = began
    times = [(datetime.fromisoformat(f"{at}+00:00").timestamp(), message) for at, message in _LINE.findall(log)]
    for stage, beginning in STAGES:
        at = next((at for at, message in times if message.startswith(beginning)), None)
        if at is not None:
            found[stage], before = max(0.0, at - before), max(before, at)
    return {**found, "port": opened - before, "all": opened - began}


def full_rate_s(num_answers: int, duration_s: float, later_rate: float) -> float:
    """Seconds from the begin of a time with so many answers until answers at the later rate would have begun."""
    return duration_s - num_answers / later_rate


def first_traffic(processes: LoadProcesses, load: Load, window_s: float, quiet_s: float) -> dict[str, Any]:
    """The load from the moment that the port opens, for two windows, and its rate after a quiet time."""
    opened = time.perf_counter()
    window = processes.closed(load.workload, load.concurrency, 2 * window_s, 0.0)
    time.sleep(quiet_s)
    later = processes.closed(load.workload, load.concurrency, 2 * window_s, window_s)
    ended = sorted(sample.ended for sample in window.samples if sample.ended <= window.window.end)
    later_ended = [sample.ended for sample in later.samples]
    begin, end = later.window.start, later.window.end
    rate = sum(begin <= moment <= end for moment in later_ended) / (end - begin)
    middle = opened + (window.window.end - opened) / 2
    halves = [
        sum(begin < moment <= end for moment in ended) / (end - begin)
        for begin, end in ((opened, middle), (middle, window.window.end))
    ]
    return {
        "load": str(load),
        "until full rate, s": full_rate_s(len(ended), window.window.end - opened, rate),
        "first answer, s": ended[0] - opened if ended else None,
        "requests/s, first and next": halves,
        "requests/s, later": rate,
        "errors": sum(bool(sample.error) for sample in (*window.samples, *later.samples)),
    }


def traffic(server: WatchedServer, loads: Sequence[Load], window_s: float) -> Iterator[dict[str, Any]]:
    """A row for each load: rates and 99th percentiles of the first window and of the one after it."""
    for load in loads:
        with LoadProcesses(server.address, _PROCESSES, _PICTURES) as processes:
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


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def one_start(arguments: argparse.Namespace, log: Path, tree: Path | None, rows: Sequence[Load]) -> dict[str, Any]:
    """Start, ask, and stop."""
    # Known before the start, so that those who ask are ready when it ends.
    port = _free_port()
    options = ("--model", arguments.model, "--log-level", "info", "--port", str(port), *arguments.server_options)
    with LoadProcesses(f"127.0.0.1:{port}", _PROCESSES, _PICTURES) as processes:
        began = time.time()
        with watched_server(log, options, tree) as server:
            opened = time.time()
            first = first_traffic(processes, Load.of(FIRST_LOAD), arguments.seconds, arguments.quiet)
            first["until full rate, s"] += opened - began
            stages = stage_seconds(log.read_text(), began, opened)
            print("  ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages.items()), flush=True)
            print("  ".join(f"{name} {_text(value)}" for name, value in first.items()), flush=True)
            found: list[dict[str, Any]] = []
            for row in traffic(server, rows, arguments.seconds):
                this, that = row["p99 ms"]
                rates = " and ".join(f"{rate:.1f}" for rate in row["requests/s"])
                print(f"{row['load']}: {rates} requests/s, p99 {this:.0f} and {that:.0f} ms", flush=True)
                found.append(row)
            stalls = {name: value for name, value in server.metrics().items() if "engine_stalls_total" in name}
            print(f"stalls {stalls}", flush=True)
            server.stop()
    return {"stages, s": stages, "first traffic": first, "rows": found, "stalls": stalls}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(map(_text, value))
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> int:
    """Measure, print and write; 1 where a request waited for a compilation or a capture."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="folder of the model; its answers must never end early")
    parser.add_argument("--before", type=Path, help="an older checkout, which is started in turns with this one")
    parser.add_argument("--again", type=int, default=1, help="starts after the first one (default: %(default)s)")
    parser.add_argument("--rows", default=ROWS, help="workload:requests at once, … (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each of two windows (default: %(default)s)")
    parser.add_argument(
        "--quiet",
        type=float,
        default=4.0,
        help="seconds without requests before the later rate (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, default=Path("bench/out/start_up.json"), help="default: %(default)s")
    parser.add_argument("server_options", nargs="*", metavar="-- OPTION", help="options of `kestrel-grpc serve`")
    arguments = parser.parse_args()
    trees = {"after": None} if arguments.before is None else {"before": arguments.before, "after": None}
    loads = [Load.of(text) for text in arguments.rows.split(",") if text]
    starts: dict[str, list[dict[str, Any]]] = {tree: [] for tree in trees}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 + arguments.again):
            for name, tree in trees.items():
                os.environ["TRITON_CACHE_DIR"] = str(Path(folder, name, "kernels"))
                print(f"== {name}: {'again' if number else 'first'}", flush=True)
                log = Path(folder, f"{name}-{number}.log")
                rows = loads if number == arguments.again else []
                starts[name].append(one_start(arguments, log, tree, rows))
                options = {"model": arguments.model, "options": arguments.server_options}
                write_json(arguments.json, {"machine": machine_facts(), **options, "starts": starts})
    every = [start for own in starts.values() for start in own]
    return int(any(value for start in every for value in start["stalls"].values()))


if __name__ == "__main__":
    sys.exit(main())
