"""Who else uses the server: a prober of its health, and a caller with a token of its own. A process each."""

import asyncio
import io
import itertools
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_status import rpc_status
from PIL import Image

from bench.attacks.attack import Attack, Question, Witness
from kestrel_client.v1 import image_service_pb2 as image_wire
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub

PROBE_EVERY_S, PROBE_TIMEOUT_S = 0.1, 60.0
ASK_PAUSE_S, ASK_TIMEOUT_S = 0.1, 30.0
_START_TIMEOUT_S, _STOP_TIMEOUT_S = 60.0, 90.0
_PICTURE_PX = 96


@dataclass(frozen=True, slots=True)
class _Orders:
    """What a witness is told: counting begins when `go` is set, and all ends when `stop` is."""

    address: str
    token: str
    sends_pictures: bool
    stores_pictures: bool
    connects_anew: bool
    question: Question
    go: Event
    stop: Event


class Witnesses:
    """Two processes that are ready. `go`, then `stop`, which gives what they saw."""

    def __init__(self, go: Event, stop: Event, pipes: list[Connection]) -> None:
        self._go, self._stop, self._pipes = go, stop, pipes

    def go(self) -> None:
        """From now on calls count."""
        self._go.set()

    def stop(self) -> Witness:
        """Let them finish. Raises `RuntimeError` where one does not."""
        self._stop.set()
        answers: list[Any] = []
        for pipe in self._pipes:
            if not pipe.poll(_STOP_TIMEOUT_S):
                raise RuntimeError("a witness does not answer")
            answers.append(pipe.recv())
        (health_s, num_failures), (answers_s, failures) = answers
        return Witness(tuple(health_s), num_failures, tuple(answers_s), failures)


@contextmanager
def witnesses(address: str, token: str, attack: Attack) -> Iterator[Witnesses]:
    """Have both call the server, and wait until each has had an answer."""
    context = multiprocessing.get_context("spawn")
    go, stop = context.Event(), context.Event()
    orders = _Orders(
        address,
        token,
        attack.sends_pictures,
        attack.attacks_stored_images,
        attack.needs_new_connections,
        attack.question,
        go,
        stop,
    )
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        for run in (_probe, _ask):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(run, orders, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            if not pipe.poll(_START_TIMEOUT_S) or pipe.recv() != "ready":
                raise RuntimeError("a witness does not start")
        yield Witnesses(go, stop, pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(run: Callable[[_Orders, Connection], Any], orders: _Orders, pipe: Connection) -> None:
    asyncio.run(run(orders, pipe))


async def _probe(orders: _Orders, pipe: Connection) -> None:
    """Asks for health every tenth of a second, whether the last answer has come or not."""
    latencies: list[float] = []
    num_failures = 0

    async def check(channel: grpc.aio.Channel) -> None:
        nonlocal num_failures
        began = time.monotonic()
        is_counted = orders.go.is_set()
        try:
            stub: Any = HealthStub(channel)
            await stub.Check(HealthCheckRequest(), timeout=PROBE_TIMEOUT_S, wait_for_ready=True)
        except grpc.aio.AioRpcError:
            num_failures += is_counted
        finally:
            if is_counted:
                latencies.append(time.monotonic() - began)

    async def check_anew() -> None:
        async with _channel(orders.address) as channel:
            await check(channel)

    async with _channel(orders.address) as channel:
        await check(channel)
        pipe.send("ready")
        checks: set[asyncio.Task[None]] = set()
        while not orders.stop.is_set():
            checks.add(asyncio.create_task(check_anew() if orders.connects_anew else check(channel)))
            await asyncio.sleep(PROBE_EVERY_S)
        await asyncio.wait(checks, timeout=PROBE_TIMEOUT_S)
    pipe.send((latencies, num_failures))


async def _ask(orders: _Orders, pipe: Connection) -> None:
    """Asks one small question after the other. With stored pictures, an answer is that to all three calls."""
    latencies: list[float] = []
    failures: Counter[str] = Counter()
    # So hot that an answer seldom ends by itself.
    sampling = {"max_tokens": orders.question.num_tokens, "temperature": 50.0, "top_p": 1.0}
    options = {"priority": orders.question.priority, "adapter": orders.question.adapter}
    request = wire.CompleteQueryRequest(question="How many shapes are there?", sampling=sampling, options=options)
    if orders.sends_pictures:
        request.image.data = small_picture()

    numbers = itertools.count(1)

    async def ask(channel: grpc.aio.Channel) -> None:
        stub: Any = VisionServiceStub(channel)
        metadata = (("authorization", f"Bearer {orders.token}"),)
        if orders.stores_pictures:
            images: Any = ImageServiceStub(channel)
            put = image_wire.PutImageRequest(data=small_picture())
            stored = await images.PutImage(put, timeout=ASK_TIMEOUT_S, metadata=metadata)
            request.image.image_id = stored.image.image_id
            get = image_wire.GetImageRequest(image_id=stored.image.image_id, include_data=True)
            await images.GetImage(get, timeout=ASK_TIMEOUT_S, metadata=metadata)
        if orders.question.is_constrained:
            request.constraint.regex = f"yes|no|{next(numbers)}"
        await stub.CompleteQuery(request, timeout=ASK_TIMEOUT_S, metadata=metadata)

    async with _channel(orders.address) as channel:
        for _ in range(3):
            await ask(channel)
        pipe.send("ready")
        while not orders.stop.is_set():
            began, is_counted = time.monotonic(), orders.go.is_set()
            try:
                if orders.connects_anew:
                    async with _channel(orders.address) as new_channel:
                        await ask(new_channel)
                else:
                    await ask(channel)
            except grpc.aio.AioRpcError as error:
                failures[_words(error)] += is_counted
            else:
                if is_counted:
                    latencies.append(time.monotonic() - began)
            await asyncio.sleep(ASK_PAUSE_S)
    pipe.send((latencies, +failures))


def _channel(address: str) -> grpc.aio.Channel:
    # No retries: what one call gets is what counts.
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    return grpc.aio.insecure_channel(address, options=options)


def small_picture() -> bytes:
    """The picture that the caller asks about, always the same file."""
    file = io.BytesIO()
    Image.linear_gradient("L").resize((_PICTURE_PX, _PICTURE_PX)).convert("RGB").save(file, "PNG")
    return file.getvalue()


def _words(error: grpc.aio.AioRpcError) -> str:
    """The code, and the server's reason where it gave one."""
    call: Any = error
    info = error_details_pb2.ErrorInfo()
    try:
        status: Any = rpc_status.from_call(call)
    except ValueError:
        status = None
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return f"{error.code().name} {info.reason}"
    return error.code().name
