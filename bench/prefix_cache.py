"""What a request costs whose image is known, compared with one whose image is not: the engine alone, without gRPC.

Each image is asked about twice, with different questions; the second answer uses the pages of the first. It runs
the built-in model on a CPU unless `--model` and `--device` say otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import time

import numpy as np
from PIL import Image

from kestrel_runtime.api.config import BUILT_IN_MODEL, EngineConfig
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine

QUESTIONS = ("What is in this image?", "Where is the red ball?")
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


def pictures(count: int) -> list[bytes]:
    """Encoded images that differ from each other."""
    random = np.random.default_rng(0)
    files = [io.BytesIO() for _ in range(count)]
    for file in files:
        blocks = random.integers(0, 255, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(blocks).resize((500, 400)).save(file, "JPEG")
    return [file.getvalue() for file in files]


async def ask(engine: LocalEngine, question: str, image: bytes) -> tuple[float, int]:
    """Seconds to the first token, and how many positions were cached."""
    started = time.perf_counter()
    finished = await engine.submit(Query(question, image, sampling=ONE_TOKEN)).result()
    return time.perf_counter() - started, finished.usage.num_cached_tokens


async def measure(engine: LocalEngine, count: int) -> tuple[list[float], list[float]]:
    """Seconds of misses and of hits."""
    misses: list[float] = []
    hits: list[float] = []
    for number, image in enumerate(pictures(count + 1)):
        (miss_s, none), (hit_s, some) = [await ask(engine, question, image) for question in QUESTIONS]
        assert not none, "the image is new"
        assert some, "the image is known"
        if number:  # the first is a warm-up
            misses.append(miss_s)
            hits.append(hit_s)
    return misses, hits


def main() -> int:
    """Print both medians and their ratio. 1 where the ratio is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=BUILT_IN_MODEL)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=30, help="images to ask about (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=0.35, help="largest ratio (default: %(default)s)")
    arguments = parser.parse_args()
    engine = LocalEngine.start(EngineConfig(model=arguments.model, device=arguments.device))
    try:
        misses, hits = asyncio.run(measure(engine, arguments.images))
    finally:
        engine.close()
    miss_ms, hit_ms = statistics.median(misses) * 1e3, statistics.median(hits) * 1e3
    print(f"first token: {miss_ms:.1f} ms with a new image, {hit_ms:.1f} ms with a known one")
    print(f"ratio {hit_ms / miss_ms:.3f}, limit {arguments.limit}")
    return int(hit_ms > arguments.limit * miss_ms)


if __name__ == "__main__":
    raise SystemExit(main())
