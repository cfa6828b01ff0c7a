"""Attacks by requests that are all allowed: one token takes as much of the engine as it can get."""

import asyncio
import itertools
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from bench.attacks.attack import Attack, Outcome, Question, Victim
from kestrel_client.v1 import generation_pb2
from kestrel_client.v1 import vision_service_pb2 as wire
from kestrel_client.v1.vision_service_pb2_grpc import VisionServiceStub

NUM_SAMPLES, NUM_TOKENS = 16, 2000
NUM_SMALL_CALLS = 100
NUM_LONG_CALLS, NUM_WORDS = 32, 1500
NUM_ADAPTERS, NUM_ADAPTER_CALLS = 13, 8
FEW_PAGES = 144
"""Hardly more than one answer of `NUM_TOKENS` needs."""
MAX_ANSWER_S = 2.0
_INTERACTIVE, _BATCH = generation_pb2.PRIORITY_INTERACTIVE, generation_pb2.PRIORITY_BATCH
_QUESTION = Question(num_tokens=8, max_s=MAX_ANSWER_S)


@dataclass(frozen=True, slots=True)
class _Crowd:
    """What an attacker asks for: so many calls at a time, each followed by another one."""

    num_calls: int = 2
    num_samples: int = NUM_SAMPLES
    num_tokens: int = NUM_TOKENS
    num_logprobs: int | None = None
    num_words: int = 0
    """Of each question, besides those that no other question has."""
    priority: int = 0
    num_adapters: int = 0
    """Calls name them in turns."""

    def request(self, number: int) -> wire.CompleteQueryRequest:
        """That of the call of a number."""
        request = wire.CompleteQueryRequest(question=f"Tell story {number}." + " then" * self.num_words)
        request.options.priority = self.priority  # pyrefly: ignore[bad-assignment] a number is taken
        if self.num_adapters:
            request.options.adapter = str(1 + number % self.num_adapters)
        # So hot that answers seldom end by themselves.
        request.sampling.temperature, request.sampling.top_p = 50.0, 1.0
        request.sampling.n, request.sampling.max_tokens = self.num_samples, self.num_tokens
        if self.num_logprobs is not None:
            request.sampling.logprobs = self.num_logprobs
        return request


def _strike(crowd: _Crowd, victim: Victim, seconds: float, prepared: None) -> Outcome:
    return asyncio.run(_ask(crowd, victim, seconds))


async def _ask(crowd: _Crowd, victim: Victim, seconds: float) -> Outcome:
    outcome, end = Outcome(), time.monotonic() + seconds
    metadata = (("authorization", f"Bearer {victim.token}"),)
    numbers = itertools.count()

    async def ask(channel: grpc.aio.Channel) -> None:
        stub: Any = VisionServiceStub(channel)
        while (left_s := end - time.monotonic()) > 0.0:
            try:
                await stub.CompleteQuery(crowd.request(next(numbers)), timeout=left_s, metadata=metadata)
                outcome["OK"] += 1
            except grpc.aio.AioRpcError as error:
                outcome[error.code().name] += 1

    async with grpc.aio.insecure_channel(victim.address) as channel:
        await asyncio.gather(*(ask(channel) for _ in range(crowd.num_calls)))
    return outcome


def _row(name: str, what: str, crowd: _Crowd, *options: str, question: Question = _QUESTION) -> Attack:
    # Others use an adapter of their own, that of number 0.
    num_adapters = crowd.num_adapters + 1 if crowd.num_adapters else 0
    strike = partial(_strike, crowd)
    return Attack(name, what, strike, server_options=options, num_adapters=num_adapters, question=question)


ATTACKS = (
    _row("crowd", f"two calls for {NUM_SAMPLES} answers of {NUM_TOKENS:,} tokens each, always", _Crowd()),
    _row(
        "crowd-few-pages",
        f"the same with 20 logprobs, server with {FEW_PAGES} pages",
        _Crowd(num_logprobs=20),
        "--kv-pages",
        str(FEW_PAGES),
    ),
    _row(
        "crowd-batch",
        "the same with BATCH, others with INTERACTIVE",
        _Crowd(priority=_BATCH),
        question=Question(num_tokens=8, priority=_INTERACTIVE, max_s=MAX_ANSWER_S),
    ),
    _row("crowd-interactive", "the same with INTERACTIVE, others with NORMAL", _Crowd(priority=_INTERACTIVE)),
    _row(
        "crowd-prompts",
        f"{NUM_LONG_CALLS} calls at a time with prompts of {NUM_WORDS:,} words",
        _Crowd(NUM_LONG_CALLS, num_samples=1, num_tokens=8, num_words=NUM_WORDS),
    ),
    _row(
        "urgent-calls",
        f"{NUM_SMALL_CALLS} small calls at a time with INTERACTIVE, others with NORMAL",
        _Crowd(NUM_SMALL_CALLS, num_samples=1, num_tokens=8, priority=_INTERACTIVE),
    ),
    *(
        _row(
            name,
            f"{NUM_ADAPTER_CALLS} calls at a time of {num_tokens:,} tokens, {NUM_ADAPTERS} adapters in turns, "
            "4 slots; others with another adapter",
            _Crowd(NUM_ADAPTER_CALLS, num_samples=1, num_tokens=num_tokens, num_adapters=NUM_ADAPTERS),
            "--adapter-slots",
            "4",
            question=Question(num_tokens=8, adapter="0", max_s=MAX_ANSWER_S),
        )
        for name, num_tokens in (("adapters", 20), ("adapters-long", NUM_TOKENS))
    ),
)
