"""Measures how an attack by one caller affects all others.

Each attack gets a server of its own: `kestrel-grpc serve` with the built-in model and tokens. Attackers, server and
the other callers are processes on the same two cores. One asks for health every tenth of a second; one with another
token asks small questions. The memory of the server and its children is watched, and a server that grows beyond a
limit is killed, so that the machine survives. Prints a table with a verdict for each attack and writes the numbers
as JSON; exits with 1 if one did not hold. `bench/attacks/attack.py` has the requirements. Wants Linux.

    python -m bench.attacks
    python -m bench.attacks --only rapid-reset,jpeg-scans --seconds 5 -- --preprocess-threads 2
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bench.attacks import (
    adapter_uploads,
    bodies,
    chats,
    connections,
    constraints,
    conversations,
    crowding,
    frames,
    http1,
    messages,
    objects,
    pictures,
    stored_images,
    vectors,
)
from bench.attacks.attack import Attack, Observation, markdown
from bench.attacks.run import carry_out
from bench.attacks.shutdown import as_text, shut_down_under_load
from bench.harness.output import write_json
from bench.harness.serving import machine_facts

ATTACKS: tuple[Attack, ...] = (
    *messages.ATTACKS,
    *connections.ATTACKS,
    *bodies.ATTACKS,
    *http1.ATTACKS,
    *pictures.ATTACKS,
    *crowding.ATTACKS,
    *stored_images.ATTACKS,
    *adapter_uploads.ATTACKS,
    *constraints.ATTACKS,
    *chats.ATTACKS,
    *conversations.ATTACKS,
    *vectors.ATTACKS,
    *frames.ATTACKS,
    *objects.ATTACKS,
)
SHUTDOWN = "sigterm"
NUM_SHUTDOWNS = 5
_GIB = 2**30


def main() -> int:
    """Attack, print the table, write the file; 1 if anything is not as required."""
    arguments = _parsed()
    names = [*(attack.name for attack in ATTACKS), SHUTDOWN]
    chosen = names if arguments.only is None else arguments.only.split(",")
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        print(f"no such attacks: {', '.join(unknown)}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    machine = machine_facts()
    observations: list[Observation] = []
    for attack in ATTACKS:
        if attack.name in chosen:
            seen = carry_out(
                attack, arguments.seconds, round(arguments.memory_limit * _GIB), arguments.server_options
            )
            observations.append(seen)
            _say(f"{attack.name}: {'; '.join(seen.failures()) or 'held'} {dict(seen.outcome)}")
    shutdowns = [shut_down_under_load(arguments.server_options) for _ in range(NUM_SHUTDOWNS) if SHUTDOWN in chosen]
    rows = [seen.as_json() for seen in observations]
    result = {
        "machine": machine,
        "seconds": arguments.seconds,
        "columns": [*rows[0]] if rows else [],
        "attacks": [[*row.values()] for row in rows],
        "shutdowns": [{"codes": run.codes, "end_s": run.end_s, "failures": run.failures()} for run in shutdowns],
    }
    write_json(arguments.json, result)
    print(markdown(observations))
    if shutdowns:
        print(f"\n{as_text(shutdowns)}")
    return 1 if any(item.failures() for item in (*observations, *shutdowns)) else 0


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.attacks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME,…", help="these attacks (default: all)")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long each lasts (default: %(default)g)")
    parser.add_argument("--cores", type=int, default=2, help="for all processes together (default: %(default)s)")
    parser.add_argument(
        "--memory-limit", type=float, default=6.0, help="GiB at which a server is killed (default: %(default)g)"
    )
    parser.add_argument("--json", type=Path, default=Path("bench/out/attacks.json"), help="default: %(default)s")
    parser.add_argument("server_options", nargs="*", metavar="-- OPTION", help="options of `kestrel-grpc serve`")
    return parser.parse_args()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
