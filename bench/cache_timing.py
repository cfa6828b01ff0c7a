"""Does the time of an answer tell a caller what another tenant has asked about?

Starts a server with the built-in model on the CPU and with tokens, and asks over gRPC. In each trial there are
two new images. The victim asks about one of them, which is drawn at random; then the attacker asks another question
about the first and measures how long its one-token answer takes. From that time alone the attacker has to tell
which image the victim has asked about. The victim always asks, so that the server has done the same work before.

The attacker's token has a namespace of its own. In other trials, in between, the attacker uses a token that shares
the victim's namespace. The area under the ROC curve is the probability that a trial with the victim's image has
the shorter time: 0.5 is a coin, 1 is certainty. Across namespaces it must be within 0.05 of 0.5. Within one it must
be at least 0.95: otherwise the measurement could not see a hit, and the first number would mean nothing.

    nice python -m bench.cache_timing
    nice python -m bench.cache_timing --across 60 --within 60
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.harness.report import write_json
from bench.harness.serving import machine_facts, started_server
from kestrel_client import Client
from kestrel_grpc.access.tokens import Scope, line_for, new_secret

MAX_FROM_COIN, MIN_WITHIN = 0.05, 0.95
_IMAGE_PX = 64
_NUM_WARM_UPS = 5
_SERVER_OPTIONS = ("--device", "cpu", "--kv-pages", "1024")


@dataclass(frozen=True, slots=True)
class Trial:
    """What the attacker measured."""

    shares_namespace: bool
    is_known: bool
    """Whether the victim has asked about the attacker's image."""
    first_token_s: float
    cached_token_count: int
    """What the answer says of itself; the attacker does not use it."""


@dataclass(frozen=True, slots=True)
class Callers:
    """A client for each token."""

    victim: Client
    stranger: Client
    """Has a namespace of its own."""
    colleague: Client
    """Shares the namespace of the victim."""

    def attacker(self, *, shares_namespace: bool) -> Client:
        """Who measures."""
        return self.colleague if shares_namespace else self.stranger


@contextlib.contextmanager
def served(options: Sequence[str] = ()) -> Iterator[Callers]:
    """A server with the three tokens, and their clients."""
    names = ("victim", "stranger", "colleague")
    secrets = {name: new_secret() for name in names}
    lines = {name: line_for(name, secret, frozenset((Scope.INFER,))) for name, secret in secrets.items()}
    for name in ("victim", "colleague"):
        lines[name] = lines[name].removesuffix(" }") + ', namespace = "office" }'
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as clients:
        file = Path(folder) / "tokens.toml"
        file.write_text("".join(f"{line}\n" for line in lines.values()))
        server = clients.enter_context(started_server(("--tokens", str(file), *_SERVER_OPTIONS, *options)))
        yield Callers(*(clients.enter_context(Client(server.address, token=secrets[name])) for name in names))


def new_image(random_numbers: np.random.Generator) -> bytes:
    """An encoded image of one tile that was never seen before."""
    file = io.BytesIO()
    pixels = random_numbers.integers(0, 255, (_IMAGE_PX, _IMAGE_PX, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def trial(callers: Callers, images: tuple[bytes, bytes], *, shares_namespace: bool, is_known: bool) -> Trial:
    """Have the victim ask about the first image where `is_known`, else about the second; then attack the first."""
    target, other = images
    _ask(callers.victim, "What is in this image?", target if is_known else other)
    attacker = callers.attacker(shares_namespace=shares_namespace)
    began = time.perf_counter()
    num_cached = _ask(attacker, "Where is the red ball?", target)
    return Trial(shares_namespace, is_known, time.perf_counter() - began, num_cached)


def _ask(client: Client, question: str, image: bytes) -> int:
    """Ask for one token; returns how many positions were cached."""
    result = client.complete_query(image, question, max_tokens=1, temperature=0.0)
    return result.usage.cached_token_count


def trials(callers: Callers, *, num_across: int, num_within: int, seed: int) -> list[Trial]:
    """So many trials across namespaces and so many within one, in random order."""
    pixels, chance = np.random.default_rng(seed), random.Random(seed)
    kinds = [False] * num_across + [True] * num_within
    chance.shuffle(kinds)
    found: list[Trial] = []
    for number, shares_namespace in enumerate([False, True] * _NUM_WARM_UPS + kinds):
        images = new_image(pixels), new_image(pixels)
        done = trial(callers, images, shares_namespace=shares_namespace, is_known=chance.random() < 0.5)
        if number >= 2 * _NUM_WARM_UPS:
            found.append(done)
    return found


def area_under_curve(known_s: Sequence[float], unknown_s: Sequence[float]) -> float:
    """The share of pairs in which the known one is shorter; ties count half (Mann-Whitney). Needs one of each."""
    ordered = sorted([*known_s, *unknown_s])
    first, last = {}, {}
    for rank, value in enumerate(ordered, 1):
        first.setdefault(value, rank)
        last[value] = rank
    rank_sum = sum((first[value] + last[value]) / 2 for value in unknown_s)
    return (rank_sum - len(unknown_s) * (len(unknown_s) + 1) / 2) / (len(known_s) * len(unknown_s))


def summary(found: Sequence[Trial]) -> dict[str, Any]:
    """The area under the curve of trials of one kind, and what it is made of."""
    known, unknown = ([item for item in found if item.is_known is is_known] for is_known in (True, False))
    known_s, unknown_s = ([item.first_token_s for item in some] for some in (known, unknown))
    return {
        "trials": len(found),
        "known": len(known),
        "area_under_curve": area_under_curve(known_s, unknown_s),
        "known_p50_ms": statistics.median(known_s) * 1e3,
        "unknown_p50_ms": statistics.median(unknown_s) * 1e3,
        "hits_known": sum(item.cached_token_count > 0 for item in known),
        "hits_unknown": sum(item.cached_token_count > 0 for item in unknown),
    }


def main() -> int:
    """Measure, print the table, write the JSON; 1 where a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--across", type=int, default=2000, help="trials across namespaces (default: %(default)s)")
    parser.add_argument("--within", type=int, default=500, help="trials within one (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of images and draws (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, default=Path("bench/out/cache_timing.json"), help="default: %(default)s"
    )
    parser.add_argument("server_options", nargs="*", metavar="-- OPTION", help="options of `kestrel-grpc serve`")
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    with served(arguments.server_options) as callers:
        found = trials(callers, num_across=arguments.across, num_within=arguments.within, seed=arguments.seed)
    kinds = {
        name: summary([item for item in found if item.shares_namespace is shares])
        for name, shares in (("across", False), ("within", True))
    }
    print("| attacker | trials | AUC | asked about, p50 ms | not asked about, p50 ms |\n|---|---|---|---|---|")
    for name, numbers in kinds.items():
        print(
            f"| {name} | {numbers['trials']} | {numbers['area_under_curve']:.3f} "
            f"| {numbers['known_p50_ms']:.1f} | {numbers['unknown_p50_ms']:.1f} |"
        )
    across, within = (kinds[name]["area_under_curve"] for name in ("across", "within"))
    holds = abs(across - 0.5) <= MAX_FROM_COIN and within >= MIN_WITHIN
    result = {
        "machine": machine_facts(),
        "load": {"before": load_before, "after": os.getloadavg()},
        "required": {"across_at_most_from_0.5": MAX_FROM_COIN, "within_at_least": MIN_WITHIN},
        "seed": arguments.seed,
        "server_options": arguments.server_options,
        "holds": holds,
        **kinds,
    }
    write_json(arguments.json, result)
    print(arguments.json)
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
