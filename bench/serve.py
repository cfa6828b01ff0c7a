"""How fast the server answers over gRPC: closed loop by concurrency, open loop by rate until it is overloaded.

Starts `kestrel-grpc serve` as a process of its own, or loads the one at `--target`, and asks the questions of
`workload.py` from load processes of its own. Prints tables and writes one JSON. Options
after `--` go to the server. Answers are as long as asked where the model never ends by itself, as those of
`random_weights.py` do; the built-in model is served as such a copy.

    python -m bench.serve --quick
    python -m bench.serve --model /tmp/md2 --batches 1,4,16,64 --peer peer.json -- --max-prefill-tokens 8192
"""

import argparse
import contextlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.harness.checkpoints import write_endless
from bench.harness.empty_server import empty_server
from bench.harness.load import LoadProcesses
from bench.harness.output import Progress, parser_of, write_json
from bench.harness.report import Results, over_peer
from bench.harness.serving import RunningServer, machine_facts, started_server
from bench.harness.summary import Row, summarise
from bench.harness.workload import WORKLOADS, Workload
from kestrel_grpc.cli.bench.numbers import Objective

FIRST_RATE, RATE_STEP, MAX_RATES = 0.4, 1.25, 9
"""The open loop starts at this share of the closed loop's best rate, and asks for so much more each time."""
OVERLOADED = 0.9
"""Answering in time less than this share of what is sent is overload."""
WAIT_LIMIT_S = 10.0
FIRST_ANSWERS_S = 90.0
ALONE = ("cached",)
"""Workloads that are asked one request at a time, whatever the batch."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure and for how long."""

    workloads: tuple[Workload, ...]
    concurrencies: tuple[int, ...]
    open_workload: Workload | None
    window_s: float
    open_window_s: float
    warm_up_s: float
    num_pictures: int
    objective: Objective
    num_processes: int

    def concurrencies_of(self, workload: Workload) -> tuple[int, ...]:
        """How many requests to keep running, one after another."""
        return self.concurrencies[:1] if workload.name in ALONE else self.concurrencies

    @property
    def num_steps(self) -> int:
        """Measurements to come, at most."""
        closed = sum(len(self.concurrencies_of(workload)) for workload in self.workloads)
        return closed + len(self.workloads) + (MAX_RATES if self.open_workload else 0)


def measure(plan: Plan, server: RunningServer, progress: Progress) -> Iterator[Row]:
    """Every row of the closed loop, then of the open one."""
    best_rate_per_s = 0.0
    with LoadProcesses(server.address, plan.num_processes, plan.num_pictures) as load:
        # What is compiled or captured at its first use is no row's business.
        progress.begin("first answers")
        load.closed(plan.workloads[0], max(plan.concurrencies), 0.1, FIRST_ANSWERS_S)
        for workload in plan.workloads:
            for concurrency in plan.concurrencies_of(workload):
                name = f"{workload.name}, {concurrency} at once"
                progress.begin(name)
                before = server.encoded_crops()
                recording = load.closed(workload, concurrency, plan.window_s, plan.warm_up_s)
                after = server.encoded_crops()
                row = summarise(
                    workload.name, concurrency, recording, workload.num_tokens, plan.objective, is_open=False
                )
                if before is not None and after is not None:
                    row = replace(row, encoded_crops=after.per_picture(before))
                if workload is plan.open_workload:
                    best_rate_per_s = max(best_rate_per_s, row.requests_per_s)
                progress.end(f"{name}: {row.requests_per_s:.1f} requests/s")
                yield row
        if plan.open_workload is not None and best_rate_per_s:
            yield from ramp(plan, plan.open_workload, load, FIRST_RATE * best_rate_per_s, progress)


def ramp(
    plan: Plan, workload: Workload, load: LoadProcesses, rate_per_s: float, progress: Progress
) -> Iterator[Row]:
    """The open loop: more and more requests per second until too few are answered in time."""
    for _ in range(MAX_RATES):
        name = f"{workload.name}, {rate_per_s:.1f} sent per second"
        progress.begin(name)
        recording = load.open(workload, rate_per_s, plan.open_window_s, WAIT_LIMIT_S)
        row = summarise(workload.name, rate_per_s, recording, workload.num_tokens, plan.objective, is_open=True)
        progress.end(f"{name}: {row.goodput_per_s:.1f} answered in time")
        yield row
        # What was sent is random; the share that counts is that of what was really sent.
        if row.goodput_per_s < OVERLOADED * row.num_requests / row.window_s:
            return
        rate_per_s *= RATE_STEP


def measure_client(plan: Plan, progress: Progress) -> Iterator[Row]:
    """What the load processes get out of a server without a model, at the highest concurrency."""
    with empty_server() as address, LoadProcesses(address, plan.num_processes, plan.num_pictures) as load:
        for workload in plan.workloads:
            concurrency = plan.concurrencies_of(workload)[-1]
            recording = load.closed(workload, concurrency, min(1.0, plan.window_s), 1.0)
            progress.end(f"the client alone, {workload.name}")
            yield summarise(
                workload.name, concurrency, recording, workload.num_tokens, plan.objective, is_open=False
            )


@contextlib.contextmanager
def served(arguments: argparse.Namespace, max_batch_size: int) -> Iterator[RunningServer]:
    """The server that is asked for."""
    if arguments.target is not None:
        yield RunningServer(arguments.target)
        return
    with contextlib.ExitStack() as stack:
        model = arguments.model
        if model is None:
            import kestrel_runtime

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "nano-endless"
            write_endless(Path(kestrel_runtime.__path__[0]) / "nano", folder)
            model = str(folder)
        options = ("--model", model, "--max-batch-size", str(max_batch_size), *arguments.server_options)
        yield stack.enter_context(started_server(options, has_metrics="--metrics-port" not in options))


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan that the arguments ask for."""
    quick = arguments.quick
    names = arguments.workloads or ("direct,cot" if quick else "direct,cot,long,cached,text")
    batches = arguments.batches or ("1,4" if quick else "1,4,16,64")
    return Plan(
        workloads=tuple(WORKLOADS[name] for name in names.split(",")),
        concurrencies=tuple(int(batch) for batch in batches.split(",")),
        open_workload=None if arguments.open == "none" else WORKLOADS[arguments.open],
        window_s=arguments.seconds or (2.0 if quick else 8.0),
        open_window_s=arguments.seconds or (2.0 if quick else 8.0),
        warm_up_s=3.0 if quick else 10.0,
        num_pictures=arguments.pictures or (16 if quick else 128),
        objective=Objective(arguments.first_token_objective_ms, arguments.per_token_objective_ms),
        num_processes=arguments.processes,
    )


def precision_of(options: Sequence[str]) -> str:
    """What the options of a server say of the formats that it computes in."""
    named = ("--precision", "--dtype", "--text-backend", "--vision-backend", "--kv-dtype")
    pairs = [f"{name} {value}" for name, value in pairwise(options) if name in named]
    return ", ".join(pairs) or "the default: bfloat16 on a GPU, else float32"


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = parser_of(__doc__)
    result.add_argument(
        "--model", help="folder of the model to serve (default: an endless copy of the built-in one)"
    )
    result.add_argument("--target", help="address of a server that runs already, instead of starting one")
    result.add_argument("--quick", action="store_true", help="a minute's worth, for a look or a test")
    result.add_argument("--workloads", help=f"some of {','.join(WORKLOADS)} (default: all; quick: two)")
    result.add_argument("--batches", help="requests kept running, such as 1,4,16,64 (the default)")
    result.add_argument(
        "--open", choices=(*WORKLOADS, "none"), default="direct", help="what the open loop sends (default: direct)"
    )
    result.add_argument("--seconds", type=float, help="length of each window (default: 8; quick: 2)")
    result.add_argument("--pictures", type=int, help="drawings to make (default: 128; quick: 16)")
    result.add_argument(
        "--processes",
        type=int,
        default=min(4, max(1, (os.cpu_count() or 1) // 4)),
        help="load processes (default: a quarter of the cores, at most 4; here %(default)s)",
    )
    result.add_argument(
        "--first-token-objective-ms", type=float, default=1000.0, help="for goodput (default: %(default)g)"
    )
    result.add_argument(
        "--per-token-objective-ms", type=float, default=50.0, help="for goodput (default: %(default)g)"
    )
    result.add_argument("--peer", type=Path, help="results of bench.peer_kestrel, for ours over theirs")
    result.add_argument("--json", type=Path, default=Path("bench/out/serve.json"), help="default: %(default)s")
    result.add_argument("server_options", nargs="*", metavar="-- OPTION", help="options of `kestrel-grpc serve`")
    return result


def main() -> int:
    """Measure, print the tables, write both files; 1 if a request failed in the closed loop."""
    arguments = parser().parse_args()
    plan = plan_of(arguments)
    progress = Progress(plan.num_steps)
    with served(arguments, max(plan.concurrencies)) as server:
        options = (
            "of another process" if arguments.target else shlex.join(arguments.server_options) or "the defaults"
        )
        facts = {
            **server.facts(),
            "precision": precision_of(arguments.server_options),
            "options": options,
            "measured_with": shlex.join(["python", "-m", "bench.serve", *sys.argv[1:]]),
        }
        rows = list(measure(plan, server, progress))
    client = list(measure_client(plan, progress))
    progress.close()
    peer: dict[str, Any] | None = None if arguments.peer is None else json.loads(arguments.peer.read_text())
    ratios = over_peer(rows, peer)
    results = Results(machine_facts(), facts, plan.objective, tuple(rows), tuple(client), ratios)
    write_json(arguments.json, results.as_json())
    print(results.as_text())
    print(f"\nnumbers in {arguments.json}")
    return 1 if any(row.errors for row in rows if not row.is_open) else 0


if __name__ == "__main__":
    sys.exit(main())
