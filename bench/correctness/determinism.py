"""Does `--deterministic` give every answer the same bits, whatever else the server does, and what does it cost?

Runs engines in this process. Mixed requests (every skill, pictures of every number of crops, half of them drawn at
temperature 1, with logprobs where a skill has them) are asked alone, without the prefix cache. Then they are asked
in a random order, so many at once: with the cache, twice, so that the second time finds what the first has left;
with so few pages that sequences are preempted; and with steps of few tokens. The tokens of each answer with their
values and logprobs must be those of the quiet engine, bit by bit. The same without the mode says how many differ,
and how long it takes.

    python -m bench.correctness.determinism --requests 2000 --at-once 64
    python -m bench.correctness.determinism --quick
"""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.correctness.mixed_requests import mixed_requests, noted_tokens
from bench.harness.engines import add_engine_options, closed_loop, engine_config
from bench.harness.output import parser_of, write_json
from bench.harness.serving import machine_facts
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import KestrelError
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Caption, Chat, Query, Request
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.output.output_parser import Token

NUM_LOGPROBS = 5
FEW_TOKENS = 37
"""Of a step, in the round of small steps."""
Answers = dict[int, tuple[Token, ...]]


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over all requests."""

    name: str
    seconds: float
    num_different: int
    """Answers whose bits are not those of the first round."""
    num_other_tokens: int
    """Of these, answers that have other tokens."""


def requests(count: int, config: Any) -> list[Request]:
    """Mixed ones. Each has a seed of its own, by which its tokens are found."""
    return [_with_sampling(request, number) for number, request in enumerate(mixed_requests(count, config))]


def _with_sampling(request: Request, number: int) -> Request:
    sampling = replace(request.sampling, seed=number, temperature=float(number % 2))
    if isinstance(request, Query | Caption | Chat):
        sampling = replace(sampling, logprobs=NUM_LOGPROBS)
    return replace(request, sampling=sampling)


async def answers(engine: LocalEngine, asked: Sequence[Request], num_at_once: int, seed: int) -> Answers:
    """The tokens of each answer, asked for in an order that follows from the seed."""
    order = random.Random(seed).sample(range(len(asked)), k=len(asked))

    def check(_: int, result: Finished | KestrelError) -> None:
        if isinstance(result, KestrelError):
            raise result

    with noted_tokens() as tokens:
        await closed_loop(engine, (asked[number] for number in order), num_at_once, check)
        return {number: _told(request, tokens[_seed(request)]) for number, request in enumerate(asked)}


def _seed(request: Request) -> int:
    assert request.sampling.seed is not None, "given by _with_sampling"
    return request.sampling.seed


def _told(request: Request, tokens: Sequence[Token]) -> tuple[Token, ...]:
    """What the caller learns: logprobs are also computed for the others of a batch in which one asks for them."""
    if request.sampling.logprobs is not None:
        return tuple(tokens)
    return tuple(Token(token.id, token.value) for token in tokens)


def rounds(loaded: LoadedModel, config: EngineConfig, asked: Sequence[Request], num_at_once: int) -> list[Round]:
    """All rounds of one mode; the first is the quiet one."""
    at_once = replace(config, max_batch_size=num_at_once, max_queued_requests=2 * num_at_once)
    few_pages = replace(at_once, num_kv_pages=_few_pages(loaded, config), prefix_cache=False)
    plans = [
        ("alone", replace(config, prefix_cache=False), 1, 1),
        (f"{num_at_once} at once", at_once, num_at_once, 2),
        ("few pages", few_pages, num_at_once, 1),
        ("small steps", replace(at_once, max_prefill_tokens=FEW_TOKENS), num_at_once, 1),
    ]
    done: list[Round] = []
    wanted: Answers | None = None
    for name, own, together, times in plans:
        engine = LocalEngine(loaded, own)
        try:
            for turn in range(times):
                started = time.perf_counter()
                got = asyncio.run(answers(engine, asked, together, seed=len(done)))
                seconds = time.perf_counter() - started
                wanted = wanted or got
                different = [number for number in wanted if got[number] != wanted[number]]
                others = sum(_ids(got[number]) != _ids(wanted[number]) for number in different)
                done.append(Round(f"{name}, again" if turn else name, seconds, len(different), others))
                told = f"{len(different)} differ, {others} in tokens"
                print(f"  {done[-1].name:18} {seconds:7.1f} s   {told}", flush=True)
        finally:
            engine.close()
    return done


def _few_pages(loaded: LoadedModel, config: EngineConfig) -> int:
    """For three requests with an image."""
    text = loaded.model.config.text
    return 3 * -(-(text.prefix_attn + 64) // config.page_size)


def _ids(tokens: tuple[Token, ...]) -> list[int]:
    return [token.id for token in tokens]


def main(argv: list[str] | None = None) -> int:
    """Compare, print and write. The exit status is 1 where a bit differs with the mode."""
    parser = parser_of(__doc__)
    add_engine_options(parser)
    parser.add_argument("--quick", action="store_true", help="24 requests, 8 at once")
    parser.add_argument("--requests", type=int, help="how many (2000)")
    parser.add_argument("--at-once", type=int, help="(64)")
    parser.add_argument("--json", type=Path, default=Path("bench/out/deterministic.json"))
    arguments = parser.parse_args(argv)
    count = arguments.requests or (24 if arguments.quick else 2000)
    num_at_once = arguments.at_once or (8 if arguments.quick else 64)
    config = engine_config(parser, arguments)
    loaded = LoadedModel.load(config)
    asked = requests(count, loaded.model.config)
    found: dict[str, list[Round]] = {}
    for is_on in (True, False):
        name = f"deterministic {'on' if is_on else 'off'}"
        print(f"{name}, {count} requests", flush=True)
        found[name] = rounds(loaded, replace(config, deterministic=is_on), asked, num_at_once)
    with_mode, without = found.values()
    for one, other in zip(with_mode, without, strict=True):
        print(f"  {one.name:18} {one.seconds / other.seconds:.2f} times as long")
    num_different = sum(one.num_different for one in with_mode)
    facts = {name: [vars_of(one) for one in some] for name, some in found.items()}
    write_json(arguments.json, {"rounds": facts, "machine": machine_facts()})
    return 1 if num_different else 0


def vars_of(one: Round) -> dict[str, Any]:
    """A round as JSON."""
    return {
        "name": one.name,
        "seconds": one.seconds,
        "different": one.num_different,
        "other tokens": one.num_other_tokens,
    }


if __name__ == "__main__":
    sys.exit(main())
