"""Do limits of a token hold exactly, whichever of several front ends its calls reach?

    python -m bench.token_limits --frontends 3

Starts a server and sends it calls over several connections, as fast as they are answered:

`rate`         calls of a token with a rate and a number of calls at a time. In no span of time may more be admitted
               than the rate allows. A call was admitted between its start and its end as the caller sees them, so a
               span is counted from the first start to the last end of the calls in it, for every pair of calls.
`at once`      uploads that are begun and not finished. Exactly as many stay open as the token may have at a time,
               and all others are refused.
`hung up`      the same after the open uploads were hung up: exactly as many are admitted again.
`killed`       the same after the process of a front end was killed, which takes its uploads with it.

Exits with 1 where a limit does not hold. Linux spreads connections over front ends unevenly; the last line says how
many calls each has had.
"""

import argparse
import asyncio
import os
import re
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_status import rpc_status

from bench.harness.output import parser_of, write_json
from bench.harness.serving import machine_facts, started_server
from kestrel_client.v1 import engine_service_pb2
from kestrel_client.v1.engine_service_pb2_grpc import EngineServiceStub
from kestrel_client.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_grpc.access.token_file import Scope, line_for

RATE = 100
AT_ONCE = 16
_IN_FLIGHT = 32
"""Calls of each connection at a time."""
_QUIET_S = 2.0
"""So long no further call has ended: those that are open were admitted."""
_MAX_WAIT_S = 60.0
_SECRETS = {"rated": "kestrel_rated", "holding": "kestrel_holding"}
_TOKENS = {
    "rated": f"rate = {RATE}, burst = {RATE}, concurrency = {AT_ONCE}",
    "holding": f"concurrency = {AT_ONCE}",
}


@dataclass(frozen=True, slots=True)
class Row:
    """What came of the calls of one question. `bound` is how many may be admitted."""

    question: str
    calls: int
    seconds: float
    admitted: int
    bound: float
    refused: int
    failed: int
    """Otherwise than by a limit."""
    holds: bool


class Caller:
    """Calls over connections of their own."""

    def __init__(self, address: str, num_connections: int) -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(num_connections)]
        self._open: set[Any] = set()
        """Uploads that have been begun and have not ended."""

    async def close(self) -> None:
        """Hang up."""
        for channel in self._channels:
            await channel.close()

    async def ask(self, num_calls: int) -> Row:
        """Calls that are answered at once."""
        admitted: list[tuple[float, float]] = []
        outcomes: Counter[str] = Counter()
        request = engine_service_pb2.GetServerInfoRequest()
        left = iter(range(num_calls))

        async def work(channel: grpc.aio.Channel) -> None:
            stub: Any = EngineServiceStub(channel)
            for _ in left:
                began = time.perf_counter()
                outcome = await _outcome(stub.GetServerInfo(request, metadata=_bearing("rated")))
                outcomes[outcome] += 1
                if outcome == "OK":
                    admitted.append((began, time.perf_counter()))

        started = time.perf_counter()
        await asyncio.gather(*(work(channel) for channel in self._channels for _ in range(_IN_FLIGHT)))
        took_s = time.perf_counter() - started
        refused = outcomes["RATE_LIMITED"]
        return Row(
            "rate",
            num_calls,
            took_s,
            len(admitted),
            RATE + RATE * took_s,
            refused,
            num_calls - refused - len(admitted),
            _keeps_rate(admitted) and num_calls == refused + len(admitted),
        )

    async def hold(self, question: str, num_calls: int) -> Row:
        """Uploads that are begun and stay open where they are admitted, beside those that are open already."""
        outcomes: Counter[str] = Counter()
        left = iter(range(num_calls))

        async def work(channel: grpc.aio.Channel) -> None:
            nonlocal last
            stub: Any = ImageServiceStub(channel)
            for _ in left:
                call = stub.UploadImage(metadata=_bearing("holding"))
                self._open.add(call)
                outcomes[await _outcome(call)] += 1
                self._open.discard(call)
                last = time.perf_counter()

        started = last = time.perf_counter()
        workers = [asyncio.ensure_future(work(channel)) for channel in self._channels for _ in range(_IN_FLIGHT)]
        seen = -1
        while seen != outcomes.total():
            seen = outcomes.total()
            await asyncio.wait(workers, timeout=_QUIET_S)
        refused = outcomes["RATE_LIMITED"]
        failed = sum(outcomes.values()) - refused
        return Row(
            question,
            num_calls,
            last - started,
            len(self._open),
            AT_ONCE,
            refused,
            failed,
            len(self._open) == AT_ONCE and failed == 0,
        )

    async def hang_up(self) -> None:
        """End the open uploads."""
        for call in list(self._open):
            call.cancel()
        await asyncio.sleep(_QUIET_S)  # until the server has noticed

    @property
    def num_open(self) -> int:
        return len(self._open)


def _keeps_rate(admitted: Sequence[tuple[float, float]]) -> bool:
    """Whether no span from the start of one call to the end of another holds more calls than it may."""
    by_end = sorted(admitted, key=lambda call: call[1])
    for first, _ in admitted:
        num_within = 0
        for began, ended in by_end:
            if began >= first:
                num_within += 1
                if num_within > RATE + RATE * (ended - first):
                    return False
    return True


async def _outcome(call: Any) -> str:
    """OK, the reason of a refusal, or the name of a status."""
    try:
        await call
    except asyncio.CancelledError:
        return "CANCELLED"
    except grpc.aio.AioRpcError as error:
        ended: Any = error
        found: Any = rpc_status.from_call(ended)
        texts = "" if found is None else str(found)
        return "RATE_LIMITED" if "RATE_LIMITED" in texts else error.code().name
    return "OK"


def _bearing(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {_SECRETS[name]}"),)


def _kill(supervisor: int, name: str) -> None:
    """End the process of a front end, as a fault would. `name` is as in metrics."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    for child in children:
        if Path(f"/proc/{child}/cmdline").read_text().startswith(f"kestrel-grpc {name.replace('-', ' ')}"):
            os.kill(int(child), signal.SIGKILL)
            return
    raise RuntimeError("there is no front end")


def _calls_by_frontend(metrics_port: int) -> dict[str, int]:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=_MAX_WAIT_S) as answer:
        text = answer.read().decode()
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith("rpc_server_call_duration_seconds_count{"):
            found = re.search(r'process="([\w-]+)"', line)
            counts["one process" if found is None else found[1]] += int(float(line.rsplit(" ", 1)[1]))
    return dict(counts)


async def run(address: str, pid: int, arguments: argparse.Namespace, metrics_port: int) -> tuple[list[Row], Any]:
    """The rows, and the calls that each front end has had."""
    caller = Caller(address, arguments.connections)
    rows = [await caller.ask(arguments.calls), await caller.hold("at once", arguments.calls)]
    await caller.hang_up()
    rows.append(await caller.hold("hung up", arguments.calls // 10))
    shares = _calls_by_frontend(metrics_port)
    if arguments.frontends > 0:
        before = caller.num_open
        for name in shares:  # until one is found that has some of them
            _kill(pid, name)
            await asyncio.sleep(_QUIET_S)
            if caller.num_open < before:
                print(f"the end of {name} has ended {before - caller.num_open} of {before} uploads")
                break
        rows.append(await caller.hold("killed", arguments.calls // 10))
    await caller.hang_up()
    await caller.close()
    return rows, shares


def main() -> int:
    """Print the table and write the JSON; exit 1 where a limit does not hold."""
    parser = parser_of(__doc__)
    parser.add_argument("--frontends", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--calls", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--connections", type=int, default=8, help="default: %(default)s")
    parser.add_argument(
        "--json", type=Path, default=Path("bench/out/token_limits.json"), help="default: %(default)s"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        metrics_port = free.getsockname()[1]
        free.close()
        tokens = Path(folder) / "tokens.toml"
        lines = (
            line_for(name, secret, frozenset(Scope)).replace(" }", f", {_TOKENS[name]} }}")
            for name, secret in _SECRETS.items()
        )
        tokens.write_text("\n".join(lines))
        options = ["--tokens", str(tokens), "--metrics-port", str(metrics_port)]
        # An upload that is begun waits for a place for its message, and then for its message.
        options += ["--receive-timeout", "600", "--max-receiving-bytes", "2047M", "--max-message-bytes", "33M"]
        if arguments.frontends:
            options += ["--frontends", str(arguments.frontends)]
        with started_server(options) as server:
            rows, shares = asyncio.run(run(server.address, server.pid, arguments, metrics_port))
    head = ("question", "calls", "seconds", "admitted", "bound", "refused", "failed", "holds")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for row in rows:
        print(
            f"| {row.question} | {row.calls:,} | {row.seconds:.1f} | {row.admitted:,} | {row.bound:,.0f} "
            f"| {row.refused:,} | {row.failed} | {'yes' if row.holds else 'NO'} |"
        )
    print("calls of each front end: " + ", ".join(f"{name} {count:,}" for name, count in sorted(shares.items())))
    facts = {
        "machine": machine_facts(),
        "frontends": arguments.frontends,
        "connections": arguments.connections,
        "limits": {"rate": RATE, "burst": RATE, "at_once": AT_ONCE},
        "calls_by_frontend": shares,
        "rows": [asdict(row) for row in rows],
    }
    write_json(arguments.json, facts)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
