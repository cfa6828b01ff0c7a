"""Do 10,000 mixed requests at once leave nothing behind, and does each get the answer that a quiet engine gives?

Runs the engine in this process. First every distinct request is asked alone, without the prefix cache; then
they are drawn at random, so many at once, with it, all greedy: every skill, pictures of every number of crops,
several formats, answers of a few tokens, and among them requests with adapters, constraints, several samples,
logprobs and conversations with several pictures (`--features`). There are more adapters than slots, and with few
pages (`--set kv-pages=…`) what is cached is evicted all the time. In the end no request may have failed and no page
may be taken, memory of host and device may not have risen in the second half, and every answer must be, token for
token, that of the quiet engine, with its logprobs. Batches of other sizes round otherwise; so where an answer parts
from its quiet one, a second copy of the model is led along to that place, alone and on the same paths: it is a tie
if neither token's logit lies further below the best one than the tolerance, a share of it, else a real difference.

    python -m bench.correctness.load --model /tmp/md2
    python -m bench.correctness.load --requests 60 --distinct 12 --at-once 8
    python -m bench.correctness.load --features    # none

Prints the SHA-256 of the answers of the quiet engine, which two runs on one machine have in common. Wants Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import hashlib
import itertools
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from bench.correctness.mixed_requests import (
    FEATURES,
    features_of,
    mixed_requests,
    most_pictures,
    noted_tokens,
    with_features,
)
from bench.correctness.tie_judge import TOLERANCES, TieJudge
from bench.harness.checkpoints import write_adapters_of
from bench.harness.engines import add_engine_options, closed_loop, engine_config
from bench.harness.output import Progress, parser_of, write_json
from bench.harness.serving import machine_facts
from bench.harness.trend import median_slope
from kestrel_grpc.process.resources import SWITCH_INTERVAL_S
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import KestrelError
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import CachePolicy, Request
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.output.output_parser import Token

LARGEST_SLOPE_MIB = 4.0
"""What memory may rise by per 1,000 requests."""
FEWEST_JUDGED = 2000
"""Over fewer requests memory may well rise: it still fills what it will reuse."""
NUM_LOOKS = 100
LARGEST_LOGIT = 40.0
"""Of a head, about: what tolerances of logprobs follow from, which are differences of logits."""
NUM_ADAPTERS, NUM_SLOTS, RANK = 6, 4, 8
_MIB = 2**20


def first_difference(one: Sequence[Token], other: Sequence[Token]) -> int | None:
    """Where two answers part; None where they do not. Logprobs do not count."""
    for place, (left, right) in enumerate(itertools.zip_longest(one, other)):
        if left is None or right is None or left[:2] != right[:2]:
            return place
    return None


def logprob_distance(one: Sequence[Token], other: Sequence[Token]) -> float:
    """The largest distance of logprobs of tokens that two answers begin with alike, and of the most likely ones."""
    distances = [0.0]
    for left, right in itertools.takewhile(lambda pair: pair[0][:2] == pair[1][:2], zip(one, other, strict=False)):
        if left.logprob is None or right.logprob is None or len(left.top) != len(right.top):
            return math.inf
        distances.append(abs(left.logprob - right.logprob))
        # Of two that are equally likely, either may come first.
        distances += [abs(mine[1] - others[1]) for mine, others in zip(left.top, right.top, strict=True)]
    return max(distances)


@dataclass(frozen=True, slots=True)
class Look:
    """Memory after so many requests, in MiB."""

    requests: int
    host: float
    device_in_use: float
    """Of the whole device, by the driver."""
    device_allocated: float
    """By tensors."""

    @classmethod
    def now(cls, requests: int) -> Look:
        """Memory of this process in use, without memory that the C library keeps for reuse."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        host = resident_pages * os.sysconf("SC_PAGE_SIZE") / _MIB
        if not torch.cuda.is_available():
            return cls(requests, host, 0.0, 0.0)
        free, total = torch.cuda.mem_get_info()
        return cls(requests, host, (total - free) / _MIB, torch.cuda.memory_allocated() / _MIB)


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that is not the quiet one."""

    request: int
    """Its place among the distinct ones."""
    place: int
    """Of the first token that differs."""
    quiet: Token | None
    loaded: Token | None
    """None where that answer had ended."""


@dataclass(slots=True)
class Outcome:
    """What became of the loaded engine's requests."""

    seconds: float = 0.0
    num_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    differences: Counter[Difference] = field(default_factory=Counter)
    looks: list[Look] = field(default_factory=list)
    logprob_distance: float = 0.0
    """The largest of logprobs from the quiet ones."""
    num_used_pages: int = 0
    num_left: int = 0
    """Requests that the engine still holds."""
    num_prefix_lookups: int = 0
    num_prefix_hits: int = 0
    num_prefix_evictions: int = 0
    """Of pages that held cached prefixes."""


class Stress:
    """The distinct requests, asked by one engine: alone first, then many at once."""

    def __init__(self, engine: LocalEngine, requests: Sequence[Request], tokens: dict[int, list[Token]]) -> None:
        """tokens: what requests have generated, by their seeds."""
        self._engine = engine
        self._requests = requests
        self._tokens = tokens
        self._num_asked = 0
        self.quiet: list[list[Token] | None] = [None] * len(requests)
        self.outcome = Outcome()

    def ask_alone(self) -> None:
        """Ask each once, one after the other."""
        first_seed = self._num_asked

        def note(number: int, answer: Finished | KestrelError) -> None:
            if isinstance(answer, Finished):
                self.quiet[number] = self._tokens.pop(first_seed + number)
            else:
                self.outcome.errors[f"alone: {type(answer).__name__}: {answer}"] += 1

        # Nothing cached is used, so that a wrong page in the cache cannot be wrong in both answers.
        alone = (
            replace(request, options=replace(request.options, cache=CachePolicy.BYPASS))
            for request in self._with_seeds(range(len(self._requests)))
        )
        asyncio.run(closed_loop(self._engine, alone, 1, note))

    @property
    def quiet_digest(self) -> str:
        """SHA-256 of the tokens of all quiet answers: two runs on one machine have the same."""
        return hashlib.sha256(repr(self.quiet).encode()).hexdigest()

    def ask_many(self, count: int, num_at_once: int, progress: Progress) -> None:
        """Ask `count`, drawn at random from the distinct ones."""
        outcome, first_seed, num_done = self.outcome, self._num_asked, 0
        chance = random.Random(1)
        drawn: list[int] = []
        while len(drawn) < count:
            place = chance.randrange(len(self._requests))
            drawn += [place] * (self._requests[place].sampling.n or 1)  # frontends ask for samples one by one, too
        del drawn[count:]
        stride = max(count // NUM_LOOKS, 1)
        outcome.looks.append(Look.now(0))

        def note(number: int, answer: Finished | KestrelError) -> None:
            nonlocal num_done
            num_done += 1
            if isinstance(answer, Finished):
                outcome.num_tokens += answer.usage.num_output_tokens
                self._compare(drawn[number], self._tokens.pop(first_seed + number))
            else:
                outcome.errors[f"{type(answer).__name__}: {answer}"] += 1
            if num_done % stride == 0:
                outcome.looks.append(Look.now(num_done))
            if num_done % (stride * 10) == 0:
                progress.end(f"{num_done} requests")

        started = time.perf_counter()
        asyncio.run(closed_loop(self._engine, self._with_seeds(drawn), num_at_once, note))
        outcome.seconds = time.perf_counter() - started
        load = self._engine.load()
        outcome.num_used_pages = load.num_used_pages
        outcome.num_left = load.num_running + load.num_waiting + load.num_preprocessing
        cache = load.prefix_cache
        outcome.num_prefix_lookups, outcome.num_prefix_hits = cache.num_lookups, cache.num_hits
        outcome.num_prefix_evictions = cache.num_evictions

    def _with_seeds(self, places: Sequence[int]) -> Iterator[Request]:
        for place in places:
            request = self._requests[place]
            seed, self._num_asked = self._num_asked, self._num_asked + 1
            yield replace(request, sampling=replace(request.sampling, seed=seed, n=None))

    def _compare(self, request: int, loaded: list[Token]) -> None:
        quiet = self.quiet[request]
        if quiet is None:
            return
        if self._requests[request].sampling.logprobs is not None:
            distance = logprob_distance(quiet, loaded)
            self.outcome.logprob_distance = max(self.outcome.logprob_distance, distance)
        place = first_difference(quiet, loaded)
        if place is not None:
            ours, theirs = (answer[place] if place < len(answer) else None for answer in (loaded, quiet))
            self.outcome.differences[Difference(request, place, theirs, ours)] += 1


@dataclass(frozen=True, slots=True)
class Judged:
    """A difference, how often it came, and its margin as `TieJudge` tells it."""

    difference: Difference
    count: int
    margin: float


def judge(config: EngineConfig, stress: Stress, requests: Sequence[Request]) -> list[Judged]:
    """Every difference, the widest margin first."""
    if not stress.outcome.differences:
        return []
    judge, found = TieJudge(config), []
    try:
        for item, count in stress.outcome.differences.items():
            quiet = stress.quiet[item.request]
            assert quiet is not None, "only answers with a quiet one are compared"
            margin = judge.margin(requests[item.request], quiet[: item.place], item.quiet, item.loaded)
            found.append(Judged(item, count, margin))
    finally:
        judge.close()
    return sorted(found, key=lambda item: -item.margin)


def slopes(looks: Sequence[Look]) -> dict[str, float]:
    """By kind of memory, MiB per 1,000 requests over the second half; empty where there are too few looks.

    By medians: a size that comes for the first time takes memory for its recording, once.
    """
    half = [look for look in looks if look.requests >= looks[-1].requests / 2]
    found = {
        name: median_slope([(look.requests / 1000, getattr(look, name)) for look in half])
        for name in ("host", "device_in_use", "device_allocated")
    }
    return {name: slope for name, slope in found.items() if slope is not None}


def is_flat(rises: Mapping[str, float]) -> bool:
    """Whether no kind of memory rises."""
    return all(slope <= LARGEST_SLOPE_MIB for slope in rises.values())


def verdicts(
    outcome: Outcome, num_real: int, rises: Mapping[str, float], tolerance: float
) -> dict[str, bool | None]:
    """What had to hold, and whether it does; None where it cannot be told."""
    is_long = bool(outcome.looks) and outcome.looks[-1].requests >= FEWEST_JUDGED
    return {
        "no error": not outcome.errors,
        "no page left": not outcome.num_used_pages and not outcome.num_left,
        "memory flat": is_flat(rises) if is_long else None,
        "answers equal": not num_real,
        "logprobs equal": outcome.logprob_distance <= 2 * tolerance * LARGEST_LOGIT,
    }


def print_summary(
    outcome: Outcome, judged: Sequence[Judged], tolerance: float, rises: Mapping[str, float], num_requests: int
) -> None:
    """What was seen, in words."""
    print(
        f"\n{num_requests} requests in {outcome.seconds:.1f} s: {num_requests / outcome.seconds:.1f} per second",
        end="",
    )
    print(f", {outcome.num_tokens} tokens")
    for error, count in outcome.errors.most_common():
        print(f"{count} failed: {error}")
    print(f"{outcome.num_used_pages} pages and {outcome.num_left} requests left")
    print(
        f"prefix cache: {outcome.num_prefix_hits} hits of {outcome.num_prefix_lookups}, "
        f"{outcome.num_prefix_evictions} evictions"
    )
    for name, slope in rises.items():
        last = getattr(outcome.looks[-1], name)
        print(f"memory, {name:<17}{last:>10.1f} MiB, {slope:+.2f} per 1,000 requests")
    ties = [item for item in judged if item.margin <= tolerance]
    num_ties, num_real = (sum(item.count for item in some) for some in (ties, judged[: len(judged) - len(ties)]))
    widest = max((item.margin for item in ties), default=0.0)
    print(
        f"{num_ties} answers part at a tie ({len(ties)} places, margins to {widest:.2g} of {tolerance:g}), ", end=""
    )
    print(f"{num_real} differ")
    print(f"logprobs differ by {outcome.logprob_distance:.2g} at most")
    for item in judged[:10]:
        if item.margin > tolerance:
            print(f"  margin {item.margin:.3g}, {item.count} times: {item.difference}")


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = parser_of(__doc__)
    add_engine_options(result)
    result.add_argument("--requests", type=int, default=10_000, help="under load (%(default)s)")
    result.add_argument("--at-once", type=int, default=64, help="that run at all times (%(default)s)")
    result.add_argument("--distinct", type=int, default=120, help="different ones among them (%(default)s)")
    described = ", ".join(f"{name} {value:g}" for name, value in TOLERANCES.items())
    result.add_argument(
        "--tolerance", type=float, help=f"of a tie, as a share of the best logit (default: {described})"
    )
    result.add_argument(
        "--features", nargs="*", choices=FEATURES, default=FEATURES, help="what some requests have (all of them)"
    )
    result.add_argument(
        "--json", type=Path, default=Path(os.environ.get("OUT", "bench/out")) / "load.json", help="%(default)s"
    )
    return result


def main() -> int:
    """Run, print the summary, write the JSON; 1 if something does not hold."""
    options = parser()
    arguments = options.parse_args()
    config = engine_config(options, arguments)
    config = replace(config, max_queued_requests=max(config.max_queued_requests, arguments.at_once))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with tempfile.TemporaryDirectory() as folder:
        return _run(arguments, config, Path(folder))


def _run(arguments: argparse.Namespace, config: EngineConfig, folder: Path) -> int:
    """As `main`; `folder`: for adapters."""
    loaded = LoadedModel.load(config)
    names: tuple[str, ...] = ()
    if "adapters" in arguments.features:
        names = write_adapters_of(folder, loaded.model.config.text, NUM_ADAPTERS, RANK)
        config = replace(config, adapters=str(folder), num_adapter_slots=NUM_SLOTS, max_adapter_rank=RANK)
    requests = mixed_requests(arguments.distinct, loaded.model.config)
    requests = with_features(requests, arguments.features, names, most_pictures(loaded.model.config))
    print(", ".join(f"{count} with {name}" for name, count in features_of(requests).items()), flush=True)
    progress = Progress(11)
    with noted_tokens() as tokens:
        engine = LocalEngine(loaded, config)
        try:
            stress = Stress(engine, requests, tokens)
            progress.begin("each alone")
            stress.ask_alone()
            progress.end("each alone")
            stress.ask_many(arguments.requests, arguments.at_once, progress)
        finally:
            engine.close()
    progress.close()
    types = (config.text_backend, config.vision_backend, config.kv_dtype)
    precision = "float8" if any(name.endswith("float8") for name in types) else engine.info.dtype
    tolerance = TOLERANCES[precision] if arguments.tolerance is None else arguments.tolerance
    judged = judge(config, stress, requests)
    outcome, rises = stress.outcome, slopes(stress.outcome.looks)
    num_real = sum(item.count for item in judged if item.margin > tolerance)
    found = verdicts(outcome, num_real, rises, tolerance)
    print_summary(outcome, judged, tolerance, rises, arguments.requests)
    print(f"answers alone: SHA-256 {stress.quiet_digest}")
    print(", ".join(f"{name}: {_WORDS[value]}" for name, value in found.items()))
    write_json(
        arguments.json,
        {"verdicts": found, "quiet_digest": stress.quiet_digest, "features": features_of(requests)}
        | as_json(arguments, engine, outcome, judged, tolerance, rises),
    )
    print(arguments.json)
    return 1 if False in found.values() else 0


_WORDS: Mapping[bool | None, str] = MappingProxyType({True: "yes", False: "NO", None: "too few requests to tell"})


def as_json(
    arguments: argparse.Namespace,
    engine: LocalEngine,
    outcome: Outcome,
    judged: Sequence[Judged],
    tolerance: float,
    rises: Mapping[str, float],
) -> dict[str, Any]:
    """All that was seen."""
    info = engine.info
    return {
        "machine": machine_facts(),
        "engine": {"model": info.model, "device": info.device, "dtype": info.dtype, "set": arguments.set},
        "requests": arguments.requests,
        "at_once": arguments.at_once,
        "distinct": arguments.distinct,
        "seconds": outcome.seconds,
        "requests_per_s": arguments.requests / outcome.seconds,
        "tokens": outcome.num_tokens,
        "errors": dict(outcome.errors),
        "pages_left": outcome.num_used_pages,
        "requests_left": outcome.num_left,
        "prefix_cache": {
            "lookups": outcome.num_prefix_lookups,
            "hits": outcome.num_prefix_hits,
            "evictions": outcome.num_prefix_evictions,
        },
        "tolerance": tolerance,
        "ties": sum(item.count for item in judged if item.margin <= tolerance),
        "real_differences": sum(item.count for item in judged if item.margin > tolerance),
        "differences": [asdict(item) for item in judged],
        "logprob_distance": outcome.logprob_distance,
        "mib_per_1000_requests": dict(rises),
        "memory_mib": [asdict(look) for look in outcome.looks],
    }


if __name__ == "__main__":
    sys.exit(main())
