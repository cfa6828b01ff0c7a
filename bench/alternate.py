"""Is one checkout slower than another? Serves both at once on one device and loads them in turns: A B B A A B.

The servers idle while the other is loaded, so that they share the machine's state but not its time, and no start or
compilation lies between two measurements. Each row is a workload of `workload.py` at a number of requests at once.
The ratio of a row is the median over the rounds of the second tree's value over the first tree's in the same round;
the spread is the largest deviation of a round's ratio from it. Beside them stand the geometric mean of the ratios
and twice its standard error. `text` rows time decode steps, in ms per token.

What differs from one start to the next, such as the choice of kernels or which front end gets a connection, is in
no spread: `--starts` starts both servers several times, in turns, and counts the rounds of all together, and
`--connections` gives each load process many connections, which spread evenly over front ends.

    python -m bench.alternate --before /tmp/before --model /tmp/md2 -- --kv-pages 12000
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.harness.load import LoadProcesses
from bench.harness.output import Progress, parser_of, write_json
from bench.harness.rounds import Load, ask_once, rounds
from bench.harness.serving import CropCount, RunningServer, machine_facts, started_server
from bench.harness.summary import Row

ROWS = "direct:64,cot:64,long:64,direct:1,text:1,text:64"


def measure_of(load: Load) -> str:
    """What is compared: times where requests run alone and for steps of text, else rates."""
    if load.workload.name == "text":
        return "ms/token"
    return "p50 ms" if load.concurrency == 1 else "requests/s"


def value_of(row: Row, measure: str) -> float:
    """A measure of a row."""
    if measure == "ms/token":
        return row.per_token_ms["p50"]
    return row.total_ms["p50"] if measure == "p50 ms" else row.requests_per_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """One load on both trees, round by round."""

    name: str
    measure: str
    first: tuple[float, ...]
    second: tuple[float, ...]
    encoded_crops: tuple[float | None, float | None] = (None, None)
    """Crops that each tree encoded for a picture, warming up included; None where it does not count them."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """The second over the first, by round."""
        return tuple(b / a for a, b in zip(self.first, self.second, strict=True))

    @property
    def ratio(self) -> float:
        """Their median."""
        return statistics.median(self.ratios)

    @property
    def mean_ratio(self) -> float:
        """Their geometric mean."""
        return statistics.geometric_mean(self.ratios)

    @property
    def error(self) -> float:
        """Twice the standard error of the logarithm of the mean: about 95% of such intervals have the true ratio.
        0 for a single round."""
        logs = [math.log(ratio) for ratio in self.ratios]
        return 2 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0

    @property
    def slowdown(self) -> float:
        """How much more time the second takes: 0.03 is three percent slower, below 0 is faster."""
        return 1 / self.ratio - 1 if self.measure == "requests/s" else self.ratio - 1

    @property
    def spread(self) -> float:
        """The largest deviation of a round's ratio from the median."""
        return max(abs(ratio - self.ratio) for ratio in self.ratios)

    def and_later(self, later: Comparison) -> Comparison:
        """Returns the rounds of this start and of a later one."""
        rounds = self.first + later.first, self.second + later.second
        return replace(later, first=rounds[0], second=rounds[1])


def measure(
    loads: Sequence[Load],
    processes: Mapping[str, LoadProcesses],
    num_rounds: int,
    window_s: float,
    warm_up_s: float,
    servers: Mapping[str, RunningServer] = MappingProxyType({}),
) -> Iterator[Comparison]:
    """Load by load, both trees in turns. `processes` and `servers` by tree, the first and the second."""
    progress = Progress(len(loads) * num_rounds * len(processes))
    for load in loads:
        ask_once(load, processes)
    for load in loads:
        measure = measure_of(load)
        values: dict[str, list[float]] = {tree: [] for tree in processes}
        before = {tree: server.encoded_crops() for tree, server in servers.items()}
        for tree, row in rounds(load, processes, num_rounds, window_s, warm_up_s):
            values[tree].append(value_of(row, measure))
            progress.end(f"{load}, {tree}: {values[tree][-1]:.4g} {measure}")
        first, second = values.values()
        after = {tree: server.encoded_crops() for tree, server in servers.items()}
        crops = [_per_picture(before.get(tree), after.get(tree)) for tree in processes]
        yield Comparison(str(load), measure, tuple(first), tuple(second), (crops[0], crops[1]))
    progress.close()


def _per_picture(before: CropCount | None, after: CropCount | None) -> float | None:
    return None if before is None or after is None else after.per_picture(before)


def as_text(comparisons: Sequence[Comparison], names: Sequence[str]) -> str:
    """A Markdown table."""
    first, second = names
    head = (
        f"| load | measure | {first} | {second} | {second} takes | spread | mean ratio | crops encoded a picture |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for each in comparisons:
        lists = (", ".join(f"{value:.4g}" for value in values) for values in (each.first, each.second))
        change = f"{100 * each.slowdown:+.1f}% time"
        crops = " / ".join("–" if value is None else f"{value:.2f}" for value in each.encoded_crops)
        spread, mean = f"±{100 * each.spread:.1f}%", f"{each.mean_ratio:.3f} ± {each.error:.3f}"
        lines.append("| " + " | ".join((each.name, each.measure, *lists, change, spread, mean, crops)) + " |")
    return "\n".join(lines)


def _results(comparison: Comparison) -> dict[str, float]:
    names = ("slowdown", "spread", "mean_ratio", "error")
    return {name: getattr(comparison, name) for name in names}


def _shares(calls: Counter[str]) -> str:
    """Returns the share of the calls that each front end took."""
    return ", ".join(f"{name} {count / calls.total():.3f}" for name, count in sorted(calls.items()))


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = parser_of(__doc__)
    result.add_argument("--before", type=Path, required=True, help="the older checkout")
    result.add_argument("--after", type=Path, default=Path(), help="the newer checkout (default: this folder)")
    result.add_argument("--model", required=True, help="folder of the model; its answers must never end early")
    result.add_argument("--rows", default=ROWS, help="workload:requests at once, … (default: %(default)s)")
    result.add_argument(
        "--rounds", type=int, default=3, help="turns of each tree in each row (default: %(default)s)"
    )
    result.add_argument("--seconds", type=float, default=5.0, help="length of each window (default: %(default)s)")
    result.add_argument(
        "--warm-up", type=float, default=2.0, help="before each window, at most (default: %(default)s)"
    )
    result.add_argument("--pictures", type=int, default=128, help="drawings to make (default: %(default)s)")
    result.add_argument(
        "--processes", type=int, default=4, help="load processes of each tree (default: %(default)s)"
    )
    result.add_argument(
        "--instant",
        choices=("on", "off"),
        default="off",
        help="on: steps after the first return at once, and the host's work is what is left (default: %(default)s)",
    )
    result.add_argument(
        "--connections", type=int, default=1, help="of each load process, used in turns (default: %(default)s)"
    )
    result.add_argument(
        "--starts", type=int, default=1, help="starts of both servers, each with all rounds (default: %(default)s)"
    )
    result.add_argument(
        "--most-slower", type=float, default=0.03, help="exit with 1 beyond this share (default: %(default)s)"
    )
    result.add_argument("--json", type=Path, default=Path("bench/out/alternate.json"), help="default: %(default)s")
    result.add_argument("server_options", nargs="*", metavar="-- OPTION", help="options of both servers")
    return result


def main() -> int:
    """Measure, print and write; 1 if a row of the second tree takes more time than allowed."""
    arguments = parser().parse_args()
    loads = [Load.of(text) for text in arguments.rows.split(",")]
    trees = {"before": arguments.before, "after": arguments.after}
    most = max(load.concurrency for load in loads)
    options = ("--model", arguments.model, "--max-batch-size", str(most), *arguments.server_options)
    program = "bench.harness.instant_steps" if arguments.instant == "on" else "kestrel_grpc"
    found: dict[str, Comparison] = {}
    starts: list[dict[str, Any]] = []
    for number in range(arguments.starts):
        with contextlib.ExitStack() as stack:
            servers: dict[str, RunningServer] = {}
            for name in list(trees)[:: -1 if number % 2 else 1]:
                servers[name] = stack.enter_context(
                    started_server(options, trees[name], program=program, has_metrics=True)
                )
                print(f"{name} serves {servers[name].address} after {servers[name].ready_s:.1f} s", flush=True)
            processes = {
                name: stack.enter_context(
                    LoadProcesses(
                        servers[name].address,
                        arguments.processes,
                        arguments.pictures,
                        num_connections=arguments.connections,
                    )
                )
                for name in trees
            }
            for comparison in measure(
                loads, processes, arguments.rounds, arguments.seconds, arguments.warm_up, servers
            ):
                before = found.get(comparison.name)
                found[comparison.name] = comparison if before is None else before.and_later(comparison)
            starts.append(
                {name: {"ready_s": servers[name].ready_s, "calls": servers[name].calls()} for name in trees}
            )
            print("calls:", *(f"{name} {_shares(servers[name].calls())}" for name in trees), flush=True)
        rows = [asdict(each) | _results(each) for each in found.values()]
        write_json(arguments.json, {"machine": machine_facts(), "program": program, "starts": starts, "rows": rows})
    comparisons = list(found.values())
    print(as_text(comparisons, list(trees)))
    return 1 if any(each.slowdown > arguments.most_slower for each in comparisons) else 0


if __name__ == "__main__":
    sys.exit(main())
