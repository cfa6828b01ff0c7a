"""Attacks by many large messages: whole, without their end, slow, and compressed."""

import asyncio
import gzip
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from bench.attacks import http2
from bench.attacks.attack import MIB, Attack, Outcome, Victim
from bench.attacks.http2 import RawConnection
from kestrel_client.v1 import vision_service_pb2 as wire

COMPLETE_CAPTION = "/kestrel.v1.VisionService/CompleteCaption"
BODY_MIB = 60
NUM_CALLS, NUM_COMPRESSED = 200, 150
_PER_CONNECTION = 10
_SLOW_START_BYTES, _SLOW_PIECE_BYTES, _SLOW_PAUSE_S = 65_536, 1_024, 0.25

Send = Callable[[RawConnection, int, bytes, float], Coroutine[Any, Any, None]]


async def whole(connection: RawConnection, stream: int, body: bytes, end: float) -> None:
    """Send all of it."""
    await connection.send(stream, body, is_last=True)


async def all_but_the_end(connection: RawConnection, stream: int, body: bytes, end: float) -> None:
    """Withhold the last byte."""
    if await connection.send(stream, body[:-1], is_last=False):
        await connection.status(stream, max(0.0, end - time.monotonic()))


async def slowly(connection: RawConnection, stream: int, body: bytes, end: float) -> None:
    """Send a little at a time, until the call is over."""
    if not await connection.send(stream, body[:_SLOW_START_BYTES], is_last=False):
        return
    at = _SLOW_START_BYTES
    while time.monotonic() < end:
        if not await connection.send(stream, body[at : at + _SLOW_PIECE_BYTES], is_last=False):
            return
        at += _SLOW_PIECE_BYTES
        await asyncio.sleep(_SLOW_PAUSE_S)


def send_all(
    method: str,
    send: Send,
    num_calls: int,
    has_token: bool,
    extra: tuple[tuple[str, str], ...],
    victim: Victim,
    seconds: float,
    body: bytes,
) -> Outcome:
    """Call a method so often at once, each time with this body; returns how the calls ended."""
    headers = http2.call_headers(method, victim.token if has_token else "", extra)
    statuses = asyncio.run(_calls(send, num_calls, victim, seconds, headers, body))
    return Outcome(http2.code_names(statuses))


async def _calls(
    send: Send, num_calls: int, victim: Victim, seconds: float, headers: bytes, body: bytes
) -> Counter[str]:
    """So many calls at once, some to a connection; what has not ended in time is left open, and then dropped."""
    statuses: Counter[str] = Counter()
    end = time.monotonic() + seconds

    async def call(connection: RawConnection) -> None:
        try:
            stream = await connection.start(headers)
        except OSError:
            statuses["not connected"] += 1
            return
        try:
            async with asyncio.timeout(end - time.monotonic()):
                await send(connection, stream, body, end)
        except (TimeoutError, OSError):
            pass
        statuses[await connection.status(stream, max(0.01, end - time.monotonic()))] += 1

    async def connect(number: int) -> None:
        try:
            async with RawConnection.open(victim.host, victim.port) as connection:
                await asyncio.gather(*(call(connection) for _ in range(number)))
        except OSError:
            statuses["not connected"] += number

    numbers = [_PER_CONNECTION] * (num_calls // _PER_CONNECTION)
    await asyncio.gather(*map(connect, numbers))
    return statuses


def _large_body() -> bytes:
    """A request with a picture of the size."""
    return http2.grpc_message(
        wire.CompleteCaptionRequest(image={"data": bytes(BODY_MIB * MIB)}).SerializeToString()
    )


def _compressed_body() -> bytes:
    message = wire.CompleteCaptionRequest(image={"data": bytes(BODY_MIB * MIB)}).SerializeToString()
    return http2.grpc_message(gzip.compress(message), compressed=True)


def _row(name: str, what: str, send: Send, *, has_token: bool) -> Attack:
    whose = "with a token" if has_token else "without token"
    return Attack(
        name,
        f"{NUM_CALLS} calls of {BODY_MIB} MiB {whose}{what}, two processes",
        partial(send_all, COMPLETE_CAPTION, send, NUM_CALLS // 2, has_token, ()),
        _large_body,
        num_processes=2,
    )


ATTACKS = (
    _row("large-calls", "", whole, has_token=False),
    _row("withheld-ends", ", the last byte withheld", all_but_the_end, has_token=False),
    _row("slow-senders", ", sent slowly", slowly, has_token=False),
    _row("large-calls-token", "", whole, has_token=True),
    _row("withheld-ends-token", ", the last byte withheld", all_but_the_end, has_token=True),
    _row("slow-senders-token", ", sent slowly", slowly, has_token=True),
    Attack(
        "compressed-calls",
        f"{NUM_COMPRESSED} compressed calls of 61 kB, {BODY_MIB} MiB each once inflated, with a token",
        partial(send_all, COMPLETE_CAPTION, whole, NUM_COMPRESSED, True, (("grpc-encoding", "gzip"),)),
        _compressed_body,
    ),
)
