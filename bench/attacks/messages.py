"""Attacks by a single message, and by messages that are none."""

import asyncio
import time
from collections.abc import Mapping
from functools import partial

from bench.attacks import http2
from bench.attacks.attack import Attack, Outcome, Victim
from bench.attacks.bodies import COMPLETE_CAPTION
from bench.attacks.connections import COMPLETE_QUERY
from bench.attacks.http2 import RawConnection
from kestrel_client.v1 import vision_service_pb2 as wire

_MB = 10**6
_EMPTY_REF = b"\x22\x00"
_NO_MESSAGE = b"\xff\xff\xff\xff"
_OPEN_METHODS = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
NUM_MALFORMED = 100


def _spatial_refs(num_bytes: int) -> bytes:
    """A question with as many empty references as fit."""
    start = wire.CompleteQueryRequest(question="what?").SerializeToString()
    return http2.grpc_message(start + _EMPTY_REF * (num_bytes // len(_EMPTY_REF)))


def _question(num_bytes: int) -> bytes:
    text = "what is it? " * (num_bytes // 12)
    return http2.grpc_message(wire.CompleteQueryRequest(question=text).SerializeToString())


def _data_uri(num_bytes: int) -> bytes:
    uri = "data:image/png," + "%41" * (num_bytes // 3)
    return http2.grpc_message(wire.CompleteCaptionRequest(image={"uri": uri}).SerializeToString())


def _send_one(method: str, victim: Victim, seconds: float, message: bytes) -> Outcome:
    headers = http2.call_headers(method, victim.token, (("grpc-timeout", "60S"),))
    return asyncio.run(_send(victim, seconds, headers, message))


async def _send(victim: Victim, seconds: float, headers: bytes, message: bytes) -> Outcome:
    async with RawConnection.open(victim.host, victim.port) as connection:
        stream = await connection.start(headers)
        try:
            async with asyncio.timeout(seconds):
                await connection.send(stream, message, is_last=True)
        except (TimeoutError, OSError):
            pass
        return Outcome(http2.code_names(Outcome([await connection.status(stream, seconds)])))


def _nothing(victim: Victim, seconds: float, prepared: None) -> Outcome:
    time.sleep(seconds)
    return Outcome()


def _malformed(victim: Victim, seconds: float, prepared: None) -> Outcome:
    return asyncio.run(_send_malformed(victim, seconds))


async def _send_malformed(victim: Victim, seconds: float) -> Outcome:
    """Bytes that are no message, to every method that asks for no token; outcomes with the text that came back."""
    outcome = Outcome()
    async with RawConnection.open(victim.host, victim.port) as connection:
        for _ in range(NUM_MALFORMED // len(_OPEN_METHODS)):
            for method in _OPEN_METHODS:
                stream = await connection.start(http2.call_headers(method))
                await connection.send(stream, http2.grpc_message(_NO_MESSAGE), is_last=True)
                statuses = http2.code_names(Outcome([await connection.status(stream, seconds)]))
                name = method.rpartition("/")[2]
                outcome[f"{name} {next(iter(statuses))} {connection.message(stream)}".strip()] += 1
    return outcome


def _check_malformed(outcome: Mapping[str, int], log: str) -> list[str]:
    found = [f"malformed bytes got {name}" for name in outcome if " INVALID_ARGUMENT " not in f"{name} "]
    num_tracebacks = log.count("Traceback")
    return [*found, f"{num_tracebacks} tracebacks in the log"] if num_tracebacks else found


def _row(name: str, what: str, method: str, prepare: partial[bytes], *options: str) -> Attack:
    return Attack(name, what, partial(_send_one, method), prepare, is_single_message=True, server_options=options)


ATTACKS = (
    Attack("calm", "no attack", _nothing, is_single_message=True),
    *(
        _row(
            f"spatial-refs-{size}",
            f"one call with {size} MB of empty `spatial_refs`",
            COMPLETE_QUERY,
            partial(_spatial_refs, size * _MB),
        )
        for size in (8, 60)
    ),
    *(
        _row(
            f"question-{size}",
            f"one call with a question of {size} MB",
            COMPLETE_QUERY,
            partial(_question, size * _MB),
        )
        for size in (5, 60)
    ),
    _row(
        "data-uri",
        "one call with a `data:` URI of 60 MB, server with `--image-hosts`",
        COMPLETE_CAPTION,
        partial(_data_uri, 60 * _MB),
        "--image-hosts",
        "example.com",
    ),
    Attack(
        "malformed",
        f"{NUM_MALFORMED} malformed messages to health and reflection, no token",
        _malformed,
        is_single_message=True,
        check=_check_malformed,
    ),
)
