"""Do 10,000 mixed requests at once leave nothing behind, and does each get the answer that a quiet engine gives?

Runs the engine in this process. First every distinct request is asked alone, without the prefix cache; then
they are drawn at random, so many at once, with it, all greedy: every skill, pictures of every number of tiles,
several formats, answers of a few tokens. With few pages (`--set kv-pages=…`) what is cached is evicted all the
time. In the end no request may have failed and no page may be taken, memory of host and device may not have
risen in the second half, and every answer must be, token for token, that of the quiet engine. Batches of other
sizes round otherwise; so where an answer parts from its quiet one, a second copy of the model is led along to
that place, alone and on the same paths: it is a tie if neither token's logit lies further below the best one
than the tolerance, a share of it, else a real difference.

    python -m bench.correctness.load --model /tmp/md2
    python -m bench.correctness.load --requests 60 --distinct 12 --at-once 8

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
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bench.correctness.mixed_requests import mixed_requests, noted_tokens
from bench.harness.engines import add_engine_options, closed_loop, engine_config
from bench.harness.output import Progress, write_json
from bench.harness.serving import machine_facts
from bench.harness.trend import median_slope
from kestrel_grpc.process import SWITCH_INTERVAL_S
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import KestrelError
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import CachePolicy, Request, RequestOptions
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.verify.prompt_run import PromptRun
from kestrel_runtime.scheduling.output_parser import Token
from kestrel_runtime.verify.preparing import preparing

TOLERANCES: Mapping[str, float] = MappingProxyType(
    {"float32": 1e-4, "float16": 5e-3, "bfloat16": 0.02, "float8": 0.1}
)
"""How far below the best logit a token may lie that rounding makes the best, as a share of that logit, by the
shortest type that computes."""
LARGEST_SLOPE_MIB = 4.0
"""What memory may rise by per 1,000 requests."""
FEWEST_JUDGED = 2000
"""Over fewer requests memory may well rise: it still fills what it will reuse."""
NUM_LOOKS = 100
_WITHOUT_CACHE = RequestOptions(cache=CachePolicy.BYPASS)
_MIB = 2**20


def first_difference(one: Sequence[Token], other: Sequence[Token]) -> int | None:
    """Where two answers part; None where they do not."""
    for place, (left, right) in enumerate(itertools.zip_longest(one, other)):
        if left != right:
            return place
    return None


class TieJudge:
    """A second copy of the model, on the paths that `config` names and all alone, that is led along an answer."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model."""
        loaded = LoadedModel.load(config)
        self._resources = ExitStack()
        prepare = self._resources.enter_context(preparing(loaded, config))
        self._run = PromptRun(loaded.model, config, prepare)

    def close(self) -> None:
        """End its thread."""
        self._resources.close()

    @torch.inference_mode()
    def margin(self, request: Request, common: Sequence[Token], one: Token | None, other: Token | None) -> float:
        """How far the logit of either token lies below the best there is, after the `common` tokens of an answer.

        As a share of the best, since some heads have logits of 4 and others of 40, and rounding goes by their size.
        Tokens of one id differ by their values, and the logits are those of the values. Infinite where one answer
        goes on and the other does not.
        """
        if one is None or other is None:
            return math.inf
        self._run.begin(request)
        model = self._run.model
        hidden = self._run.hidden_after(common).to(model.dtype)
        if one.id != other.id:
            logits = model.text.logits(hidden)[0]
            rule = self._run.sequence.parser.rule
            if rule.allowed is not None:
                logits = torch.full_like(logits, -math.inf).index_copy_(
                    0, torch.tensor(rule.allowed, device=logits.device), logits[list(rule.allowed)]
                )
            logits[list(rule.suppressed)] = -math.inf
            return _margin(logits, one.id, other.id)
        region = model.region
        if len(one.value) == 1:
            rows, values_of = region.coordinate_logits(hidden), region.coordinates
        else:
            rows, values_of = region.size_logits(hidden)[0], region.sizes
        values = values_of(torch.arange(rows.shape[-1], device=rows.device), rows.shape[-1])
        pairs = zip(rows, one.value, other.value, strict=True)
        return max(_margin(row, _bin(values, left), _bin(values, right)) for row, left, right in pairs)


def _margin(logits: Tensor, one: int, other: int) -> float:
    if one == other:
        return 0.0
    best = logits.max().item()
    return (best - min(logits[one].item(), logits[other].item())) / max(abs(best), 1.0)


def _bin(values: Tensor, value: float) -> int:
    return int((values - value).abs().argmin())


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
            replace(request, options=_WITHOUT_CACHE) for request in self._with_seeds(range(len(self._requests)))
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
        drawn = [chance.randrange(len(self._requests)) for _ in range(count)]
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
            yield replace(request, sampling=replace(request.sampling, seed=seed))

    def _compare(self, request: int, loaded: list[Token]) -> None:
        quiet = self.quiet[request]
        if quiet is None:
            return
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


def verdicts(outcome: Outcome, num_real: int, rises: Mapping[str, float]) -> dict[str, bool | None]:
    """What had to hold, and whether it does; None where it cannot be told."""
    is_long = bool(outcome.looks) and outcome.looks[-1].requests >= FEWEST_JUDGED
    return {
        "no error": not outcome.errors,
        "no page left": not outcome.num_used_pages and not outcome.num_left,
        "memory flat": is_flat(rises) if is_long else None,
        "answers equal": not num_real,
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
    for item in judged[:10]:
        if item.margin > tolerance:
            print(f"  margin {item.margin:.3g}, {item.count} times: {item.difference}")


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(result)
    result.add_argument("--requests", type=int, default=10_000, help="under load (%(default)s)")
    result.add_argument("--at-once", type=int, default=64, help="that run at all times (%(default)s)")
    result.add_argument("--distinct", type=int, default=120, help="different ones among them (%(default)s)")
    described = ", ".join(f"{name} {value:g}" for name, value in TOLERANCES.items())
    result.add_argument(
        "--tolerance", type=float, help=f"of a tie, as a share of the best logit (default: {described})"
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
    loaded = LoadedModel.load(config)
    requests = mixed_requests(arguments.distinct, loaded.model.config)
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
    types = (config.text_path, config.vision_path, config.kv_dtype)
    precision = "float8" if any(name.endswith("float8") for name in types) else engine.info.dtype
    tolerance = TOLERANCES[precision] if arguments.tolerance is None else arguments.tolerance
    judged = judge(config, stress, requests)
    outcome, rises = stress.outcome, slopes(stress.outcome.looks)
    num_real = sum(item.count for item in judged if item.margin > tolerance)
    found = verdicts(outcome, num_real, rises)
    print_summary(outcome, judged, tolerance, rises, arguments.requests)
    print(f"answers alone: SHA-256 {stress.quiet_digest}")
    print(", ".join(f"{name}: {_WORDS[value]}" for name, value in found.items()))
    write_json(
        arguments.json,
        {"verdicts": found, "quiet_digest": stress.quiet_digest}
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
        "mib_per_1000_requests": dict(rises),
        "memory_mib": [asdict(look) for look in outcome.looks],
    }


if __name__ == "__main__":
    sys.exit(main())
