"""What do the caches bring, what do they cost, and what do they tell others? One command a question.

`tiers` serves each setting of the caches, or each number of front ends, and loads the servers in turns with
pictures that come again. Rows are workloads of `workload.py` at a number of requests at once: `cached` asks about
one picture again and again, `repeats-50` shows in half of its requests one of 1,000 popular pictures (by Zipf's
law) and in the others pictures that never come again. Each value is the median over the rounds; the share of hits
is that of the last round, since a cache fills up in the course of a run.

`host` tells how much processor time of the host a request takes whose image is known: many questions about one
image are asked at once, and steps after the first return at once (`instant_steps.py`), so that the model and the
launching of its kernels have no part. First the engine alone is asked, in this process, then an engine core by two
clients of its own, then a server through gRPC; its time is that of all its threads, beside it that of the event
loop alone. To compare two checkouts, run this in each of them, in turns.

`opcodes` counts the opcodes of Python that such a request takes in the threads of an engine core, and in the
clients that stand for front ends, by function. The count is the same on every machine with the same version of
Python, within a few in a thousand. It has no part of gRPC.

`stored` tells from which size on naming a stored image saves time, compared with sending it again. Calls of both
kinds take turns over the loopback; a network adds the time in which it carries the bytes. All images are one small
JPEG followed by bytes that decoders ignore, so that the model's work is the same for every size.
`Client(store_from_bytes=…)` has its default from this.

`leak` attacks the prefix cache: does the time of an answer tell a caller what another tenant has asked about? In
each trial there are two new images. The victim asks about one of them, which is drawn at random; then the attacker
asks another question about the first and measures how long its one-token answer takes. From that time alone the
attacker has to tell which image the victim has asked about. The victim always asks, so that the server has done the
same work before. The attacker's token has a namespace of its own; in other trials, in between, it shares the
victim's namespace. The area under the ROC curve is the probability that a trial with the victim's image has the
shorter time: 0.5 is a coin, 1 is certainty. Across namespaces it must be within 0.05 of 0.5. Within one it must be
at least 0.95: otherwise the measurement could not see a hit, and the first number would mean nothing. With
`--target crops` the attacker's file is another one with the same pixels: neither its pages nor its embeddings are
known, and the time depends on its crops, of which there are some.

    python -m bench.caches tiers --model /tmp/md2 -- --kv-pages 12000
    python -m bench.caches host
    python -m bench.caches opcodes
    python -m bench.caches stored --calls 40
    nice python -m bench.caches leak
    nice python -m bench.caches leak --target crops
"""

import argparse
import asyncio
import contextlib
import gc
import hashlib
import io
import itertools
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import uvloop
from PIL import Image

from bench.harness.core_clients import CoreClients, question
from bench.harness.engines import closed_loop
from bench.harness.instant_steps import leave_out_model
from bench.harness.load import LoadProcesses
from bench.harness.opcodes import Opcodes
from bench.harness.output import parser_of, write_json
from bench.harness.rounds import Load, ask_once, rounds
from bench.harness.serving import machine_facts, started_server
from bench.harness.summary import Row
from bench.harness.workload import WORKLOADS, chart
from kestrel_client import Client
from kestrel_grpc.access.token_file import Scope, line_for, new_secret
from kestrel_grpc.cli.bench.workload import HEIGHT_PX, WIDTH_PX
from kestrel_grpc.multiprocess.engine_channel.core_server import CoreServer
from kestrel_grpc.multiprocess.engine_channel.endpoint import CoreEndpoint
from kestrel_grpc.multiprocess.supervision.child import NEW_OBJECTS_OF_CORE
from kestrel_grpc.multiprocess.supervision.child import SWITCH_INTERVAL_S as CORE_SWITCH_INTERVAL_S
from kestrel_grpc.process.resources import SWITCH_INTERVAL_S, freeze_existing_objects
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import KestrelError
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Query
from kestrel_runtime.engine.engine import LocalEngine

_IMAGE_PX = 64
"""Sides of the images of `stored` and `leak`, one crop each."""


TIER_ROWS = "cached:1,cached:64,repeats-0:64,repeats-50:64,repeats-90:64"
VARIANTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "both": ("--frontends", "0"),
        "prefixes": ("--frontends", "0", "--image-cache-bytes", "0"),
        "embeddings": ("--frontends", "0", "--prefix-cache", "off"),
        "neither": ("--frontends", "0", "--prefix-cache", "off", "--image-cache-bytes", "0"),
        "frontends-1": ("--frontends", "1"),
        "frontends-2": ("--frontends", "2"),
        "frontends-4": ("--frontends", "4"),
        "devices-all": ("--frontends", "4", "--devices", "all"),
    }
)
"""Options of the server by the caches that it has, and with both by the number of its front ends and GPUs."""
_CACHES = "both,prefixes,embeddings,neither"


_TIERS_HEAD = "| load | variant | requests/s | p50 ms | p99 ms | hits |\n|---|---|---|---|---|---|"


def _tiers_lines(load: Load, by_name: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    for name, rows in by_name.items():
        rate, p50, p99 = (
            statistics.median(values)
            for values in zip(
                *((row.requests_per_s, row.total_ms["p50"], row.total_ms["p99"]) for row in rows), strict=True
            )
        )
        cells = (str(load), name, f"{rate:,.1f}", f"{p50:.2f}", f"{p99:.2f}", f"{100 * rows[-1].hit_share:.0f}%")
        yield "| " + " | ".join(cells) + " |"


def tiers(arguments: argparse.Namespace) -> int:
    """Load one server for each setting, in turns."""
    loads = [Load.of(text) for text in arguments.rows.split(",")]
    names = arguments.variants.split(",")
    most = max(load.concurrency for load in loads)
    options = ("--model", arguments.model, "--max-batch-size", str(most), *arguments.server_options)
    program = "bench.harness.instant_steps" if arguments.instant == "on" else "kestrel_grpc"
    results: list[tuple[Load, dict[str, list[Row]]]] = []
    with contextlib.ExitStack() as stack:
        processes: dict[str, LoadProcesses] = {}
        for name in names:
            server = stack.enter_context(started_server((*options, *VARIANTS[name]), program=program))
            print(f"{name}: {server.address} after {server.ready_s:.1f} s", flush=True)
            processes[name] = stack.enter_context(
                LoadProcesses(server.address, arguments.processes, arguments.pictures)
            )
        print(_TIERS_HEAD)
        for load in loads:
            ask_once(load, processes)
            found: dict[str, list[Row]] = {name: [] for name in processes}
            for name, row in rounds(load, processes, arguments.rounds, arguments.seconds, arguments.warm_up):
                found[name].append(row)
            results.append((load, found))
            print("\n".join(_tiers_lines(load, found)), flush=True)  # whoever ends the run early has these
    rows = {
        f"{load.workload.name}:{load.concurrency}": {
            name: [row.as_json() for row in rows] for name, rows in by_name.items()
        }
        for load, by_name in results
    }
    variants = {name: list(VARIANTS[name]) for name in names}
    facts = {"machine": machine_facts(), "program": program, "options": list(options), "variants": variants}
    write_json(arguments.json, facts | {"rows": rows})
    return 0


_WARM_UP_REQUESTS = 500
_ENGINE_THREAD = "kestrel-engine"


def _questions(count: int, image: bytes) -> Iterator[Query]:
    """Questions about one image in turn."""
    for number in range(count):
        yield question(image, number)


def engine_costs(num_requests: int, num_at_once: int, num_rounds: int) -> Iterator[dict[str, float]]:
    """Processor µs of a request by thread, round by round. Raises RuntimeError where a request misses the cache."""
    image = chart(0)
    engine = LocalEngine.start(EngineConfig(device="cpu", max_batch_size=num_at_once))
    interval_s = sys.getswitchinterval()

    def check(number: int, answer: Finished | KestrelError) -> None:
        if isinstance(answer, KestrelError):
            raise answer
        if number > num_at_once and not answer.usage.num_cached_tokens:
            raise RuntimeError(f"request {number} found nothing in the cache")

    run = partial(closed_loop, engine, num_at_once=num_at_once, answered=check)
    try:
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in the server
        with leave_out_model():
            asyncio.run(run(_questions(_WARM_UP_REQUESTS, image)))
            for _ in range(num_rounds):
                before = _thread_times()
                asyncio.run(run(_questions(num_requests, image)))
                by_thread = {
                    kind: 1e6 * (seconds - before.get(kind, 0.0)) / num_requests
                    for kind, seconds in _thread_times().items()
                }
                yield {"all": sum(by_thread.values()), **by_thread}
    finally:
        sys.setswitchinterval(interval_s)
        engine.close()


@contextlib.asynccontextmanager
async def _asked_core(
    num_at_once: int, num_clients: int, *, is_streamed: bool, counts_opcodes: bool = False
) -> AsyncIterator[CoreClients]:
    """Serve an engine core without its model, and yield its clients, which have asked."""
    interval_s = sys.getswitchinterval()
    with tempfile.TemporaryDirectory() as name:
        endpoint = CoreEndpoint(Path(name), 0)
        config = EngineConfig(device="cpu", max_batch_size=num_at_once)
        engine = LocalEngine.start(config, flight_record=endpoint.flight_record)
        server = CoreServer(engine, endpoint)
        await server.start()
        thresholds = gc.get_threshold()
        try:
            sys.setswitchinterval(CORE_SWITCH_INTERVAL_S)  # as in the server
            freeze_existing_objects(NEW_OBJECTS_OF_CORE)
            clients = CoreClients.started(
                endpoint.folder,
                num_clients,
                num_at_once,
                chart(0),
                is_streamed=is_streamed,
                counts_opcodes=counts_opcodes,
            )
            with leave_out_model(), clients as asked:
                await asked.ask(_WARM_UP_REQUESTS)
                yield asked
        finally:
            sys.setswitchinterval(interval_s)
            gc.unfreeze()
            gc.set_threshold(*thresholds)
            await server.close()
            await asyncio.to_thread(engine.close)


async def core_costs(
    num_requests: int, num_at_once: int, num_rounds: int, *, is_streamed: bool, num_clients: int = 2
) -> list[dict[str, float]]:
    """Processor µs of a request in an engine core by thread, and in the clients that stand for front ends.

    Raises RuntimeError where a request fails or misses the cache.
    """
    found: list[dict[str, float]] = []
    async with _asked_core(num_at_once, num_clients, is_streamed=is_streamed) as asked:
        for _ in range(num_rounds):
            before = _thread_times()
            clients_s = await asked.ask(num_requests)
            after = _thread_times()
            names = ("event loop", "engine thread")
            by_thread = {name: 1e6 * (after[name] - before[name]) / num_requests for name in names}
            clients_us = 1e6 * clients_s / num_requests
            found.append({"all": sum(by_thread.values()), **by_thread, "front ends": clients_us})
    return found


async def core_opcodes(
    num_requests: int, num_at_once: int, *, is_streamed: bool, num_clients: int = 2
) -> dict[str, dict[str, float]]:
    """Opcodes of a request in the threads of an engine core and in its clients, by function.

    Raises RuntimeError where a request fails or misses the cache.
    """
    counted = Opcodes()
    try:
        asked_core = _asked_core(num_at_once, num_clients, is_streamed=is_streamed, counts_opcodes=True)
        async with asked_core as asked:
            before = {**counted.reading(), "clients": await asked.opcodes()}
            await asked.ask(num_requests)
            after = {**counted.reading(), "clients": await asked.opcodes()}
    finally:
        counted.stop()
    return {
        name: {key: count / num_requests for key, count in (after[thread] - before[thread]).most_common()}
        for name, thread in (
            ("engine thread", _ENGINE_THREAD),
            ("event loop", "MainThread"),
            ("front ends", "clients"),
        )
    }


def server_costs(name: str, seconds: float, num_at_once: int, num_rounds: int) -> Iterator[dict[str, float]]:
    """Processor µs of a request of a workload through gRPC, round by round.

    Raises RuntimeError where one fails or misses the cache.
    """
    options = ("--device", "cpu", "--max-batch-size", str(num_at_once))
    workload = WORKLOADS[name]
    with (
        started_server(options, program="bench.harness.instant_steps") as server,
        LoadProcesses(server.address, 1, 1) as load,
    ):
        load.closed(workload, num_at_once, 1.0, 20.0)
        for _ in range(num_rounds):
            before, began = _process_times(server.pid), time.perf_counter()
            recording = load.closed(workload, num_at_once, seconds, 0.0)
            after, ended = _process_times(server.pid), time.perf_counter()
            samples = recording.samples
            if any(sample.error or not sample.num_cached_tokens for sample in samples):
                raise RuntimeError("a request failed, or found nothing in the cache")
            window = recording.window
            rate = sum(window.start <= sample.ended < window.end for sample in samples) / window.duration_s
            num_requests = rate * (ended - began)
            spent = {name: 1e6 * (after[name] - before[name]) / num_requests for name in after}
            yield {**spent, "requests/s": rate}


def _thread_times() -> dict[str, float]:
    """Processor seconds of the threads of this process, by kind of thread."""
    found: defaultdict[str, float] = defaultdict(float)
    for thread in threading.enumerate():
        assert thread.ident is not None, "it runs"
        kind = "preprocessing" if thread.name.startswith("kestrel-preprocess") else thread.name
        kind = {"MainThread": "event loop", _ENGINE_THREAD: "engine thread"}.get(kind, kind)
        found[kind] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


def _process_times(pid: int) -> dict[str, float]:
    """Processor seconds of a process: of all its threads, and of the first one."""
    tasks = Path(f"/proc/{pid}/task")
    times = {int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks.iterdir()}
    return {"all": sum(times.values()), "event loop": times[pid]}


def _host_line(name: str, rounds: Sequence[Mapping[str, float]]) -> str:
    """Medians in µs, and all rounds of the first value."""
    parts = ", ".join(
        f"{part} {statistics.median(costs[part] for costs in rounds):.0f}"
        for part in rounds[0]
        if statistics.median(costs[part] for costs in rounds) >= 1
    )
    totals = " ".join(f"{costs['all']:.0f}" for costs in rounds)
    return f"{name}: {parts} ({totals})"


def host(arguments: argparse.Namespace) -> int:
    """Measure processor time of the engine, of an engine core, then of a server."""
    how_many = arguments.requests, arguments.at_once, arguments.rounds
    found = {"engine": list(engine_costs(*how_many))}
    for name, is_streamed in (("core, streamed", True), ("core, whole", False)):
        found[name] = uvloop.run(core_costs(*how_many, is_streamed=is_streamed))
    for name, workload in (("server, streamed", "cached"), ("server, whole", "cached-whole")):
        found[name] = list(server_costs(workload, arguments.seconds, arguments.at_once, arguments.rounds))
    print("processor time of a request in µs, medians (and that of all threads by round)")
    for name, costs in found.items():
        print(_host_line(name, costs))
    write_json(arguments.json, {"machine": machine_facts(), **found})
    return 0


def opcodes(arguments: argparse.Namespace) -> int:
    """Count opcodes of an engine core and its clients."""
    found = {
        name: uvloop.run(core_opcodes(arguments.requests, arguments.at_once, is_streamed=is_streamed))
        for name, is_streamed in (("streamed", True), ("whole", False))
    }
    for name, by_thread in found.items():
        print(f"opcodes of a request, {name}")
        for thread, by_function in by_thread.items():
            print(f"  {thread}: {sum(by_function.values()):,.0f}")
            for function, count in itertools.islice(by_function.items(), arguments.functions):
                print(f"    {count:8,.1f} {function}")
    write_json(arguments.json, {"machine": machine_facts(), **found})
    return 0


SIZES_KIB = (16, 64, 128, 256, 512, 1024, 4096)
AnyResult = TypeVar("AnyResult")


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one size in seconds."""

    size_kib: int
    sent_s: list[float]
    """Of calls with the image in their message."""
    named_s: list[float]
    """Of calls that name the stored image."""
    digest_s: float
    """What the client needs for the image's name."""
    storing_s: float

    def as_text(self) -> str:
        """A row of the table, in ms."""
        saved_ms = (statistics.median(self.sent_s) - statistics.median(self.named_s)) * 1e3
        fastest_ms = (min(self.sent_s) - min(self.named_s)) * 1e3
        own = f"{self.digest_s * 1e3:.2f} | {self.storing_s * 1e3:.0f}"
        return f"| {self.size_kib} KiB | {fastest_ms:.1f} | {saved_ms:.1f} | {own} |"


def padded_image(num_bytes: int) -> bytes:
    """A small JPEG followed by zeros."""
    file = io.BytesIO()
    Image.linear_gradient("L").resize((_IMAGE_PX, _IMAGE_PX)).convert("RGB").save(file, "JPEG")
    return file.getvalue().ljust(num_bytes, b"\0")


def measure(client: Client, size_kib: int, num_calls: int) -> Times:
    """Calls of one size; the first of each kind is not counted."""
    data = padded_image(size_kib * 1024)
    storing_s, stored = _timed(lambda: client.upload_image(data))
    sent_s: list[float] = []
    named_s: list[float] = []
    for number in range(num_calls + 1):
        for image, times in ((data, sent_s), (stored, named_s)):
            seconds, _ = _timed(lambda image=image: client.point(image, "shape", max_objects=1))
            if number:
                times.append(seconds)
    digest_s = min(_timed(lambda: hashlib.sha256(data).digest())[0] for _ in range(5))
    return Times(size_kib, sent_s, named_s, digest_s, storing_s)


def _timed(call: Callable[[], AnyResult]) -> tuple[float, AnyResult]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def stored(arguments: argparse.Namespace) -> int:
    """Time calls of each size."""
    print("| size | fastest sent − fastest named, ms | medians, ms | SHA-256 in the client, ms | storing, ms |")
    print("|---|---|---|---|---|")
    rows: list[Times] = []
    options = ("--device", "cpu", *arguments.server_options)
    with started_server(options) as server, Client(server.address, store_from_bytes=None) as client:
        for size_kib in SIZES_KIB:
            rows.append(measure(client, size_kib, arguments.calls))
            print(rows[-1].as_text(), flush=True)
    facts = {"machine": machine_facts(), "load": os.getloadavg()}
    write_json(arguments.json, facts | {"sizes": [asdict(row) for row in rows]})
    return 0


MAX_FROM_COIN, MIN_WITHIN = 0.05, 0.95
_NUM_WARM_UPS = 5
_LEAK_OPTIONS = ("--devices", "cpu", "--kv-pages", "1024")  # options of the caller may name others


@dataclass(frozen=True, slots=True)
class Trial:
    """What the attacker measured."""

    shares_namespace: bool
    is_known: bool
    """Whether the victim has asked about the attacker's image."""
    first_token_s: float
    cached_token_count: int
    """What the answer says of itself; the attacker does not use it."""


@dataclass(frozen=True, slots=True)
class Callers:
    """A client for each token."""

    victim: Client
    stranger: Client
    """Has a namespace of its own."""
    colleague: Client
    """Shares the namespace of the victim."""

    def attacker(self, *, shares_namespace: bool) -> Client:
        """Who measures."""
        return self.colleague if shares_namespace else self.stranger


@contextlib.contextmanager
def served(options: Sequence[str] = ()) -> Iterator[Callers]:
    """A server with the three tokens, and their clients."""
    names = ("victim", "stranger", "colleague")
    secrets = {name: new_secret() for name in names}
    lines = {name: line_for(name, secret, frozenset((Scope.INFER,))) for name, secret in secrets.items()}
    for name in ("victim", "colleague"):
        lines[name] = lines[name].removesuffix(" }") + ', namespace = "office" }'
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as clients:
        file = Path(folder) / "tokens.toml"
        file.write_text("".join(f"{line}\n" for line in lines.values()))
        server = clients.enter_context(started_server(("--tokens", str(file), *_LEAK_OPTIONS, *options)))
        yield Callers(*(clients.enter_context(Client(server.address, token=secrets[name])) for name in names))


def new_image(random_numbers: np.random.Generator, size_px: tuple[int, int] | None = None) -> bytes:
    """An encoded image that was never seen before: of one crop, or enlarged to a size."""
    file = io.BytesIO()
    pixels = random_numbers.integers(0, 255, (_IMAGE_PX, _IMAGE_PX, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    if size_px is not None:
        image = image.resize(size_px, Image.Resampling.NEAREST)
    image.save(file, "PNG")
    return file.getvalue()


def other_file(image: bytes) -> bytes:
    """Another file of the same pixels."""
    file = io.BytesIO()
    Image.open(io.BytesIO(image)).save(file, "BMP")
    return file.getvalue()


def trial(
    callers: Callers, images: tuple[bytes, bytes], *, shares_namespace: bool, is_known: bool, of_crops: bool = False
) -> Trial:
    """Have the victim ask about the first image where `is_known`, else about the second; then attack the first.

    With `of_crops` the attacker sends another file of the same pixels.
    """
    target, other = images
    _ask(callers.victim, "What is in this image?", target if is_known else other)
    attacker = callers.attacker(shares_namespace=shares_namespace)
    if of_crops:
        target = other_file(target)
    began = time.perf_counter()
    num_cached = _ask(attacker, "Where is the red ball?", target)
    return Trial(shares_namespace, is_known, time.perf_counter() - began, num_cached)


def _ask(client: Client, question: str, image: bytes) -> int:
    """Ask for one token; returns how many positions were cached."""
    result = client.complete_query(image, question, max_tokens=1, temperature=0.0)
    return result.usage.cached_token_count


def trials(callers: Callers, *, num_across: int, num_within: int, seed: int, of_crops: bool = False) -> list[Trial]:
    """So many trials across namespaces and so many within one, in random order. `of_crops`: as for `trial`."""
    pixels, chance = np.random.default_rng(seed), random.Random(seed)
    kinds = [False] * num_across + [True] * num_within
    chance.shuffle(kinds)
    found: list[Trial] = []
    for number, shares_namespace in enumerate([False, True] * _NUM_WARM_UPS + kinds):
        size_px = (WIDTH_PX, HEIGHT_PX) if of_crops else None
        images = new_image(pixels, size_px), new_image(pixels, size_px)
        is_known = chance.random() < 0.5
        done = trial(callers, images, shares_namespace=shares_namespace, is_known=is_known, of_crops=of_crops)
        if number >= 2 * _NUM_WARM_UPS:
            found.append(done)
    return found


def area_under_curve(known_s: Sequence[float], unknown_s: Sequence[float]) -> float:
    """The share of pairs in which the known one is shorter; ties count half. Needs one of each."""
    differences = np.subtract.outer(np.asarray(unknown_s), np.asarray(known_s))
    return float(np.mean((np.sign(differences) + 1) / 2))


def summary(found: Sequence[Trial]) -> dict[str, Any]:
    """The area under the curve of trials of one kind, and what it is made of."""
    known, unknown = ([item for item in found if item.is_known is is_known] for is_known in (True, False))
    known_s, unknown_s = ([item.first_token_s for item in some] for some in (known, unknown))
    return {
        "trials": len(found),
        "known": len(known),
        "area_under_curve": area_under_curve(known_s, unknown_s),
        "known_p50_ms": statistics.median(known_s) * 1e3,
        "unknown_p50_ms": statistics.median(unknown_s) * 1e3,
        "hits_known": sum(item.cached_token_count > 0 for item in known),
        "hits_unknown": sum(item.cached_token_count > 0 for item in unknown),
    }


def leak(arguments: argparse.Namespace) -> int:
    """Attack; 1 if a bound does not hold."""
    load_before = os.getloadavg()
    with served(arguments.server_options) as callers:
        found = trials(
            callers,
            num_across=arguments.across,
            num_within=arguments.within,
            seed=arguments.seed,
            of_crops=arguments.target == "crops",
        )
    kinds = {
        name: summary([item for item in found if item.shares_namespace is shares])
        for name, shares in (("across", False), ("within", True))
    }
    print("| attacker | trials | AUC | asked about, p50 ms | not asked about, p50 ms |\n|---|---|---|---|---|")
    for name, numbers in kinds.items():
        print(
            f"| {name} | {numbers['trials']} | {numbers['area_under_curve']:.3f} "
            f"| {numbers['known_p50_ms']:.1f} | {numbers['unknown_p50_ms']:.1f} |"
        )
    across, within = (kinds[name]["area_under_curve"] for name in ("across", "within"))
    holds = abs(across - 0.5) <= MAX_FROM_COIN and within >= MIN_WITHIN
    facts = {
        "machine": machine_facts(),
        "load": {"before": load_before, "after": os.getloadavg()},
        "required": {"across_at_most_from_0.5": MAX_FROM_COIN, "within_at_least": MIN_WITHIN},
        "target": arguments.target,
        "seed": arguments.seed,
        "server_options": arguments.server_options,
        "holds": holds,
    }
    write_json(arguments.json, facts | kinds)
    return int(not holds)


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    result = parser_of(__doc__)
    questions = result.add_subparsers(required=True, metavar="QUESTION")

    def add(run: Callable[[argparse.Namespace], int], *, takes_server_options: bool) -> Callable[..., Any]:
        name = run.__name__
        command = questions.add_parser(name, help=run.__doc__)
        file = Path(os.environ.get("OUT", "bench/out")) / f"cache_{name}.json"
        command.add_argument("--json", type=Path, default=file, help="default: %(default)s")
        if takes_server_options:
            command.add_argument("server_options", nargs="*", metavar="-- OPTION", help="options of all servers")
        command.set_defaults(run=run)
        return partial(_add_option, command)

    option = add(tiers, takes_server_options=True)
    option("--model", None, "folder of the model; its answers must never end early", required=True)
    option("--rows", TIER_ROWS, "workload:requests at once, …")
    option("--variants", _CACHES, f"of {', '.join(VARIANTS)}")
    option("--instant", "off", "on: steps after the first return at once, so that the host's work is what is left")
    option("--rounds", 3, "turns of each server")
    option("--seconds", 4.0, "length of each window")
    option("--warm-up", 2.0, "before each window, at most")
    option("--pictures", 128, "drawings to make")
    option("--processes", 4, "load processes of each server")
    option = add(host, takes_server_options=False)
    option("--requests", 3000, "of a round in process")
    option("--seconds", 3.0, "of a round through gRPC")
    option("--at-once", 64, "requests that run at once")
    option("--rounds", 3, "of each")
    option = add(opcodes, takes_server_options=False)
    option("--requests", 1000, "that are counted")
    option("--at-once", 64, "requests that run at once")
    option("--functions", 12, "to print of each thread, with the most opcodes")
    option = add(stored, takes_server_options=True)
    option("--calls", 40, "of each kind and size")
    option = add(leak, takes_server_options=True)
    option("--target", "images", "images, or crops: other files of the same pixels")
    option("--across", 2000, "trials across namespaces")
    option("--within", 500, "trials within one")
    option("--seed", 0, "of images and draws")
    return result


def _add_option(
    command: argparse.ArgumentParser, name: str, default: Any, text: str, *, required: bool = False
) -> None:
    kind = str if default is None else type(default)
    text = text if required else f"{text} (default: %(default)s)"
    command.add_argument(name, type=kind, default=default, required=required, help=text)


def main() -> int:
    """Answer one question."""
    arguments = parser().parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
