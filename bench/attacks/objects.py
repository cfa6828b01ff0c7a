"""Attacks by requests about many objects: as many as may be, unread streams, names and numbers that are none."""

import asyncio
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import grpc

from bench.attacks.attack import Attack, Outcome, Victim
from bench.attacks.witnesses import small_picture
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_runtime.api.requests import MAX_OBJECT_NAMES, MAX_OBJECTS

NUM_AT_ONCE = 8
NUM_OBJECTS_TOO_MANY = 50_000
_CALL_TIMEOUT_S = 60.0
_REFUSED, _ANSWERED = "INVALID_ARGUMENT", "OK"
_BUSY = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
"""The documented codes of a full queue, of a place that did not come in time, and of the caller's own deadline."""
_LEFT = "left"
"""The outcome of a stream whose caller stops reading after its first message."""

Request = wire.StreamDetectRequest


def requests() -> Iterator[tuple[str, Request]]:
    """Yields kinds of requests in turn, each with one of its requests."""
    image = {"data": small_picture()}
    for number in itertools.count():
        names = [f"thing {number} {place}" for place in range(MAX_OBJECT_NAMES)]
        yield "allowed", Request(objects=names, image=image, max_objects=MAX_OBJECTS)
        yield _LEFT, Request(objects=names, image=image, sampling={"temperature": 100.0})
        yield "too many", Request(objects=["thing"] * NUM_OBJECTS_TOO_MANY, image=image)
        yield "no number", Request(objects=names, image=image, min_score=math.nan, max_objects=-1)
        yield "no names", Request(objects=[""] * MAX_OBJECT_NAMES, image=image, object="thing")


def _strike(victim: Victim, seconds: float, prepared: Any) -> Outcome:
    return asyncio.run(_ask_at_once(victim, seconds))


async def _ask_at_once(victim: Victim, seconds: float) -> Outcome:
    outcome, end, asked = Outcome(), time.monotonic() + seconds, requests()
    metadata = (("authorization", f"Bearer {victim.token}"),)
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))

    async def ask(stub: Any) -> None:
        while time.monotonic() < end:
            kind, request = next(asked)
            call = stub.StreamDetect(request, metadata=metadata, timeout=_CALL_TIMEOUT_S)
            if kind == _LEFT:
                try:
                    await call.read()
                except grpc.aio.AioRpcError as error:
                    outcome[f"{kind}: {error.code().name}"] += 1
                else:
                    outcome[f"{kind}: {_ANSWERED}"] += 1
                call.cancel()
                continue
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError:
                pass
            outcome[f"{kind}: {(await call.code()).name}"] += 1

    async with grpc.aio.insecure_channel(victim.address, options=options) as channel:
        await asyncio.gather(*(ask(VisionServiceStub(channel)) for _ in range(NUM_AT_ONCE)))
    return outcome


_WANTED: Mapping[str, tuple[str, ...]] = {
    "allowed": (_ANSWERED, *_BUSY),
    _LEFT: (_ANSWERED, *_BUSY),
    "too many": (_REFUSED,),
    "no number": (_REFUSED,),
    "no names": (_REFUSED,),
}


def _ended_as(wanted: Mapping[str, tuple[str, ...]], outcome: Mapping[str, int], log: str) -> list[str]:
    """Returns each outcome that its kind of request must not have."""
    allowed = {f"{kind}: {code}" for kind, codes in wanted.items() for code in codes}
    return [f"{count} ended with {name}" for name, count in outcome.items() if name not in allowed]


ATTACKS = (
    Attack(
        "many-objects",
        f"{NUM_AT_ONCE} streams at a time about {MAX_OBJECT_NAMES} objects, many of them unread or invalid",
        _strike,
        check=partial(_ended_as, _WANTED),
        sends_pictures=True,
    ),
)
