"""Attacks by requests that are all allowed: one token takes as much of the engine as it can get."""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial
from typing import Any

import grpc

from bench.attacks.attack import Attack, Outcome, Question, Victim
from kestrel_client.v1 import generation_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub

NUM_SAMPLES, NUM_TOKENS = 16, 2000
NUM_SMALL_CALLS = 100
NUM_ADAPTERS, NUM_ADAPTER_CALLS = 13, 8
FEW_PAGES = 144
"""Hardly more than one answer of `NUM_TOKENS` needs."""
MAX_ANSWER_S = 2.0
_INTERACTIVE, _BATCH = generation_pb2.PRIORITY_INTERACTIVE, generation_pb2.PRIORITY_BATCH
_QUESTION = Question(num_tokens=8, max_s=MAX_ANSWER_S)


def _crowd(
    num_calls: int,
    sampling: dict[str, Any],
    priority: int,
    num_adapters: int,
    victim: Victim,
    seconds: float,
    prepared: None,
) -> Outcome:
    return asyncio.run(_ask(num_calls, sampling, priority, num_adapters, victim, seconds))


async def _ask(
    num_calls: int,
    sampling: dict[str, Any],
    priority: int,
    num_adapters: int,
    victim: Victim,
    seconds: float,
) -> Outcome:
    """So many calls at a time, each followed by another one with the next adapter, until the time is over."""
    outcome, end = Outcome(), time.monotonic() + seconds
    # So hot that answers seldom end by themselves.
    sampling = {"temperature": 50.0, "top_p": 1.0, **sampling}
    metadata = (("authorization", f"Bearer {victim.token}"),)
    numbers = itertools.count()

    async def ask(channel: grpc.aio.Channel) -> None:
        stub: Any = VisionServiceStub(channel)
        while (left_s := end - time.monotonic()) > 0.0:
            number = next(numbers)
            adapter = str(1 + number % num_adapters) if num_adapters else ""
            request = wire.CompleteQueryRequest(
                question=f"Tell story {number}.",
                sampling=sampling,
                options={"priority": priority, "adapter": adapter},
            )
            try:
                await stub.CompleteQuery(request, timeout=left_s, metadata=metadata)
                outcome["OK"] += 1
            except grpc.aio.AioRpcError as error:
                outcome[error.code().name] += 1

    async with grpc.aio.insecure_channel(victim.address) as channel:
        await asyncio.gather(*(ask(channel) for _ in range(num_calls)))
    return outcome


def _row(
    name: str,
    what: str,
    *options: str,
    num_calls: int = 2,
    sampling: dict[str, Any] | None = None,
    priority: int = 0,
    num_adapters: int = 0,
    question: Question = _QUESTION,
) -> Attack:
    sampling = {"n": NUM_SAMPLES, "max_tokens": NUM_TOKENS} if sampling is None else sampling
    strike = partial(_crowd, num_calls, sampling, priority, num_adapters)
    # Others use an adapter of their own, that of number 0.
    num_of_all = num_adapters + 1 if num_adapters else 0
    return Attack(name, what, strike, server_options=options, num_adapters=num_of_all, question=question)


ATTACKS = (
    _row("crowd", f"two calls for {NUM_SAMPLES} answers of {NUM_TOKENS:,} tokens each, always"),
    _row(
        "crowd-few-pages",
        f"the same with 20 logprobs, server with {FEW_PAGES} pages",
        "--kv-pages",
        str(FEW_PAGES),
        sampling={"n": NUM_SAMPLES, "max_tokens": NUM_TOKENS, "logprobs": 20},
    ),
    _row(
        "crowd-batch",
        "the same with BATCH, others with INTERACTIVE",
        priority=_BATCH,
        question=Question(num_tokens=8, priority=_INTERACTIVE, max_s=MAX_ANSWER_S),
    ),
    _row("crowd-interactive", "the same with INTERACTIVE, others with NORMAL", priority=_INTERACTIVE),
    _row(
        "urgent-calls",
        f"{NUM_SMALL_CALLS} small calls at a time with INTERACTIVE, others with NORMAL",
        num_calls=NUM_SMALL_CALLS,
        sampling={"max_tokens": 8},
        priority=_INTERACTIVE,
    ),
    *(
        _row(
            name,
            f"{NUM_ADAPTER_CALLS} calls at a time of {num_tokens:,} tokens, {NUM_ADAPTERS} adapters in turns, "
            "4 slots; others with another adapter",
            "--adapter-slots",
            "4",
            num_calls=NUM_ADAPTER_CALLS,
            sampling={"max_tokens": num_tokens},
            num_adapters=NUM_ADAPTERS,
            question=Question(num_tokens=8, adapter="0", max_s=MAX_ANSWER_S),
        )
        for name, num_tokens in (("adapters", 20), ("adapters-long", NUM_TOKENS))
    ),
)
