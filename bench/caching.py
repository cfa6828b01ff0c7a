"""What do the caches bring? One server for each setting of them, loaded in turns with pictures that come again.

Rows are workloads of `workload.py` at a number of requests at once: `cached` asks about one picture again and
again, `repeats-50` shows in half of its requests one of 1,000 popular pictures (by Zipf's law) and in the others
pictures that never come again. Each value is the median over the rounds; the share of hits is that of the last
round, since a cache fills up in the course of a run.

    python -m bench.caching --model /tmp/md2 -- --kv-pages 12000
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from bench.harness.load import LoadProcesses
from bench.harness.progress import Progress
from bench.harness.report import write_json
from bench.harness.rounds import Load, ask_once, rounds
from bench.harness.serving import machine_facts, started_server
from bench.harness.summary import Row

ROWS = "cached:1,cached:64,repeats-0:64,repeats-50:64,repeats-90:64"
VARIANTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "both": (),
        "prefixes": ("--image-cache-bytes", "0"),
        "embeddings": ("--prefix-cache", "off"),
        "neither": ("--prefix-cache", "off", "--image-cache-bytes", "0"),
    }
)
"""Options of the server by name."""


def as_text(results: Sequence[tuple[Load, Mapping[str, Sequence[Row]]]]) -> str:
    """A Markdown table."""
    lines = ["| load | caches | requests/s | p50 ms | p99 ms | hits |", "|---|---|---|---|---|---|"]
    for load, by_name in results:
        for name, rows in by_name.items():
            rate, p50, p99 = (
                statistics.median(values)
                for values in zip(
                    *((row.requests_per_s, row.total_ms["p50"], row.total_ms["p99"]) for row in rows), strict=True
                )
            )
            cells = (
                str(load),
                name,
                f"{rate:,.1f}",
                f"{p50:.2f}",
                f"{p99:.2f}",
                f"{100 * rows[-1].hit_share:.0f}%",
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--model", required=True, help="folder of the model; its answers must never end early")
    result.add_argument("--rows", default=ROWS, help="workload:requests at once, … (default: %(default)s)")
    result.add_argument(
        "--variants", default=",".join(VARIANTS), help="settings of the caches (default: %(default)s)"
    )
    result.add_argument("--rounds", type=int, default=3, help="turns of each server (default: %(default)s)")
    result.add_argument("--seconds", type=float, default=4.0, help="length of each window (default: %(default)s)")
    result.add_argument(
        "--warm-up", type=float, default=2.0, help="before each window, at most (default: %(default)s)"
    )
    result.add_argument("--pictures", type=int, default=128, help="drawings to make (default: %(default)s)")
    result.add_argument(
        "--processes", type=int, default=4, help="load processes of each server (default: %(default)s)"
    )
    result.add_argument("--json", type=Path, default=Path("bench/out/caching.json"), help="default: %(default)s")
    result.add_argument("server_options", nargs="*", metavar="-- OPTION", help="options of all servers")
    return result


def main() -> int:
    """Measure, print and write."""
    arguments = parser().parse_args()
    loads = [Load.of(text) for text in arguments.rows.split(",")]
    names = arguments.variants.split(",")
    most = max(load.concurrency for load in loads)
    options = ("--model", arguments.model, "--max-batch-size", str(most), *arguments.server_options)
    results: list[tuple[Load, dict[str, list[Row]]]] = []
    with contextlib.ExitStack() as stack:
        processes: dict[str, LoadProcesses] = {}
        for name in names:
            server = stack.enter_context(started_server((*options, *VARIANTS[name])))
            print(f"{name}: {server.address} after {server.ready_s:.1f} s", flush=True)
            processes[name] = stack.enter_context(
                LoadProcesses(server.address, arguments.processes, arguments.pictures)
            )
        progress = Progress(len(loads))
        for load in loads:
            ask_once(load, processes)
            found: dict[str, list[Row]] = {name: [] for name in processes}
            for name, row in rounds(load, processes, arguments.rounds, arguments.seconds, arguments.warm_up):
                found[name].append(row)
            results.append((load, found))
            progress.end(str(load))
            rows = {
                f"{done.workload.name}:{done.concurrency}": {
                    name: [row.as_json() for row in rows] for name, rows in by_name.items()
                }
                for done, by_name in results
            }
            variants = {name: list(VARIANTS[name]) for name in names}
            facts = {"machine": machine_facts(), "options": list(options), "variants": variants}
            write_json(arguments.json, facts | {"rows": rows})
        progress.close()
    print(as_text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
