"""How many outlines per second does the server stream, and how soon is an object's box there?

Keeps so many `StreamSegment` calls running at a time (closed loop), each about a scene that is computed anew, and
counts outlines, tokens and times within a window. The overlap with the truth of the scenes is that of the built-in
model; of other models it says nothing. Starts `kestrel-grpc serve` as a process of its own, or loads the one at
`--target`; options after `--` go to the server. Wants the training extra.

    python -m bench.outlines --quick
    python -m bench.outlines --at-once 64 --seconds 20 -- --device cuda
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.output import parser_of, write_json
from bench.harness.serving import RunningServer, machine_facts, started_server
from kestrel_client import AsyncClient, KestrelClientError, SegmentResult
from kestrel_runtime.api.config import BUILT_IN_MODEL
from training import scoring
from training.drawing import encode_scene
from training.phrases import unique
from training.scenes import HELD_OUT_SEED, Thing, make_scene

WARM_UP_SHARE = 0.25
"""Of the window, before it begins."""


@dataclass(frozen=True, slots=True)
class Object:
    """A shape in a picture, and what it is called."""

    picture: bytes
    name: str
    thing: Thing


@dataclass(frozen=True, slots=True)
class Outlined:
    """One answer: when it ended, in seconds of the clock, and what it took."""

    end_s: float
    box_s: float | None
    total_s: float
    num_tokens: int
    is_partial: bool
    overlap: float


def objects(count: int) -> list[Object]:
    """One object in each of so many scenes."""
    found: list[Object] = []
    seed = HELD_OUT_SEED
    while len(found) < count:
        scene, rng = make_scene(seed), random.Random(seed)
        solid = [thing for thing in scene.shapes if not thing.is_hollow and unique(scene, thing, rng) is not None]
        if solid:
            thing = rng.choice(solid)
            found.append(Object(encode_scene(scene), unique(scene, thing, rng) or thing.name, thing))
        seed += 1
    return found


async def outline(client: AsyncClient, wanted: Object, max_tokens: int | None) -> Outlined:
    """Have one outline streamed. Its picture is computed anew each time."""
    start_s, box_s = time.perf_counter(), None
    stream = client.stream_segment(wanted.picture, wanted.name, cache="bypass", max_tokens=max_tokens)
    async for _ in stream:
        box_s = box_s or time.perf_counter() - start_s
    result = await stream.result()
    end_s = time.perf_counter()
    is_partial = any(segment.is_partial for segment in result.segments)
    score = _overlap(result, wanted.thing)
    return Outlined(end_s, box_s, end_s - start_s, result.usage.output_token_count, is_partial, score)


def _overlap(result: SegmentResult, thing: Thing) -> float:
    if not result.segments:
        return 0.0
    left, top, right, bottom = thing.box
    contours = thing.outline.contours if thing.outline else (((0, 0), (1, 0), (1, 1), (0, 1)),)
    truth = [[(left + x * (right - left), top + y * (bottom - top)) for x, y in contour] for contour in contours]
    return scoring.outline_iou(result.segments[0].polygons(), truth)


async def load(arguments: argparse.Namespace, address: str) -> dict[str, Any]:
    """Load the server; returns what was measured."""
    wanted = await asyncio.to_thread(objects, arguments.scenes)
    answers: list[Outlined] = []
    errors: list[str] = []
    begin_s = time.perf_counter() + WARM_UP_SHARE * arguments.seconds
    end_s = begin_s + arguments.seconds

    async def caller(number: int) -> None:
        async with AsyncClient(address) as client:
            while time.perf_counter() < end_s:
                try:
                    answers.append(await outline(client, wanted[number % len(wanted)], arguments.max_tokens))
                except KestrelClientError as error:
                    errors.append(repr(error))
                number += arguments.at_once

    await asyncio.gather(*(caller(number) for number in range(arguments.at_once)))
    counted = [answer for answer in answers if begin_s <= answer.end_s <= end_s]
    return {**summary(counted, arguments.seconds), "errors": len(errors), "first errors": errors[:3]}


def summary(answers: list[Outlined], window_s: float) -> dict[str, Any]:
    """The row of the table. Times are in seconds."""
    if not answers:
        return {"outlines": 0}
    boxes = [answer.box_s for answer in answers if answer.box_s is not None]
    return {
        "outlines": len(answers),
        "outlines per s": len(answers) / window_s,
        "tokens per s": sum(answer.num_tokens for answer in answers) / window_s,
        "tokens per outline": statistics.fmean(answer.num_tokens for answer in answers),
        "time to box, median": statistics.median(boxes) if boxes else None,
        "time to outline, median": statistics.median(answer.total_s for answer in answers),
        "found": len(boxes) / len(answers),
        "partial": sum(answer.is_partial for answer in answers) / len(answers),
        "mean IoU": statistics.fmean(answer.overlap for answer in answers),
    }


@contextlib.contextmanager
def served(arguments: argparse.Namespace) -> Iterator[RunningServer]:
    """The server that is asked for."""
    if arguments.target is not None:
        yield RunningServer(arguments.target)
        return
    options = ("--model", arguments.model, "--max-batch-size", str(arguments.at_once), *arguments.server_options)
    with started_server(options) as server:
        yield server


def main(argv: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="4 at once, 4 seconds")
    parser.add_argument("--at-once", type=int, help="calls at a time (64)")
    parser.add_argument("--seconds", type=float, help="length of the window (20)")
    parser.add_argument("--scenes", type=int, default=256, help="different pictures (%(default)s)")
    parser.add_argument("--max-tokens", type=int, help="for models that never end (the server's default)")
    parser.add_argument("--model", default=BUILT_IN_MODEL)
    parser.add_argument("--target", help="a server that runs already")
    parser.add_argument("--json", type=Path, default=Path("bench/out/outlines.json"))
    parser.add_argument("server_options", nargs="*", metavar="-- OPTION")
    arguments = parser.parse_args(argv)
    arguments.at_once = arguments.at_once or (4 if arguments.quick else 64)
    arguments.seconds = arguments.seconds or (4.0 if arguments.quick else 20.0)
    if arguments.quick:
        arguments.scenes = min(arguments.scenes, 16)
    with served(arguments) as server:
        row = {"at once": arguments.at_once, **asyncio.run(load(arguments, server.address))}
    for name, value in row.items():
        print(f"{name:26} {value:.4g}" if isinstance(value, float) else f"{name:26} {value}")
    write_json(arguments.json, {"row": row, "machine": machine_facts()})


if __name__ == "__main__":
    main()
