"""How time grows with image size, prompt length and batch: the engine in process, one table per question.

Every number is the median of a few requests after one that warms up. The prompt is prefilled once per request;
nothing is cached between requests. Answers are drawn at a high temperature so that they run to `max_tokens`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from bench.harness.output import write_json
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.events import Finished
from kestrel_runtime.api.requests import Caption, Query, Request, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.imaging.decoding import decode_image
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.vision.tiling import MoondreamTiling

IMAGE_SIZES_PX = (
    (64, 64),
    (378, 378),
    (500, 400),
    (800, 557),
    (768, 1024),
    (1600, 400),
    (1920, 1080),
    (4000, 3000),
)
PROMPT_WORDS = (1, 50, 100, 200, 400, 800)
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
OUTPUT_TOKENS = 32

Row = dict[str, Any]


def sampling(max_tokens: int) -> SamplingParams:
    """Drawn so wildly that an answer hardly ever ends before `max_tokens`."""
    return SamplingParams(temperature=100.0, top_p=1.0, max_tokens=max_tokens, seed=1)


def jpeg(width_px: int, height_px: int) -> bytes:
    """A picture with something in it at every scale."""
    file = io.BytesIO()
    Image.effect_mandelbrot((width_px, height_px), (-2.2, -1.2, 0.8, 1.2), 60).convert("RGB").save(file, "JPEG")
    return file.getvalue()


class Scaling:
    """The three questions, put to one engine."""

    def __init__(self, loaded: LoadedModel, engine: LocalEngine, rounds: int) -> None:
        self._tiling = MoondreamTiling(loaded.model.config.vision)
        self._engine = engine
        self._rounds = rounds

    async def image_size(self) -> list[Row]:
        """One caption's first token, by the size of its image."""
        rows: list[Row] = []
        for width_px, height_px in IMAGE_SIZES_PX:
            data = jpeg(width_px, height_px)
            image = decode_image(data, max_image_pixels=width_px * height_px)
            tiling = self._tiling.select(image.height, image.width)
            timings = [item.timing for item in await self._repeat(Caption(data, sampling=sampling(1)))]
            rows.append(
                {
                    "image": f"{width_px}x{height_px}",
                    "crops": 1 + tiling[0] * tiling[1],
                    "preprocess ms": 1e3 * statistics.median(item.preprocess_s for item in timings),
                    "encode and prefill ms": 1e3 * statistics.median(item.prefill_s for item in timings),
                    "first token ms": 1e3 * statistics.median(item.time_to_first_token_s for item in timings),
                }
            )
        return rows

    async def prompt_length(self) -> list[Row]:
        """One question's first token and its tokens after that, by the length of the question."""
        rows: list[Row] = []
        for num_words in PROMPT_WORDS:
            finished = await self._repeat(Query("word " * num_words, sampling=sampling(OUTPUT_TOKENS)))
            prefill_s = statistics.median(item.timing.prefill_s for item in finished)
            per_token_s = [item.timing.decode_s / max(item.usage.num_output_tokens - 1, 1) for item in finished]
            rows.append(
                {
                    "prompt tokens": finished[0].usage.num_input_tokens,
                    "prefill ms": 1e3 * prefill_s,
                    "prefill tokens/s": finished[0].usage.num_input_tokens / prefill_s,
                    "per output token ms": 1e3 * statistics.median(per_token_s),
                }
            )
        return rows

    async def batch(self) -> list[Row]:
        """Answers without an image, by how many are generated together."""
        rows: list[Row] = []
        for size in BATCH_SIZES:
            request = Query("hello", sampling=sampling(OUTPUT_TOKENS))
            elapsed_s: list[float] = []
            num_tokens = 0
            for _ in range(self._rounds + 1):
                started = time.perf_counter()
                finished = await asyncio.gather(*(self._engine.submit(request).result() for _ in range(size)))
                elapsed_s.append(time.perf_counter() - started)
                num_tokens = sum(item.usage.num_output_tokens for item in finished)
            seconds = statistics.median(elapsed_s[1:])
            rows.append(
                {
                    "batch": size,
                    "tokens/s": num_tokens / seconds,
                    "step ms": 1e3 * seconds * size / num_tokens,
                    "tokens/s over batch 1": (num_tokens / seconds)
                    / (rows[0]["tokens/s"] if rows else num_tokens / seconds),
                }
            )
        return rows

    async def _repeat(self, request: Request) -> list[Finished]:
        results = [await self._engine.submit(request).result() for _ in range(self._rounds + 1)]
        return results[1:]


def print_table(title: str, rows: list[Row]) -> None:
    """Print rows under the names of their columns."""
    print(f"\n{title}\n\n| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        cells = (f"{value:,.1f}" if isinstance(value, float) else str(value) for value in row.values())
        print("| " + " | ".join(cells) + " |")


async def measure(scaling: Scaling) -> dict[str, list[Row]]:
    """Ask all three questions; each is printed as soon as it is answered."""
    questions: dict[str, Callable[[], Awaitable[list[Row]]]] = {
        "Image size": scaling.image_size,
        "Prompt length": scaling.prompt_length,
        "Batch": scaling.batch,
    }
    results: dict[str, list[Row]] = {}
    for title, question in questions.items():
        results[title] = await question()
        print_table(title, results[title])
    return results


def main() -> int:
    """Print the tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tests/golden/md3-small", help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--dtype", default="auto", help="default: auto")
    parser.add_argument("--rounds", type=int, default=3, help="measured requests per row (default: 3)")
    parser.add_argument("--json", type=Path, default=Path("bench/out/scaling.json"), help="default: %(default)s")
    arguments = parser.parse_args()
    logging.basicConfig(level="WARNING")
    config = EngineConfig(
        model=arguments.model, device=arguments.device, dtype=arguments.dtype, max_batch_size=max(BATCH_SIZES)
    )
    loaded = LoadedModel.load(config)
    engine = LocalEngine(loaded, config)
    facts = {
        "model": engine.info.model,
        "device": engine.info.device,
        "dtype": engine.info.dtype,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    try:
        results = asyncio.run(measure(Scaling(loaded, engine, arguments.rounds)))
    finally:
        engine.close()
    write_json(arguments.json, {"machine": facts, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
