"""What do caches save conversations? Serves a model with and without them, and talks with both in turns: A B A B.

A conversation has some turns, of which the first ones show a picture each that no other conversation shows. So many
are talked at once; each question waits for the answer before it. Then the first token of a second turn is compared
with that of a question about a picture that the server knows, one at a time, on the server with caches.

    python -m bench.conversations --model /tmp/random-moondream2       # 6 turns, 2 pictures, 64 at once
    python -m bench.conversations --model /tmp/random-moondream3 --pictures 3
    python -m bench.conversations --at-once 4 --conversations 8 --rounds 2    # the built-in model
    python -m bench.conversations --found 60       # whose answers are found again

The next turn finds the tokens of an answer where tokenising its text gives the tokens that were sampled; `--found`
asks the built-in model, or MODEL, so many questions about pictures as the built-in model knows them, at several
temperatures, and counts the answers of which that holds. Options after `--` go to both servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import kestrel_runtime
from bench.alternate import Comparison, as_text
from bench.harness.checkpoints import write_endless
from bench.harness.output import Progress, parser_of, write_json
from bench.harness.serving import machine_facts, started_server
from bench.harness.workload import QUESTIONS
from kestrel_client import AsyncClient, ChatMessage
from kestrel_grpc.cli.bench.workload import another_picture, chart

WITHOUT_CACHES = ("--prefix-cache", "off", "--image-cache-bytes", "0")
NUM_DRAWN = 16
NUM_TOKENS = 16
"""Of each answer, given a model that never ends."""
NUM_FIRST_TOKENS = 5
"""Pairs of a second turn and a question about a known picture, for each round."""
_TIMEOUT_S = 600.0
_FIRST_SCENE = 10**9
"""Scenes from this seed on were not trained."""


@dataclass(slots=True)
class Talk:
    """What became of the conversations of one round on one server."""

    seconds: float = 0.0
    num_requests: int = 0
    first_token_ms: list[list[float]] = field(default_factory=list)
    """By turn."""
    cached_share: list[list[float]] = field(default_factory=list)
    """By turn: input tokens that were cached over all of them."""

    @property
    def per_s(self) -> float:
        """Requests a second."""
        return self.num_requests / self.seconds


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Times of first tokens in ms, one request at a time."""

    known_ms: Sequence[float]
    """Of a question about a picture that the server knows."""
    second_turn_ms: Sequence[float]
    """Of the same question in the second turn of a conversation about that picture."""

    @property
    def ratio(self) -> float:
        """The ratio of the medians: single times spread more than those of whole rounds."""
        return statistics.median(self.second_turn_ms) / statistics.median(self.known_ms)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to say."""

    num_turns: int
    num_pictures: int
    num_at_once: int
    num_conversations: int
    """In a round."""


class Speaker:
    """Talks with one server. `name` and the number of a conversation make its pictures its own."""

    def __init__(self, client: AsyncClient, plan: Plan, name: str, drawn: Sequence[bytes]) -> None:
        self._client = client
        self._plan = plan
        self._name = name
        self._drawn = drawn
        self._num_begun = 0

    def picture(self) -> bytes:
        """Returns a picture that the server has not seen."""
        self._num_begun += 1
        return another_picture(
            self._drawn[self._num_begun % len(self._drawn)], f"{self._name} {self._num_begun:012d}"
        )

    async def turn(self, messages: Sequence[ChatMessage]) -> tuple[float, Any]:
        """Asks the last message; returns the time of the first token in ms, and the result."""
        started, first_ms = time.perf_counter(), 0.0
        stream = self._client.chat(messages, temperature=0.0, max_tokens=NUM_TOKENS)
        async for _ in stream:
            first_ms = first_ms or 1000 * (time.perf_counter() - started)
        return first_ms, await stream.result()

    async def known_picture(self, picture: bytes, question: str) -> float:
        """Asks a question about a picture; returns the time of the first token in ms."""
        started, first_ms = time.perf_counter(), 0.0
        async for _ in self._client.query(picture, question, temperature=0.0, max_tokens=NUM_TOKENS):
            first_ms = first_ms or 1000 * (time.perf_counter() - started)
        return first_ms

    async def round(self) -> Talk:
        """Talks all conversations of a round, so many at once."""
        plan = self._plan
        talk = Talk(
            first_token_ms=[[] for _ in range(plan.num_turns)], cached_share=[[] for _ in range(plan.num_turns)]
        )
        free = asyncio.Semaphore(plan.num_at_once)

        async def conversation(number: int) -> None:
            async with free:
                messages: list[ChatMessage] = []
                for turn in range(plan.num_turns):
                    pictures = [self.picture()] if turn < plan.num_pictures else []
                    question = QUESTIONS[(number * plan.num_turns + turn) % len(QUESTIONS)]
                    messages.append(ChatMessage("user", question, pictures))
                    first_ms, result = await self.turn(messages)
                    talk.first_token_ms[turn].append(first_ms)
                    usage = result.usage
                    talk.cached_share[turn].append(usage.cached_token_count / usage.input_token_count)
                    messages.append(ChatMessage("assistant", result.answer))

        started = time.perf_counter()
        await asyncio.gather(*(conversation(number) for number in range(plan.num_conversations)))
        talk.seconds = time.perf_counter() - started
        talk.num_requests = plan.num_conversations * plan.num_turns
        return talk

    async def first_tokens(self, count: int) -> FirstTokens:
        """Asks second turns and questions about known pictures, one after another."""
        known: list[float] = []
        second: list[float] = []
        for number in range(count):
            first, asked = (QUESTIONS[(2 * number + place) % len(QUESTIONS)] for place in range(2))
            picture = self.picture()
            messages = [ChatMessage("user", first, [picture])]
            _, result = await self.turn(messages)
            messages += [ChatMessage("assistant", result.answer), ChatMessage("user", asked)]
            known.append(await self.known_picture(picture, asked))
            second.append((await self.turn(messages))[0])
        return FirstTokens(known, second)


def run(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """Serves both, talks in turns, and returns the numbers."""
    plan = Plan(
        arguments.turns, arguments.pictures, arguments.at_once, arguments.conversations or 2 * arguments.at_once
    )
    options = ("--model", model, "--max-batch-size", str(plan.num_at_once), *arguments.server_options)
    with started_server((*options, *WITHOUT_CACHES)) as without, started_server(options) as caches:
        talks, first = asyncio.run(_talk(plan, {"off": without.address, "on": caches.address}, arguments))
        server = caches.facts()
    off, on = ([talk.per_s for talk in talks[name]] for name in ("off", "on"))
    name = f"{plan.num_turns} turns, {plan.num_pictures} pictures, {plan.num_at_once} at once"
    rates = Comparison(name, "requests/s", tuple(off), tuple(on))
    print(as_text([rates], ("without caches", "with caches")))
    known_ms, second_ms = (statistics.median(times) for times in (first.known_ms, first.second_turn_ms))
    print(f"\nfirst token, 1 at once, p50: a known picture {known_ms:.1f} ms, the second turn {second_ms:.1f} ms")
    print("\n| turn | first token, p50 ms, without | with | input tokens cached |\n|---|---|---|---|")
    by_turn = [_turn(talks, turn) for turn in range(plan.num_turns)]
    for number, turn in enumerate(by_turn, 1):
        print(f"| {number} | {turn['off_ms']:.1f} | {turn['on_ms']:.1f} | {turn['cached_share']:.0%} |")
    load = os.getloadavg()
    print(
        f"\nrequests/s with caches: {rates.ratio:.2f} times (±{rates.spread:.2f}); first token of a second turn: "
        f"{first.ratio:.2f} times that of a known picture; the machine's load: {load[0]:.1f}"
    )
    return {
        "machine": machine_facts() | {"load": load},
        "server": server,
        "plan": asdict(plan),
        "requests_per_s": {"without": off, "with": on, "ratio": rates.ratio, "spread": rates.spread},
        "first_token": asdict(first) | {"ratio": first.ratio},
        "turns": by_turn,
    }


def _turn(talks: dict[str, list[Talk]], turn: int) -> dict[str, float]:
    off, on = ([ms for talk in talks[name] for ms in talk.first_token_ms[turn]] for name in ("off", "on"))
    shares = [share for talk in talks["on"] for share in talk.cached_share[turn]]
    return {
        "off_ms": statistics.median(off),
        "on_ms": statistics.median(on),
        "cached_share": statistics.fmean(shares),
    }


async def _talk(
    plan: Plan, addresses: dict[str, str], arguments: argparse.Namespace
) -> tuple[dict[str, list[Talk]], FirstTokens]:
    drawn = [chart(seed) for seed in range(NUM_DRAWN)]
    talks: dict[str, list[Talk]] = {name: [] for name in addresses}
    progress = Progress(len(addresses) * (arguments.rounds + 1) + 1)
    async with contextlib.AsyncExitStack() as stack:
        speakers: dict[str, Speaker] = {}
        for name, address in addresses.items():
            client = AsyncClient(address, wait_for_ready=True, timeout_s=_TIMEOUT_S, store_from_bytes=None)
            speakers[name] = Speaker(await stack.enter_async_context(client), plan, name, drawn)
        for name, speaker in speakers.items():
            # What is compiled or captured at its first use is no round's business.
            await speaker.first_tokens(1)
            progress.end(f"first answers, caches {name}")
        for _ in range(arguments.rounds):
            for name, speaker in speakers.items():
                talks[name].append(await speaker.round())
                progress.end(f"caches {name}: {talks[name][-1].per_s:.3g} requests/s")
        first = await speakers["on"].first_tokens(NUM_FIRST_TOKENS * arguments.rounds)
        progress.end("first tokens")
    progress.close()
    return talks, first


# Whose tokens are found again.


@dataclass(frozen=True, slots=True)
class Found:
    """Answers whose text, tokenised, has the tokens that were sampled."""

    temperature: float
    num_answers: int
    num_found: int
    num_tokens: int
    num_found_tokens: int
    """Of each answer, the tokens that its text begins with alike."""


def found_again(model: str, count: int) -> list[Found]:
    """Asks so many questions about drawn scenes; counts the answers whose tokens are found again."""
    from kestrel_runtime.api.config import EngineConfig
    from kestrel_runtime.api.requests import Caption, Query, SamplingParams
    from kestrel_runtime.engine.engine import LocalEngine
    from kestrel_runtime.models.loaded_model import LoadedModel
    from training.drawing import encode_scene
    from training.examples import Teacher
    from training.scenes import make_scene

    config = EngineConfig(model=model, device="cpu", max_queued_requests=4 * count)
    loaded = LoadedModel.load(config)
    teacher = Teacher(loaded.tokenizer, loaded.model.config)
    asked: list[Query | Caption] = []
    for seed in range(_FIRST_SCENE, _FIRST_SCENE + count):
        scene = make_scene(seed)
        examples = (example.request for example in teacher.examples(scene, random.Random(seed)))
        request = next(request for request in examples if isinstance(request, Query | Caption))
        asked.append(replace(request, image=encode_scene(scene)))

    async def answers(engine: LocalEngine, temperature: float) -> list[Any]:
        requests = (
            replace(
                request, sampling=SamplingParams(temperature=temperature, max_tokens=96, logprobs=0, seed=number)
            )
            for number, request in enumerate(asked)
        )
        return [await engine.submit(request).result() for request in requests]

    found: list[Found] = []
    engine = LocalEngine(loaded, config)
    try:
        for temperature in (0.0, 0.2, 1.0):
            finished = asyncio.run(answers(engine, temperature))
            found.append(_found(temperature, finished, loaded))
    finally:
        engine.close()
    return found


def _found(temperature: float, finished: Sequence[Any], loaded: Any) -> Found:
    eos = loaded.model.config.tokenizer.eos_id
    num_found = num_tokens = num_alike = 0
    for item in finished:
        text = item.output.answer if hasattr(item.output, "answer") else item.output.caption
        sampled = [token.id for token in item.output.logprobs if token.id != eos]
        again = loaded.tokenizer.encode(text)
        alike = next(
            (place for place, pair in enumerate(zip(sampled, again, strict=False)) if pair[0] != pair[1]), None
        )
        num_found += sampled == again
        num_tokens += len(sampled)
        num_alike += min(len(sampled), len(again)) if alike is None else alike
    return Found(temperature, len(finished), num_found, num_tokens, num_alike)


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = parser_of(__doc__)
    result.add_argument("--model", help="folder of the model (default: an endless copy of the built-in one)")
    result.add_argument("--turns", type=int, default=6, help="of a conversation (default: %(default)s)")
    result.add_argument("--pictures", type=int, default=2, help="of a conversation (default: %(default)s)")
    result.add_argument("--at-once", type=int, default=64, help="conversations (default: %(default)s)")
    result.add_argument("--conversations", type=int, help="in a round (default: twice as many as at once)")
    result.add_argument("--rounds", type=int, default=3, help="turns of each server (default: %(default)s)")
    result.add_argument("--found", type=int, metavar="N", help="only ask N questions, whose tokens are found again")
    result.add_argument(
        "--json", type=Path, default=Path("bench/out/conversations.json"), help="default: %(default)s"
    )
    result.add_argument("server_options", nargs="*", metavar="-- OPTION", help="options of `kestrel-grpc serve`")
    return result


def main() -> int:
    """Measure, print the tables, write the JSON."""
    arguments = parser().parse_args()
    nano = Path(kestrel_runtime.__path__[0]) / "nano"
    if arguments.found is not None:
        found = found_again(arguments.model or str(nano), arguments.found)
        for each in found:
            print(
                f"temperature {each.temperature:g}: {each.num_found} of {each.num_answers} answers, "
                f"{each.num_found_tokens} of {each.num_tokens} tokens"
            )
        result: dict[str, Any] = {"machine": machine_facts(), "found": [asdict(each) for each in found]}
    else:
        with tempfile.TemporaryDirectory() as folder:
            model = arguments.model
            if model is None:
                model = str(Path(folder) / "nano-endless")
                write_endless(nano, Path(model))
            result = run(arguments, model)
    write_json(arguments.json, result)
    print(f"\nnumbers in {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
