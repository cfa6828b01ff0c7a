"""What each frontend costs: our server with an empty engine against a bare server of its kind, in one run.

The bare servers are a grpc.aio servicer, and uvicorn with an application of a few lines.

Both send the same messages from a process of their own on one core; the load comes from another core. Short
rounds alternate between the two, and each ratio is the median over pairs of neighbours, so that what else the
machine does meets both alike. Beside messages or calls per second the table shows the processor time that the
server spent on each, which a slow load generator cannot flatter. The front end alone has an engine that lives on
the event loop; the rows `with a thread` add the engine's own hop to that loop.
"""

# ruff: noqa: N802 (the servicer's methods bear the names of their RPCs)

import argparse
import asyncio
import multiprocessing
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import uvloop

from bench.harness.http_load import HttpLoad, bare_http_server, drive, http_loads
from bench.harness.output import write_json
from bench.harness.triton_load import TritonLoad, bare_service, triton_loads
from bench.harness.triton_load import drive as drive_triton
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import add_VisionServiceServicer_to_server
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.frontends.grpc import vision_service
from kestrel_grpc.process.resources import SWITCH_INTERVAL_S, freeze_existing_objects, return_free_memory
from kestrel_grpc.server import Server
from kestrel_grpc.telemetry.logs import set_up_logging
from kestrel_runtime.api.adapters import AdapterInfo
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.engine import (
    ClearedCache,
    CoreReading,
    EngineInfo,
    EngineStatus,
    ImageInfo,
    Load,
    SkillDefaults,
)
from kestrel_runtime.api.errors import AdapterNotFound
from kestrel_runtime.api.events import (
    Event,
    Finished,
    FinishReason,
    Location,
    PointOutput,
    QueryOutput,
    Started,
    TextChannel,
    TextDelta,
    TextEvent,
    Timing,
    Usage,
)
from kestrel_runtime.api.requests import Point, Request
from kestrel_runtime.api.stream import Outbox, Stream

Serve = Callable[[Connection], Coroutine[Any, Any, None]]

NUM_DELTAS = 64
IMAGE_BYTES = 100_000
TARGET_RATIO = 0.7
EMPTY = "empty"
OVER_HTTP = "empty, over HTTP"

_USAGE = Usage(735, 729, NUM_DELTAS)
# Each piece goes on with another channel than the one before: pieces of one would be joined while they wait, and
# what is measured is the cost of a message.
_CHANNELS = (TextChannel.REASONING, TextChannel.ANSWER)
EVENTS: tuple[TextEvent, ...] = (
    Started(Usage(735, 729)),
    *(TextDelta(" kestrel", _CHANNELS[index % 2], index // 2, 1) for index in range(NUM_DELTAS)),
    Finished(
        QueryOutput(" kestrel" * NUM_DELTAS, None), FinishReason.STOP, _USAGE, Timing(0.0, 0.0, 0.1, 0.1, 0.5)
    ),
)
POINT_EVENTS: tuple[Event, ...] = (
    Started(Usage(735, 729)),
    Finished(PointOutput((Location(0.5, 0.25),)), FinishReason.STOP, _USAGE, Timing(0.0, 0.0, 0.1, 0.1, 0.0)),
)


class EmptyEngine:
    """The real streams without a model: each step hands every request its next event, on the event loop itself."""

    def __init__(self) -> None:
        config = EngineConfig(model="empty")
        self.info = EngineInfo(
            "empty",
            None,
            "none",
            {name: SkillDefaults(0.0, 1.0) for name in ("query", "point")},
            "cpu",
            "float32",
            4096,
            16,
            0,
            config,
        )
        self.status = EngineStatus.SERVING
        self._running: list[tuple[Stream, list[Event]]] = []

    def on_status_change(self, callback: Callable[[EngineStatus], None]) -> None:
        pass  # it never changes

    def submit_samples(
        self,
        request: Request,
        *,
        deadline: float | None = None,
        tenant: str = "",
        namespace: str = "",
        route: str = "",
    ) -> list[Stream]:
        stream = Stream()
        events = POINT_EVENTS if isinstance(request, Point) else EVENTS
        self.add(stream, list(reversed(events)))
        return [stream]

    def expecting(
        self, request: Request, *, deadline: float | None = None, tenant: str = ""
    ) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def inspect_image(self, data: bytes) -> ImageInfo:
        return ImageInfo("image/png", 1, 1)

    def add(self, stream: Stream, events: list[Event]) -> None:
        """Take a request, whose last event comes first."""
        if not self._running:
            stream.loop.call_soon(self._step)
        self._running.append((stream, events))

    async def clear_cache(self, namespace: str | None = None) -> ClearedCache:
        return ClearedCache(0, 0)

    async def forget_image(self, digest: bytes, namespace: str = "") -> ClearedCache:
        return ClearedCache(0, 0)

    def adapters(self) -> list[AdapterInfo]:
        return []

    async def adapter_names(self) -> list[str]:
        return []

    async def load_adapter(self, name: str) -> AdapterInfo:
        raise AdapterNotFound(name)

    async def unload_adapter(self, name: str) -> AdapterInfo:
        raise AdapterNotFound(name)

    async def check_adapter(self, folder: str, name: str) -> str:
        raise AdapterNotFound(name)

    async def adapter_changed(self, name: str) -> None:
        """Does nothing: there are no adapters."""

    def load(self) -> Load:
        return Load(0, 0, 0, 0, 0, 0.0)

    def cores(self) -> list[CoreReading]:
        return [CoreReading(0, self.status, self.info, self.load(), os.getpid())]

    async def drain(self) -> None:
        pass  # nothing is ever worth waiting for

    def close(self) -> None:
        pass  # a thread dies with the process

    def _step(self) -> None:
        for stream, events in self._running:
            stream.deliver([events.pop()])
        self._running = [item for item in self._running if item[1] and not item[0].is_cancelled]
        if self._running:
            self._running[0][0].loop.call_soon(self._step)


class ThreadedEmptyEngine(EmptyEngine):
    """The same from a thread, as the real engine does it: with the hop to the loop, without the model's time."""

    def __init__(self) -> None:
        super().__init__()
        self._arrivals: SimpleQueue[tuple[Stream, list[Event]]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, stream: Stream, events: list[Event]) -> None:
        self._arrivals.put((stream, events))

    def _run(self) -> None:
        outbox = Outbox()
        running: list[tuple[Stream, list[Event]]] = []
        while True:
            if not running:
                running.append(self._arrivals.get())
            while not self._arrivals.empty():
                running.append(self._arrivals.get())
            for stream, events in running:
                outbox.put(stream, [events.pop()])
            outbox.post()
            running = [item for item in running if item[1] and not item[0].is_cancelled]


class BareServicer:
    """The same messages and nothing else."""

    async def Query(self, request: wire.QueryRequest, context: Any) -> AsyncIterator[wire.QueryResponse]:
        for event in EVENTS:
            yield vision_service.query_event(event, "0123456789abcdef0123456789abcdef", "empty")

    async def Point(self, request: wire.PointRequest, context: Any) -> wire.PointResponse:
        finished = POINT_EVENTS[-1]
        assert isinstance(finished, Finished)
        return vision_service.point_response(finished, "0123456789abcdef0123456789abcdef", "empty")

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """The methods that are registered and never called."""
        return self.Point


async def serve_ours(pipe: Connection) -> None:
    """Our server, as the command sets it up."""
    await serve_engine(pipe, EmptyEngine())


async def serve_threaded(pipe: Connection) -> None:
    """Our server, with the hop from an engine's thread."""
    await serve_engine(pipe, ThreadedEmptyEngine())


async def serve_engine(pipe: Connection, engine: EmptyEngine, config: ServerConfig | None = None) -> None:
    """Our server over an engine, by default as the command sets it up when it is told nothing."""
    config = config or ServerConfig(port=0)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    freeze_existing_objects()
    set_up_logging(config.log_level, line_format=config.log_format)
    async with Server(engine, config, at_rest=return_free_memory) as server:
        await answer(pipe, server.http_port or server.port)


async def serve_http(pipe: Connection) -> None:
    """Our server, asked over HTTP."""
    await serve_engine(pipe, EmptyEngine(), ServerConfig(port=0, http_port=0))


async def serve_bare_http(pipe: Connection) -> None:
    """The yardstick of the frontends over HTTP."""
    events = {"/v1/query": EVENTS, "/v1/chat/completions": EVENTS, "/v1/point": POINT_EVENTS}
    async with bare_http_server(events) as port:
        await answer(pipe, port)


async def serve_bare(pipe: Connection) -> None:
    """The yardstick of gRPC."""
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", 64 * 2**20),))
    add_VisionServiceServicer_to_server(BareServicer(), server)
    found = POINT_EVENTS[-1]
    assert isinstance(found, Finished)
    server.add_generic_rpc_handlers((bare_service(EVENTS, found),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await answer(pipe, port)
    await server.stop(None)


async def answer(pipe: Connection, port: int | None) -> None:
    """Tell the port, then the processor time at each question, until the pipe closes."""
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()

    def tell() -> None:
        try:
            pipe.recv()
            pipe.send(time.process_time())
        except EOFError:
            loop.remove_reader(pipe.fileno())
            closed.set()

    pipe.send(port)
    loop.add_reader(pipe.fileno(), tell)
    await closed.wait()


def run_server(serve: Serve, pipe: Connection, core: int | None) -> None:
    """A server's process."""
    pin(core)
    # The lines that a server logs are part of its cost, their display is not.
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        uvloop.run(serve(pipe))


def pin(core: int | None) -> None:
    """Keep this process on one core, where the system can."""
    if core is not None:
        os.sched_setaffinity(0, {core})


class Target:
    """One of the two servers, in a process of its own."""

    def __init__(self, name: str, serve: Serve, core: int | None) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_server, args=(serve, theirs, core), daemon=True)
        self._process.start()
        theirs.close()
        self.address = f"127.0.0.1:{self._pipe.recv()}"
        self.channel = grpc.aio.insecure_channel(self.address)

    def cpu_s(self) -> float:
        """Processor time that the server has used so far."""
        self._pipe.send(None)
        return self._pipe.recv()

    async def close(self) -> None:
        await self.channel.close()
        self._pipe.close()
        self._process.join(10)


@dataclass(frozen=True)
class Workload:
    """A kind of load."""

    name: str
    method: str
    request: bytes
    num_in_flight: int
    is_streaming: bool


WORKLOADS = (
    Workload("streamed messages", "Query", wire.QueryRequest(question="?").SerializeToString(), 64, True),
    Workload("streamed messages", "Query", wire.QueryRequest(question="?").SerializeToString(), 1, True),
    Workload(
        "unary calls with a 100 KB image",
        "Point",
        wire.PointRequest(object="?", image={"data": os.urandom(IMAGE_BYTES)}).SerializeToString(),
        16,
        False,
    ),
    Workload(
        "unary calls with a 1 MB image",
        "Point",
        wire.PointRequest(object="?", image={"data": os.urandom(10 * IMAGE_BYTES)}).SerializeToString(),
        16,
        False,
    ),
)


@dataclass(frozen=True)
class Reading:
    """One round of one load on one server."""

    per_s: float
    server_cpu_us: float


async def measure(target: Target, workload: Workload | HttpLoad | TritonLoad, duration_s: float) -> Reading:
    """Keep `num_in_flight` calls running for a while."""
    started, cpu_s = time.perf_counter(), target.cpu_s()
    if isinstance(workload, HttpLoad):
        count = await drive(target.address, workload, duration_s)
    elif isinstance(workload, TritonLoad):
        count = await drive_triton(target.channel, workload, duration_s)
    else:
        count = await drive_grpc(target, workload, duration_s)
    elapsed_s, cpu_s = time.perf_counter() - started, target.cpu_s() - cpu_s
    return Reading(count / elapsed_s, cpu_s / count * 1e6)


async def drive_grpc(target: Target, workload: Workload, duration_s: float) -> int:
    """How many answers, or messages of streams, came in a while."""
    path = f"/kestrel.v1.VisionService/{workload.method}"
    until = time.perf_counter() + duration_s
    count = 0

    async def stream() -> None:
        nonlocal count
        call = target.channel.unary_stream(path)
        while time.perf_counter() < until:
            async for _ in call(workload.request):
                count += 1

    async def unary() -> None:
        nonlocal count
        call = target.channel.unary_unary(path)
        while time.perf_counter() < until:
            await call(workload.request)
            count += 1

    await asyncio.gather(*((stream if workload.is_streaming else unary)() for _ in range(workload.num_in_flight)))
    return count


async def compare(
    workload: Workload | HttpLoad | TritonLoad, ours: Target, bare: Target, rounds: int, duration_s: float
) -> dict[str, Any]:
    """Alternate between the two; a short round of each goes before to warm up."""
    readings: dict[str, list[Reading]] = {"ours": [], "bare": []}
    for number in range(rounds + 1):
        pair = [("ours", ours), ("bare", bare)]
        for name, target in pair if number % 2 else reversed(pair):
            reading = await measure(target, workload, duration_s)
            if number:
                readings[name].append(reading)
    row: dict[str, Any] = {"load": workload.name, "engine": ours.name, "in_flight": workload.num_in_flight}
    for name, items in readings.items():
        row[f"{name}_per_s"] = statistics.median(item.per_s for item in items)
        row[f"{name}_cpu_us"] = statistics.median(item.server_cpu_us for item in items)
        row[f"{name}_rounds"] = [asdict(item) for item in items]
    pairs = list(zip(readings["ours"], readings["bare"], strict=True))
    row["ratio"] = statistics.median(mine.per_s / theirs.per_s for mine, theirs in pairs)
    row["cpu_ratio"] = statistics.median(theirs.server_cpu_us / mine.server_cpu_us for mine, theirs in pairs)
    return row


async def run(rounds: int, duration_s: float, name: str) -> list[dict[str, Any]]:
    """Every load whose name contains `name`, on every server."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    server_core, client_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    bare, bare_http = Target("bare", serve_bare, server_core), Target("bare", serve_bare_http, server_core)
    targets = [Target(EMPTY, serve_ours, server_core), Target("with a thread", serve_threaded, server_core)]
    over_http = Target(OVER_HTTP, serve_http, server_core)
    pin(client_core)
    pairs: list[tuple[Workload | TritonLoad | HttpLoad, Target, Target]] = [
        *((workload, target, bare) for target in targets for workload in WORKLOADS),
        *((load, targets[0], bare) for load in triton_loads(NUM_DELTAS)),
        *((load, over_http, bare_http) for load in http_loads()),
    ]
    try:
        return [await compare(*pair, rounds, duration_s) for pair in pairs if name in pair[0].name]
    finally:
        for target in (bare, bare_http, over_http, *targets):
            await target.close()


def main() -> int:
    """Print the table and write the JSON; exit 1 where the front end alone misses the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="pairs of rounds per load (default: 12)")
    parser.add_argument("--seconds", type=float, default=0.75, help="length of a round (default: 0.75)")
    parser.add_argument("--json", type=Path, default=Path("bench/out/frontend.json"), help="default: %(default)s")
    parser.add_argument("--load", default="", help="only loads whose name contains this, such as `REST, small`")
    arguments = parser.parse_args()
    results = uvloop.run(run(arguments.rounds, arguments.seconds, arguments.load))
    head = ("load", "in flight", "engine", "ours/s", "bare/s", "ratio", "ours CPU µs", "bare CPU µs", "CPU ratio")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for row in results:
        print(
            f"| {row['load']} | {row['in_flight']} | {row['engine']} "
            f"| {row['ours_per_s']:,.0f} | {row['bare_per_s']:,.0f} | {row['ratio']:.2f} "
            f"| {row['ours_cpu_us']:.1f} | {row['bare_cpu_us']:.1f} | {row['cpu_ratio']:.2f} |"
        )
    facts = {"python": platform.python_version(), "grpcio": grpc.__version__, "cores": os.cpu_count()}
    write_json(arguments.json, {"machine": facts, "results": results})
    return 0 if all(row["ratio"] >= TARGET_RATIO for row in results if row["engine"] == EMPTY) else 1


if __name__ == "__main__":
    sys.exit(main())
