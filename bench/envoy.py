"""What does Envoy cost, where do calls go, and what do callers notice when a server behind it dies, hangs or stops?

Starts four servers with the built-in model on this machine, behind Envoy as `deploy/envoy` configures it, and asks
about a few pictures over gRPC. Every call is sent once by the client: what is sent again, Envoy sends.

`latency`   one caller asks a server directly and through Envoy in turns
`affinity`  4, 16 and 64 callers ask about pictures that have been asked about before, with one
            `hash_balance_factor` and the other in turns. A call is at home if the server of its picture answers,
            which is the server that answers while nobody else calls; it is cached if the server that answers knows
            the picture.
`moves`     the same while one server is stopped and started again. As long as it is away, the home of its pictures
            is the server that answers most calls about each.
`killed`    SIGKILL of one server under load, which is then started again
`hung`      SIGSTOP of one server under load until it gets no calls, then SIGCONT
`rolling`   SIGTERM of each server under load, one after the other, each of which is started again

    python -m bench.envoy
    python -m bench.envoy --only affinity --rounds 4

The status is 1 if a unary call failed, a stream failed that had not begun, or a stream failed while servers were
replaced.
"""

import argparse
import asyncio
import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kestrel_runtime
from bench.harness.envoy import Envoy, envoy
from bench.harness.output import parser_of, write_json
from bench.harness.serving import machine_facts
from bench.harness.workload import chart
from kestrel_client import AsyncClient
from kestrel_client.errors import KestrelClientError
from kestrel_grpc.cli.bench.numbers import percentiles
from kestrel_grpc.cli.bench.plot import number

NUM_SERVERS = 4
NUM_PICTURES = 48
FACTORS = (150, 200)
CALLERS = (4, 16, 64)
SCENARIOS = ("latency", "affinity", "moves", "killed", "hung", "rolling")

_IMAGES = "kestrel-images"
_QUESTION = "What is shown?"
_GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 2}
_OPTIONS = (
    *("--preprocess-threads", "1", "--log-level", "warning"),
    # All pictures fit into each server, with the requests of all callers.
    *("--kv-pages", str(50 * (NUM_PICTURES + 16))),
)
_START_S, _STOP_S, _CALL_S = 300.0, 120.0, 300.0
_POLL_S = 0.02
_NUM_UNARY, _NUM_STREAMS = 12, 4
_BEFORE_S, _AFTER_S = 3.0, 3.0
_PAUSE_AFTER_ERROR_S = 0.1


class NanoServer:
    """A server with a copy of the built-in model, in a process of its own, on a port that it keeps.

    Its answers name the model after the folder, by which callers tell the servers apart.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._model = folder / name
        self._log = folder / f"{name}.log"
        self._port = 0
        self._process: subprocess.Popen[str] | None = None
        shutil.copytree(Path(kestrel_runtime.__path__[0]) / "nano", self._model)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def begin(self) -> None:
        """Start the process; `wait_until_serving` waits for its port."""
        options = ("--port", str(self._port), "--model", str(self._model), *_OPTIONS)
        with self._log.open("a") as stderr:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "kestrel_grpc", "serve", *options),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def wait_until_serving(self) -> None:
        """Raises RuntimeError where it has ended instead."""
        process = self._running()
        assert process.stdout is not None, "asked for a pipe"
        line = process.stdout.readline()
        if " on " not in line:
            raise RuntimeError(f"{self.name} did not start: {self._log.read_text()[-2000:]}")
        self._port = int(line.split(" on ")[1].split()[0].rpartition(":")[2])

    def send(self, number: signal.Signals) -> None:
        """A signal to the process."""
        self._running().send_signal(number)

    def wait_until_ended(self) -> int:
        """The exit status. Raises `subprocess.TimeoutExpired`."""
        return self._running().wait(_STOP_S)

    def kill(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "has begun"
        return self._process


@contextlib.contextmanager
def nano_servers(folder: Path) -> Iterator[list[NanoServer]]:
    """All of them, until the block ends."""
    servers = [NanoServer(f"server-{index + 1}", folder) for index in range(NUM_SERVERS)]
    try:
        for server in servers:
            server.begin()
        for server in servers:
            server.wait_until_serving()
        yield servers
    finally:
        for server in servers:
            server.kill()


def calling(address: str) -> AsyncClient:
    """A client that sends each call once."""
    return AsyncClient(address, max_retries=0, max_retry_s=0, timeout_s=_CALL_S, store_from_bytes=None)


@dataclass(frozen=True, slots=True)
class Answer:
    """A call that ended well. Times are those of the monotonic clock."""

    picture: int
    server: str
    is_cached: bool
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that failed: `kind` is "unary", "stream" before its first piece, or "begun stream"."""

    kind: str
    reason: str
    took_s: float


@dataclass(slots=True)
class Calls:
    """What became of the calls of a load."""

    answers: list[Answer] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def failed(self, *kinds: str) -> int:
        return sum(failure.kind in kinds for failure in self.failures)

    def longest_s(self) -> float:
        took = (*(item.ended_s - item.began_s for item in self.answers), *(item.took_s for item in self.failures))
        return max(took, default=0.0)


class Load:
    """Callers that ask about pictures, each one call after the other, while the block runs."""

    def __init__(
        self, client: AsyncClient, pictures: Sequence[bytes], num_unary: int, num_streams: int = 0
    ) -> None:
        self.calls = Calls()
        self._client = client
        self._pictures = pictures
        self._is_over = False
        kinds = (*[self._unary] * num_unary, *[self._stream] * num_streams)
        self._callers = [
            asyncio.ensure_future(self._keep_calling(call, random.Random(index)))
            for index, call in enumerate(kinds)
        ]

    async def __aenter__(self) -> Calls:
        return self.calls

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._callers)

    async def _keep_calling(self, call: Callable[[int], Awaitable[bool]], chance: random.Random) -> None:
        while not self._is_over:
            if not await call(chance.randrange(len(self._pictures))):
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def _unary(self, picture: int) -> bool:
        began_s = time.monotonic()
        try:
            result = await self._client.complete_query(self._pictures[picture], _QUESTION, **_GREEDY)
        except KestrelClientError as error:
            self.calls.failures.append(Failure("unary", _reason(error), time.monotonic() - began_s))
            return False
        self._note(picture, result, began_s)
        return True

    async def _stream(self, picture: int) -> bool:
        began_s, kind = time.monotonic(), "stream"
        stream = self._client.query(self._pictures[picture], _QUESTION, temperature=0.0, max_tokens=64)
        try:
            async for _ in stream:
                kind = "begun stream"
            self._note(picture, await stream.result(), began_s)
        except KestrelClientError as error:
            # A stream begins with a message that has no text.
            kind = "begun stream" if error.reason == "SERVER_LOST" else kind
            self.calls.failures.append(Failure(kind, _reason(error), time.monotonic() - began_s))
            return False
        return True

    def _note(self, picture: int, result: Any, began_s: float) -> None:
        is_cached = result.usage.cached_token_count > 0
        self.calls.answers.append(Answer(picture, result.model, is_cached, began_s, time.monotonic()))


def _reason(error: KestrelClientError) -> str:
    return f"{error.code.name} {error.reason}"


async def homes_of(client: AsyncClient, pictures: Sequence[bytes]) -> list[str]:
    """The server of each picture, asked one after the other. Afterwards it knows the picture."""
    return [(await client.complete_query(picture, _QUESTION, **_GREEDY)).model for picture in pictures]


def share(hits: int, total: int) -> float:
    """NaN without any."""
    return hits / total if total else math.nan


class Run:
    """The scenarios, over the same servers. Each leaves all of them serving."""

    def __init__(self, servers: Sequence[NanoServer], folder: Path, arguments: argparse.Namespace) -> None:
        self._servers = {server.name: server for server in servers}
        self._addresses = [server.address for server in servers]
        self._folder = folder
        self._num_rounds: int = arguments.rounds
        self._window_s: float = arguments.seconds
        self._num_faults: int = arguments.faults
        self._num_calls: int = arguments.calls
        self._pictures = [chart(seed, 378, 378) for seed in range(NUM_PICTURES)]
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.num_complaints = 0

    async def latency(self) -> None:
        async with self._envoy() as balancer, calling(balancer.address) as through:
            home = (await homes_of(through, self._pictures[:1]))[0]
            async with calling(self._servers[home].address) as direct:
                picture = self._pictures[0]

                async def ask(client: AsyncClient) -> object:
                    return await client.complete_query(picture, _QUESTION, **_GREEDY)

                for name, call in (("CompleteQuery", ask), ("ListModels", AsyncClient.list_models)):
                    self._add("latency", {"call": name, **await self._compare(call, direct, through)})

    async def _compare(
        self, call: Callable[[AsyncClient], Awaitable[object]], direct: AsyncClient, through: AsyncClient
    ) -> dict[str, Any]:
        times_ms: dict[str, list[float]] = {"direct": [], "envoy": []}
        for index in range(self._num_calls + 20):
            turns = [("direct", direct), ("envoy", through)]
            for name, client in turns if index % 2 else reversed(turns):
                began_s = time.perf_counter()
                await call(client)
                if index >= 20:
                    times_ms[name].append(1e3 * (time.perf_counter() - began_s))
        row: dict[str, Any] = {"calls": self._num_calls}
        of_direct, of_envoy = (percentiles(times_ms[name], (50, 99)) for name in ("direct", "envoy"))
        for title, first in of_direct.items():
            second = of_envoy[title]
            row |= {f"direct_{title}_ms": first, f"envoy_{title}_ms": second, f"added_{title}_ms": second - first}
        return row

    async def affinity(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients: dict[int, AsyncClient] = {}
            for factor in FACTORS:
                balancer = await stack.enter_async_context(self._envoy(factor))
                clients[factor] = await stack.enter_async_context(calling(balancer.address))
            homes = {factor: await homes_of(client, self._pictures) for factor, client in clients.items()}
            for num_callers in CALLERS:
                answers: defaultdict[int, list[Answer]] = defaultdict(list)
                for index in range(self._num_rounds):
                    for factor in FACTORS if index % 2 else reversed(FACTORS):
                        async with Load(clients[factor], self._pictures, num_callers) as calls:
                            await asyncio.sleep(self._window_s)
                        answers[factor] += calls.answers
                        self._complain_of(calls, "unary")
                for factor in FACTORS:
                    self._add_affinity("affinity", factor, num_callers, answers[factor], homes[factor])

    async def moves(self) -> None:
        for factor in FACTORS:
            async with self._envoy(factor) as balancer, calling(balancer.address) as client:
                homes = await homes_of(client, self._pictures)
                leaver = self._servers[homes[0]]
                async with Load(client, self._pictures, 16) as calls:
                    await asyncio.sleep(_BEFORE_S)
                    left_s = time.monotonic()
                    leaver.send(signal.SIGTERM)
                    await self._until_without(balancer, leaver)
                    gone_s = time.monotonic()
                    await asyncio.to_thread(leaver.wait_until_ended)
                    await self._restart(leaver, balancer)
                    back_s = time.monotonic()
                    await asyncio.sleep(_AFTER_S)
                self._complain_of(calls, "unary")
                other_homes = moved(calls.answers, homes, leaver.name, gone_s, back_s)
                self._add_affinity("moves", factor, 16, calls.answers, homes, other_homes, away_s=back_s - left_s)

    async def killed(self) -> None:
        for index in range(self._num_faults):
            async with self._loaded() as (balancer, calls):
                victim = list(self._servers.values())[index % NUM_SERVERS]
                victim.kill()
                noticed_s = await self._until_without(balancer, victim)
                await self._restart(victim, balancer)
            self._add_fault("killed", calls, "unary", "stream", noticed_s=noticed_s)

    async def hung(self) -> None:
        async with self._loaded() as (balancer, calls):
            victim = next(iter(self._servers.values()))
            victim.send(signal.SIGSTOP)
            try:
                ejected_s = await self._until_without(balancer, victim)
                # Until Envoy has given up the connections, whose calls it then sends to others.
                await asyncio.sleep(15.0 + _AFTER_S)
            finally:
                victim.send(signal.SIGCONT)
            began_s = time.monotonic()
            await asyncio.to_thread(balancer.wait_for, self._addresses)
            back_s = time.monotonic() - began_s
        self._add_fault("hung", calls, "unary", "stream", noticed_s=ejected_s, back_s=back_s)

    async def rolling(self) -> None:
        began_s = time.monotonic()
        async with self._loaded() as (balancer, calls):
            for server in self._servers.values():
                server.send(signal.SIGTERM)
                await asyncio.to_thread(server.wait_until_ended)
                await self._restart(server, balancer)
            await asyncio.sleep(_AFTER_S)
        took_s = time.monotonic() - began_s
        self._add_fault("rolling", calls, "unary", "stream", "begun stream", took_s=took_s)

    @contextlib.asynccontextmanager
    async def _loaded(self) -> AsyncIterator[tuple[Envoy, Calls]]:
        """Envoy as it is configured, and a load that has run for a while."""
        async with (
            self._envoy() as balancer,
            calling(balancer.address) as client,
            Load(client, self._pictures, _NUM_UNARY, _NUM_STREAMS) as calls,
        ):
            await asyncio.sleep(_BEFORE_S)
            # On a busy machine a server may miss a check.
            await asyncio.to_thread(balancer.wait_for, self._addresses)
            yield balancer, calls

    @contextlib.asynccontextmanager
    async def _envoy(self, factor: int | None = None) -> AsyncIterator[Envoy]:
        """With another `hash_balance_factor` than that of the file, if one is given."""

        def change(configuration: dict[str, Any]) -> None:
            for cluster in configuration["static_resources"]["clusters"]:
                limit = cluster["common_lb_config"].get("consistent_hashing_lb_config")
                if factor is not None and limit is not None:
                    limit["hash_balance_factor"] = factor

        with (
            tempfile.TemporaryDirectory(dir=self._folder) as folder,
            envoy(self._addresses, Path(folder), change) as balancer,
        ):
            yield balancer

    async def _restart(self, server: NanoServer, balancer: Envoy) -> None:
        """Start a server that has ended, and wait until it gets calls."""
        await asyncio.to_thread(server.kill)
        server.begin()
        await asyncio.wait_for(asyncio.to_thread(server.wait_until_serving), _START_S)
        await asyncio.to_thread(balancer.wait_for, self._addresses)

    async def _until_without(self, balancer: Envoy, server: NanoServer) -> float:
        """Seconds until calls about images no longer go to a server."""
        began_s = time.monotonic()
        while server.address in await asyncio.to_thread(balancer.healthy, _IMAGES):
            if time.monotonic() > began_s + _STOP_S:
                raise TimeoutError(f"{server.name} still gets calls")
            await asyncio.sleep(_POLL_S)
        return time.monotonic() - began_s

    def _add_affinity(
        self,
        scenario: str,
        factor: int,
        num_callers: int,
        answers: Sequence[Answer],
        homes: Sequence[str],
        other_homes: Mapping[int, str] | None = None,
        **facts: float,
    ) -> None:
        """`other_homes` are those of pictures whose server was away for a while."""
        others = other_homes or {}
        num_home = sum(item.server in (homes[item.picture], others.get(item.picture)) for item in answers)
        busiest = max(Counter(item.server for item in answers).values(), default=0)
        row = {
            "factor": factor,
            "callers": num_callers,
            "calls": len(answers),
            "at_home": share(num_home, len(answers)),
            "cached": share(sum(item.is_cached for item in answers), len(answers)),
            "busiest_server": share(busiest, len(answers)),
            "p50_ms": percentiles((1e3 * (item.ended_s - item.began_s) for item in answers), (50,))["p50"],
        }
        self._add(scenario, row | facts)

    def _add_fault(self, scenario: str, calls: Calls, *must_not_fail: str, **facts: float) -> None:
        """The kinds of failures that must not happen are complaints."""
        self._complain_of(calls, *must_not_fail)
        row = {
            "calls": len(calls.answers) + len(calls.failures),
            "failed_unary": calls.failed("unary"),
            "failed_streams": calls.failed("stream"),
            "failed_begun_streams": calls.failed("begun stream"),
            "longest_s": calls.longest_s(),
            **facts,
        }
        self._add(scenario, row | {"reasons": dict(Counter(item.reason for item in calls.failures))})

    def _complain_of(self, calls: Calls, *kinds: str) -> None:
        self.num_complaints += calls.failed(*kinds)

    def _add(self, scenario: str, row: dict[str, Any]) -> None:
        rows = self.rows.setdefault(scenario, [])
        if not rows:
            print(f"\n{scenario}: {', '.join(row)}")
        rows.append(row)
        cells = (number(item) if isinstance(item, float) else str(item) for item in row.values())
        print("  ".join(cell.rjust(7) for cell in cells), flush=True)


def moved(
    answers: Iterable[Answer], homes: Sequence[str], leaver: str, gone_s: float, back_s: float
) -> dict[int, str]:
    """Of the pictures of a server that is away: the server that answers most calls about each meanwhile."""
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for item in answers:
        if homes[item.picture] == leaver and gone_s <= item.began_s and item.ended_s <= back_s:
            found[item.picture][item.server] += 1
    return {picture: counts.most_common(1)[0][0] for picture, counts in found.items()}


async def run(arguments: argparse.Namespace) -> Run:
    """The chosen scenarios, one after the other."""
    with tempfile.TemporaryDirectory() as name, nano_servers(Path(name)) as servers:
        outcome = Run(servers, Path(name), arguments)
        for scenario in arguments.only:
            await getattr(outcome, scenario)()
        return outcome


def _scenarios(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(SCENARIOS):
        raise argparse.ArgumentTypeError(f"no such scenarios: {', '.join(sorted(unknown))}")
    return chosen


def main() -> int:
    """Run the scenarios, print a table of each, write the numbers; 1 if there are complaints."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", type=_scenarios, default=list(SCENARIOS), help="of these, with commas")
    parser.add_argument("--calls", type=int, default=500, help="of each kind for latency (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of each factor and load (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a round (default: %(default)g)")
    parser.add_argument("--faults", type=int, default=3, help="servers to kill (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("bench/out/envoy.json"), help="%(default)s")
    arguments = parser.parse_args()
    began_load = os.getloadavg()[0]
    outcome = asyncio.run(run(arguments))
    facts = {**machine_facts(), "load average at the start": began_load}
    write_json(arguments.json, {"machine": facts, **outcome.rows})
    print(f"\n{facts}\n{outcome.num_complaints} calls failed that must not")
    return 1 if outcome.num_complaints else 0


if __name__ == "__main__":
    sys.exit(main())
