"""What ten times as many requests as a server can take do to those that are let in, and how soon others are told.

Starts `kestrel-grpc serve` with the built-in model and room for eight requests. Eight callers keep it full, which
gives its rate; then requests come at ten times that rate, whether the last one is answered or not. Both are
repeated in turns. Wants a machine without other work.
"""

import asyncio
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import grpc

from bench.harness.output import parser_of, write_json
from bench.harness.serving import machine_facts, started_server
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub

NUM_RUNNING, NUM_WAITING = 4, 4
CAPACITY = NUM_RUNNING + NUM_WAITING
NUM_ACCEPTED = 4 * CAPACITY


@dataclass
class Latencies:
    """In seconds, from sending to the whole answer."""

    accepted: list[float] = field(default_factory=list[float])
    refused: list[float] = field(default_factory=list[float])

    @property
    def refusal_p99_s(self) -> float:
        return quantiles(self.refused, n=100)[98]


def question(seed: int) -> wire.CompleteQueryRequest:
    """A question whose answer differs with the seed."""
    sampling = {"temperature": 50.0, "top_p": 1.0, "max_tokens": 24, "seed": seed}
    return wire.CompleteQueryRequest(question="hello", sampling=sampling)


async def ask(stub: Any, seed: int, latencies: Latencies) -> None:
    """One request."""
    began = time.monotonic()
    call = stub.CompleteQuery(question(seed))
    code = await call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED), await call.details()
    seconds = latencies.accepted if code is grpc.StatusCode.OK else latencies.refused
    seconds.append(time.monotonic() - began)


async def at_capacity(stub: Any) -> Latencies:
    """As many callers as the server admits, each asking again as soon as it is answered."""
    latencies = Latencies()

    async def caller(number: int) -> None:
        for turn in range(NUM_ACCEPTED // CAPACITY):
            await ask(stub, 1_000 * number + turn, latencies)

    await asyncio.gather(*(caller(number) for number in range(CAPACITY)))
    return latencies


async def flooded(stub: Any, accepted_per_s: float) -> Latencies:
    """Ten times as many requests in a second as the server answers, whether it has answered the last or not."""
    latencies, loop = Latencies(), asyncio.get_running_loop()
    calls: set[asyncio.Task[None]] = set()
    began, over = loop.time(), loop.create_future()

    def send(number: int) -> None:
        if over.done():
            return
        task = loop.create_task(ask(stub, number, latencies))
        calls.add(task)
        if len(latencies.accepted) >= NUM_ACCEPTED:
            over.set_result(None)
        else:
            loop.call_at(began + (number + 1) / (10 * accepted_per_s), send, number + 1)

    send(0)
    await over
    await asyncio.gather(*calls)
    return latencies


@dataclass(frozen=True)
class Comparison:
    """A flood beside the same server at capacity; medians of those that were let in, in seconds."""

    calm_s: float
    flooded_s: float
    refusal_p99_s: float
    num_refused: int


async def compare(stub: Any) -> Comparison:
    """The server at capacity, then under a flood."""
    began = time.monotonic()
    calm = await at_capacity(stub)
    flood = await flooded(stub, NUM_ACCEPTED / (time.monotonic() - began))
    return Comparison(median(calm.accepted), median(flood.accepted), flood.refusal_p99_s, len(flood.refused))


async def measure(address: str, num_turns: int) -> list[Comparison]:
    """All turns, after a first question."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = VisionServiceStub(channel)
        await ask(stub, 0, Latencies())
        return [await compare(stub) for _ in range(num_turns)]


def main() -> int:
    """Print the table and write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--json", type=Path, default=Path("bench/out/overload.json"), help="default: %(default)s")
    arguments = parser.parse_args()
    options = ("--max-batch-size", str(NUM_RUNNING), "--max-queue", str(NUM_WAITING))
    with started_server(options) as server:
        turns = asyncio.run(measure(server.address, arguments.turns))
    print("| at capacity, ms | in the flood, ms | times as long | 99 of 100 refused within, ms | refused |")
    print("|---|---|---|---|---|")
    for turn in turns:
        print(
            f"| {1e3 * turn.calm_s:,.0f} | {1e3 * turn.flooded_s:,.0f} | {turn.flooded_s / turn.calm_s:.2f} "
            f"| {1e3 * turn.refusal_p99_s:,.1f} | {turn.num_refused:,} |"
        )
    write_json(arguments.json, {"machine": machine_facts(), "turns": [asdict(turn) for turn in turns]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
