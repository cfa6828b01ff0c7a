"""What do adapters cost? One server, loaded in turns without adapters and with eight of them in each batch.

Writes random adapters of all targets for the model, starts one server with slots for them, and loads it in turns:
requests of `none` name no adapter, those of `mixed` name all adapters in turn. Rows, ratios and spreads are those
of `alternate.py`. `--compare slots` tells what the slots cost requests that use none: `plain` is a server without
slots, which must fit on the same device.

    python -m bench.adapters --model /tmp/md2 -- --kv-pages 12000
    python -m bench.adapters --model /tmp/md2 --compare slots -- --kv-pages 12000
"""

import argparse
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.alternate import Comparison, as_text, measure
from bench.harness.checkpoints import write_random_adapters
from bench.harness.load import LoadProcesses
from bench.harness.output import parser_of, write_json
from bench.harness.rounds import Load, ask_once
from bench.harness.serving import machine_facts, started_server

_NUMBERS_APART = 10**9
ROWS = "direct:64,cot:64,text:64"
PAIRS: Mapping[str, tuple[str, str]] = MappingProxyType({"adapters": ("none", "mixed"), "slots": ("plain", "none")})
"""What is compared, by what the second of both costs more."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = parser_of(__doc__)
    result.add_argument("--model", type=Path, required=True, help="folder of the model, which never ends an answer")
    result.add_argument("--adapters", type=int, default=8, help="how many adapters (default: %(default)s)")
    result.add_argument("--rank", type=int, default=32, help="of each adapter (default: %(default)s)")
    result.add_argument("--rows", default=ROWS, help="workload:requests at once, … (default: %(default)s)")
    result.add_argument("--rounds", type=int, default=3, help="turns in each row (default: %(default)s)")
    result.add_argument("--seconds", type=float, default=4.0, help="length of each window (default: %(default)s)")
    result.add_argument(
        "--warm-up", type=float, default=2.0, help="before each window, at most (default: %(default)s)"
    )
    result.add_argument("--pictures", type=int, default=128, help="drawings to make (default: %(default)s)")
    result.add_argument("--processes", type=int, default=4, help="load processes of each (default: %(default)s)")
    result.add_argument(
        "--compare", nargs="+", choices=PAIRS, default=["adapters"], help="what costs what (default: adapters)"
    )
    result.add_argument(
        "--most-slower", type=float, default=0.11, help="exit with 1 beyond this share (default: %(default)s)"
    )
    result.add_argument("--json", type=Path, default=Path("bench/out/adapters.json"), help="default: %(default)s")
    result.add_argument("server_options", nargs="*", metavar="-- OPTION", help="options of the servers")
    return result


def main() -> int:
    """Measure, print and write; 1 if the second of a pair takes more time than allowed."""
    arguments = parser().parse_args()
    loads = [Load.of(text) for text in arguments.rows.split(",")]
    most = max(load.concurrency for load in loads)
    plain = ("--model", str(arguments.model), "--max-batch-size", str(most), *arguments.server_options)
    facts = {"machine": machine_facts(), "command": sys.argv[1:]}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = time.perf_counter()
        names = write_random_adapters(folder, arguments.model, arguments.adapters, arguments.rank)
        num_bytes = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        print(f"{len(names)} adapters, {num_bytes / 1e6:.1f} MB, {time.perf_counter() - started:.1f} s", flush=True)
        slots = ("--adapter-slots", str(len(names)), "--max-adapter-rank", str(arguments.rank))
        server = stack.enter_context(started_server((*plain, "--adapters", str(folder), *slots)))
        pairs = [PAIRS[name] for name in arguments.compare]
        servers = {"none": (server.address, ()), "mixed": (server.address, names)}
        if "slots" in arguments.compare:
            servers["plain"] = (stack.enter_context(started_server(plain)).address, ())
        asked = dict.fromkeys(itertools.chain.from_iterable(pairs))
        processes = {
            name: stack.enter_context(
                # No picture comes twice: a server keeps embeddings of pictures, whatever the adapter.
                LoadProcesses(address, arguments.processes, arguments.pictures, own, place * _NUMBERS_APART)
            )
            for place, (name, (address, own)) in enumerate((name, servers[name]) for name in asked)
        }
        results: list[tuple[tuple[str, str], list[Comparison]]] = []
        for pair in pairs:
            chosen = {name: processes[name] for name in pair}
            for load in loads:  # graphs are captured when a kind of step comes for the second time
                ask_once(load, chosen)
            compared: list[Comparison] = []
            results.append((pair, compared))
            for comparison in measure(loads, chosen, arguments.rounds, arguments.seconds, arguments.warm_up):
                compared.append(comparison)
                write_json(arguments.json, facts | {"rows": _as_json(results)})
    for pair, compared in results:
        print(as_text(compared, pair))
    slowdowns = [each.slowdown for _, compared in results for each in compared]
    return 1 if max(slowdowns) > arguments.most_slower else 0


def _as_json(results: Sequence[tuple[tuple[str, str], Sequence[Comparison]]]) -> dict[str, list[dict[str, Any]]]:
    return {
        f"{second} over {first}": [
            asdict(each) | {"ratio": each.ratio, "slowdown": each.slowdown, "spread": each.spread}
            for each in compared
        ]
        for (first, second), compared in results
    }


if __name__ == "__main__":
    sys.exit(main())
