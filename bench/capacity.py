"""How many GPUs for so many requests an hour? From measured service times, by `harness/queueing.py`.

    python -m bench.capacity table      # the tables of docs/capacity.md
    python -m bench.capacity plan --requests-per-hour 1000000 --workload cot --questions-per-image 5 --limit 1
    python -m bench.capacity hosts      # simulates up to 200 hosts, a minute or two, for one of the tables
    python -m bench.capacity check      # measures real servers beside the model, a quarter of an hour

`plan --results FILE` takes what `bench.serve --workloads direct,cot,long,cached` measured on your own card in place
of the results here. Requests come at random moments. An image is asked about once, or several times in between
other images, and a server still has the image that it has computed before.

`check` needs no GPU. Two cores cannot hold four busy models, so it bounds the servers on purpose: real gRPC
servers over an engine that waits and computes nothing (`harness/delayed_server.py`). The model gets the curves that
a closed loop measures on one of them, and predicts the open loop on 1, 2 and 4 behind Envoy. Its requests come at
the moments at which the load processes send theirs.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, takewhile
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.harness.output import parser_of, write_json
from bench.harness.queueing import (
    QUANTILE,
    Arrival,
    Curve,
    Mix,
    Route,
    Served,
    at_random,
    by_image,
    distinct_servers,
    least_requests,
    simulate,
)
from bench.harness.workload import NUM_RETURNING, returning
from kestrel_grpc.cli.bench.loops import arrivals as moments
from kestrel_grpc.cli.bench.numbers import percentiles
from kestrel_grpc.cli.bench.plot import number

RESULTS = Path(__file__).resolve().parent / "results"
BALANCE_FACTOR = 2.0
"""As `hash_balance_factor` in deploy/envoy/envoy.yaml, which is in percent."""
LIMIT_S = 1.0
MAX_IMAGES = 256
"""Whose embeddings a server keeps on a GPU, by default."""
QUESTIONS = (1, 2, 5, 10)
PER_HOUR = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
HOSTS = (4, 25, 200)
_NUM_SIMULATIONS = 3
_SPEED_BISECTIONS = 5
Table = list[list[str]]


@dataclass(frozen=True, slots=True)
class Setting:
    """How servers run, and their curves by workload: of new images and, as `cached`, of a known one."""

    name: str
    curves: Mapping[str, Curve]

    def mix(self, workload: str, new_share: float) -> Mix:
        """Requests of a workload, of which that share is about images that the server does not have."""
        new = self.curves[workload]
        return Mix(((new_share, new), (1 - new_share, self.known(workload))))

    def known(self, workload: str) -> Curve:
        """Of a known image, what a direct question costs more about a new image is saved, whatever the answer."""
        return self.curves[workload].with_part_replaced(self.curves["direct"], self.curves["cached"])

    def per_gpu(self, workload: str, questions: int, num_spread: int, limit_s: float) -> float:
        """Requests per second of a GPU, where questions about an image go to any of `num_spread` GPUs."""
        return self.mix(workload, distinct_servers(questions, num_spread) / questions).rate_within(limit_s)

    def gpus(self, per_s: float, workload: str, questions: int, *, is_by_image: bool, limit_s: float) -> int | None:
        """The fewest GPUs that answer 99% of so many requests within a limit; None where no number does."""
        if (least_per_s := self.per_gpu(workload, 1, 1, limit_s)) == 0:
            return None
        most_per_s = self.per_gpu(workload, questions, 1, limit_s)
        fewest = max(1, math.ceil(per_s / most_per_s))
        if is_by_image:
            return fewest
        # Every GPU computes an image that it is asked about, so that the last of many GPUs saves nearly nothing.
        low, high = fewest - 1, max(1, math.ceil(per_s / least_per_s))
        while high - low > 1:
            middle = (low + high) // 2
            mix = self.mix(workload, distinct_servers(questions, middle) / questions)
            suffices = mix.share_within(limit_s, per_s / middle) >= QUANTILE
            low, high = (low, middle) if suffices else (middle, high)
        return high


def settings() -> tuple[Setting, ...]:
    """From bench/results: bfloat16 in one process, and float8 with four front ends."""
    h100, h200 = _result("serve-moondream2-h100.json"), _result("serve-moondream2.json")
    gpus = _result("gpus-moondream2-h100.json")["rows"]
    alone = _closed(h100, "cached")  # of one request at a time, which was not measured in float8
    plain = {name: _closed(h100, name) for name in ("direct", "cot", "long")}
    plain["cached"] = alone | {64: _rounds(gpus["cached:64"]["both"])}
    float8 = {name: _closed(h200, name) for name in ("direct", "cot", "long")}
    for name in ("direct", "cot"):
        float8[name][128] = _rounds(gpus[f"{name}:128"]["frontends-4"])
    float8["cached"] = alone | {64: _rounds(gpus["cached:64"]["frontends-4"])}
    return tuple(
        Setting(name, {workload: Curve.of_rates(per_s) for workload, per_s in rates.items()})
        for name, rates in (("bfloat16", plain), ("float8, 4 front ends", float8))
    )


def setting_of(results: Mapping[str, Any]) -> Setting:
    """What `bench.serve` measured elsewhere. Raises ValueError where a workload is missing."""
    missing = [name for name in ("direct", "cached") if not _closed(results, name)]
    if missing:
        raise ValueError(f"no closed loop of {' and '.join(missing)} in these results")
    rates = {name: _closed(results, name) for name in ("direct", "cot", "long", "cached")}
    curves = {name: Curve.of_rates(per_s) for name, per_s in rates.items() if per_s}
    return Setting(str(results["machine"].get("gpu", "measured")), curves)


def tables() -> Iterator[tuple[str, Table]]:
    """What docs/capacity.md shows: names of tables, and the tables."""
    found = settings()
    yield "service times", service_times(found)
    yield "one GPU", one_gpu(found)
    yield "GPUs", gpus_needed(found)
    yield "hosts", hosts_table(_result("capacity-hosts.json")["rows"])
    yield "open loop on a GPU", replayed(found[0])
    yield "check", checked(_result("capacity-check.json"))


def service_times(found: Sequence[Setting]) -> Table:
    """The curves."""
    table = [["setting", "workload", "requests at once: ms of each"]]
    for setting in found:
        for workload, curve in setting.curves.items():
            points = zip(curve.at_once, curve.seconds, strict=True)
            cells = ", ".join(f"{at_once}: {number(1e3 * seconds)}" for at_once, seconds in points)
            table.append([setting.name, workload, cells])
    return table


def one_gpu(found: Sequence[Setting]) -> Table:
    """Requests per second and hour of one GPU within the limit."""
    heads = [f"{_repeats(questions)} repeats" for questions in QUESTIONS]
    table = [["setting", "workload", *heads]]
    for setting in found:
        for workload in ("direct", "cot", "long", "cached"):
            rates = (setting.per_gpu(workload, questions, 1, LIMIT_S) for questions in QUESTIONS)
            if workload == "cached":
                rates = (Mix(((1.0, setting.curves[workload]),)).rate_within(LIMIT_S) for _ in QUESTIONS[:1])
            cells = [f"{number(rate)} ({_rounded_down(3600 * rate)})" for rate in rates]
            table.append([setting.name, workload, *cells, *[""] * (len(QUESTIONS) - len(cells))])
    return table


def gpus_needed(found: Sequence[Setting]) -> Table:
    """How many GPUs, by requests an hour."""
    table = [["setting", "workload", "repeats", "routing", *(f"{per_hour:,}/h" for per_hour in PER_HOUR)]]
    for setting in found:
        for workload in ("direct", "cot", "long"):
            for questions in (1, 5, 10):
                for is_by_image in (True, False) if questions > 1 else (False,):
                    needed = (
                        setting.gpus(per_hour / 3600, workload, questions, is_by_image=is_by_image, limit_s=LIMIT_S)
                        for per_hour in PER_HOUR
                    )
                    cells = ["–" if gpus is None else f"{gpus:,}" for gpus in needed]
                    routing = "by image" if is_by_image else "random" if questions > 1 else "any"
                    table.append([setting.name, workload, _repeats(questions), routing, *cells])
    return table


def many_hosts(setting: Setting, hosts: Sequence[int]) -> list[dict[str, Any]]:
    """Up to hundreds of hosts, simulated at a share of the rate that the formula allows them.

    Direct questions, five about each image. With a popular image, every tenth request is about that one.
    """
    new, known = setting.curves["direct"], setting.known("direct")
    plain: dict[str, Callable[[], Route]] = {
        "fewer requests of two": lambda: least_requests(0),
        "random": lambda: at_random(0),
    }
    imaged: dict[str, Callable[[], Route]] = {
        "by image, no bound": lambda: by_image(None),
        "by image, 400%": lambda: by_image(4.0),
        f"by image, {BALANCE_FACTOR:.0%}": lambda: by_image(BALANCE_FACTOR),
    }
    bounded = f"by image, {BALANCE_FACTOR:.0%}"
    cases = [(name, 0.0, 0.9) for name in (*imaged, *plain)]
    cases += [(bounded, 0.0, 0.7), *((name, 0.1, 0.7) for name in imaged)]
    rows: list[dict[str, Any]] = []
    for num_hosts in hosts:
        for name, popular, load in cases:
            num_spread, route = (1, imaged[name]) if name in imaged else (num_hosts, plain[name])
            per_s = load * setting.per_gpu("direct", 5, num_spread, LIMIT_S)
            arrivals = list(islice(_stream(num_hosts * per_s, 5, num_hosts, popular), 700 * num_hosts))
            served = simulate(arrivals, num_hosts, new, known, route(), max_images=MAX_IMAGES)
            # The hosts begin without work and without images.
            counted = slice(len(served) * 3 // 10, None)
            images = [arrival.image for arrival in arrivals]
            num_new = len(set(images)) - len(set(images[: counted.start]))
            hits = sum(one.is_known for one in served[counted])
            times = percentiles(1e3 * one.total_s for one in served[counted])
            known_share = hits / len(served[counted])
            mean_s = (1 - known_share) / new.most_per_s + known_share / known.most_per_s
            rows.append(
                {
                    "hosts": num_hosts,
                    "routing": name,
                    "popular_share": popular,
                    "load": load,
                    "per_host_per_s": per_s,
                    "busy_share": per_s * mean_s,
                    "hit_share": hits / (len(served[counted]) - num_new),
                    "p50_ms": times["p50"],
                    "p99_ms": times["p99"],
                }
            )
    return rows


def hosts_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What `many_hosts` found."""
    table = [
        [
            "hosts",
            "routing",
            "popular image",
            "load",
            "requests/s a host",
            "repeats that hit",
            "busy",
            "p50 ms",
            "p99 ms",
        ]
    ]
    for row in rows:
        popular = f"{row['popular_share']:.0%}" if row["popular_share"] else "none"
        numbers = (
            number(row["per_host_per_s"]),
            f"{row['hit_share']:.1%}",
            f"{row['busy_share']:.0%}",
            number(row["p50_ms"]),
            number(row["p99_ms"]),
        )
        table.append([str(row["hosts"]), row["routing"], popular, f"{row['load']:.0%}", *numbers])
    return table


def replayed(setting: Setting) -> Table:
    """The open loop of one H100 beside the model."""
    results = _result("serve-moondream2-h100.json")
    table = [["sent/s", "p50 ms, measured", "model", "p90 ms, measured", "model", "p99 ms, measured", "model"]]
    for row in results["rows"]:
        if row["is_open"]:
            arrivals = sent(row["load"], row["window_s"], num_processes=4)
            curve = setting.curves[row["workload"]]
            served = simulate(arrivals, 1, curve, curve, at_random(0), max_images=MAX_IMAGES)
            times, measured = percentiles(1e3 * one.total_s for one in served), row["total_ms"]
            pairs = ((number(measured[rank]), number(times[rank])) for rank in ("p50", "p90", "p99"))
            table.append([number(len(arrivals) / row["window_s"]), *(cell for pair in pairs for cell in pair)])
    return table


def predicted(check: Mapping[str, Any], row: Mapping[str, Any], speed: float = 1.0) -> dict[str, float]:
    """What the model says of a row of a check: percentiles in ms, and the share of known images.

    The median of several simulations, which differ in the servers that images and requests go to. `speed` is by how
    much sooner requests come than they did.
    """
    curves = {
        name: Curve.of_rates({int(n): rate for n, rate in rates.items()}) for name, rates in check["curves"].items()
    }
    questions = 5 if row["workload"].startswith("returning") else 1
    load = sent(row["sent_per_s"], row["window_s"], questions=questions, first=row["first_number"])
    arrivals = [Arrival(one.due_s / speed, one.image) for one in load]
    routes: dict[str, Callable[[int], Route]] = {
        "fewer requests of two": least_requests,
        "random": at_random,
        "by image, 400%": lambda seed: by_image(4.0, seed),
        "by image, 150%": lambda seed: by_image(1.5, seed),
    }
    found: list[dict[str, float]] = []
    for seed in range(_NUM_SIMULATIONS):
        route = routes[row["route"]](seed)
        served = simulate(
            arrivals, row["servers"], curves["direct"], curves["cached"], route, max_images=len(arrivals)
        )
        found.append(summary(served))
    return {name: median(one[name] for one in found) for name in found[0]}


def rate_error(check: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """By how much the rate is off that has the measured 99th percentile in the model: 0.1 for 10% more."""
    slow, fast = 0.7, 1.3
    for _ in range(_SPEED_BISECTIONS):
        middle = (slow + fast) / 2
        is_within = predicted(check, row, middle)["p99"] <= row["total_ms"]["p99"]
        slow, fast = (middle, fast) if is_within else (slow, middle)
    return (slow + fast) / 2 - 1


def summary(served: Sequence[Served]) -> dict[str, float]:
    """Percentiles in ms, and the share of requests about known images."""
    times = percentiles(1e3 * one.total_s for one in served)
    return {**times, "hits": sum(one.is_known for one in served) / len(served)}


def checked(check: Mapping[str, Any]) -> Table:
    """The servers that were measured beside the model."""
    times = [cell for rank in ("p50", "p99") for cell in (f"{rank} ms", "model")]
    table = [["servers", "load", "routing", "requests/s", "rate by the model", "known", "model", *times]]
    for row in check["rows"]:
        model = predicted(check, row)
        rate = row["num_requests"] / row["window_s"]
        off = rate_error(check, row)
        cells = [number(rate), f"{number(rate * (1 + off))} ({off:+.0%})"]
        cells += [f"{row['hit_share']:.0%}", f"{model['hits']:.0%}"]
        cells += [number(value) for rank in ("p50", "p99") for value in (row["total_ms"][rank], model[rank])]
        table.append([str(row["servers"]), row["workload"], row["route"], *cells])
    return table


def as_markdown(table: Table) -> str:
    """A table of a page."""
    head, *rows = table
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (head, ["---"] * len(head), *rows))


def sent(
    per_s: float, window_s: float, *, num_processes: int = 1, questions: int = 1, first: int = 0
) -> list[Arrival]:
    """What load processes send in an open loop."""
    due = sorted(
        moment
        for index in range(num_processes)
        for moment in takewhile(lambda due_s: due_s < window_s, moments(0.0, per_s / num_processes, index))
    )
    return [Arrival(due_s, _image(first + place, questions)) for place, due_s in enumerate(due)]


def _image(place: int, questions: int) -> int:
    if questions == 1:
        return place
    block, rest = divmod(place, questions * NUM_RETURNING)
    return returning(block, questions)[rest]


def _stream(per_s: float, questions: int, num_hosts: int, popular_share: float) -> Iterator[Arrival]:
    """Requests without an end, with 32 images a host at a time; the popular image has the number -1."""
    chance, due_s = random.Random(0), 0.0
    for block in count():
        for image in returning(block, questions, 32 * num_hosts):
            due_s += chance.expovariate(per_s)
            yield Arrival(due_s, -1 if chance.random() < popular_share else image)


def _repeats(questions: int) -> str:
    return f"{1 - 1 / questions:.0%}"


def _rounded_down(per_hour: float) -> str:
    """Two digits that count."""
    step = 10 ** max(0, math.floor(math.log10(per_hour)) - 1)
    return f"{int(per_hour // step * step):,}/h"


def _result(file: str) -> dict[str, Any]:
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))


def _closed(results: Mapping[str, Any], workload: str) -> dict[int, float]:
    """Requests per second by the number kept running."""
    rows = (row for row in results["rows"] if row["workload"] == workload and not row["is_open"])
    return {int(row["load"]): row["requests_per_s"] for row in rows}


def _rounds(rows: Sequence[Mapping[str, Any]]) -> float:
    return mean(row["requests_per_s"] for row in rows)


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = parser_of(__doc__)
    commands = result.add_subparsers(dest="command", required=True)
    commands.add_parser("table", help="print the tables of docs/capacity.md")
    plan = commands.add_parser("plan", help="how many GPUs for one load")
    plan.add_argument("--requests-per-hour", type=float, required=True)
    plan.add_argument("--workload", choices=("direct", "cot", "long"), default="direct")
    plan.add_argument("--questions-per-image", type=int, default=1, help="default: 1, no repeats")
    plan.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for 99%% of requests (default: 1)")
    plan.add_argument("--results", type=Path, help="JSON of bench.serve (default: those of bench/results)")
    hosts = commands.add_parser("hosts", help="simulate up to 200 hosts")
    hosts.add_argument("--json", type=Path, default=RESULTS / "capacity-hosts.json", help="default: %(default)s")
    check = commands.add_parser("check", help="measure real servers beside the model")
    check.add_argument("--json", type=Path, default=RESULTS / "capacity-check.json", help="default: %(default)s")
    check.add_argument("--seconds", type=float, default=40.0, help="length of each window (default: 40)")
    return result


def main() -> int:
    """Print what is asked for."""
    arguments = parser().parse_args()
    if arguments.command == "check":
        from bench.harness.bounded_servers import measure

        print(as_markdown(checked(measure(arguments.json, arguments.seconds))))
    elif arguments.command == "hosts":
        rows = many_hosts(settings()[1], HOSTS)
        write_json(arguments.json, {"rows": rows})
        print(as_markdown(hosts_table(rows)))
    elif arguments.command == "plan":
        given = arguments.results
        found = settings() if given is None else (setting_of(json.loads(given.read_text(encoding="utf-8"))),)
        for setting in found:
            for is_by_image in (True, False):
                gpus = setting.gpus(
                    arguments.requests_per_hour / 3600,
                    arguments.workload,
                    arguments.questions_per_image,
                    is_by_image=is_by_image,
                    limit_s=arguments.limit,
                )
                routing = "routed by image" if is_by_image else "routed at random"
                print(f"{setting.name}, {routing}: {'no number suffices' if gpus is None else f'{gpus:,} GPUs'}")
    else:
        for name, table in tables():
            print(f"{name}\n\n{as_markdown(table)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
