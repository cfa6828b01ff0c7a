"""Mixed requests of every skill, with pictures of every number of tiles, and the tokens of their answers."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import random
from collections.abc import Iterable, Iterator

from PIL import Image

from bench.harness.engines import Method, wrapped
from bench.harness.workload import QUESTIONS, TEXT_QUESTIONS, chart
from kestrel_runtime.api.requests import (
    BoxRef,
    Caption,
    Detect,
    Gaze,
    Point,
    PointRef,
    Query,
    Request,
    SamplingParams,
    Segment,
)
from kestrel_runtime.execution.step_runner import StepRunner
from kestrel_runtime.models.moondream.config import MoondreamConfig, VisionConfig
from kestrel_runtime.models.moondream.family import FAMILY
from kestrel_runtime.models.moondream.vision.tiling import MoondreamTiling
from kestrel_runtime.scheduling.output_parser import Token
from kestrel_runtime.scheduling.sequence import Sequence

FORMATS = (
    ("JPEG", "RGB"),
    ("PNG", "RGBA"),
    ("WEBP", "RGB"),
    ("GIF", "P"),
    ("JPEG", "L"),
    ("BMP", "RGB"),
    ("TIFF", "RGB"),
)
"""Formats with the kind of their pixels."""
OBJECTS = ("bar", "tallest bar", "label", "red bar", "number")
_LONGEST_SIDE_TILES = 25


def sizes_by_tiles(vision: VisionConfig) -> dict[int, tuple[int, int]]:
    """The least width and height in pixels of a picture of so many tiles, for every number that there is."""
    tiling = MoondreamTiling(vision)
    sides = [tiling.stride_px * quarters // 4 for quarters in range(1, 4 * _LONGEST_SIDE_TILES)]
    found: dict[int, tuple[int, int]] = {}
    for width, height in sorted(itertools.product(sides, sides), key=lambda size: size[0] * size[1]):
        rows, columns = tiling.select(height, width)
        found.setdefault(1 + rows * columns, (width, height))
    return dict(sorted(found.items()))


def mixed_requests(count: int, config: MoondreamConfig, *, seed: int = 0) -> list[Request]:
    """So many different ones, greedy, of 2 to 8 tokens where the model does not end them before."""
    chance = random.Random(seed)
    kinds = itertools.cycle(_kinds(config))
    pictures = _pictures(config.vision, chance)
    return [_request(next(kinds), chance, pictures) for _ in range(count)]


def _kinds(config: MoondreamConfig) -> list[str]:
    """Skills, and what else there is to ask of them."""
    kinds = [*FAMILY.skills(config)]
    if "query" in kinds:
        kinds += ["text", "reasoning", "refs"]
    if "caption" in kinds:
        kinds.remove("caption")
        kinds += [f"caption {length}" for length in config.tokenizer.templates["caption"]]
    return kinds


def _pictures(vision: VisionConfig, chance: random.Random) -> Iterator[bytes]:
    """One after another: each number of tiles in turn, upright and lying, in each format in turn."""
    sizes = [*sizes_by_tiles(vision).values()]
    formats = itertools.cycle(FORMATS)
    for width, height in itertools.cycle(sizes):
        size = (width, height) if chance.random() < 0.5 else (height, width)
        yield _converted(chart(chance.randrange(2**32), *size), *next(formats))


def _converted(jpeg: bytes, image_format: str, mode: str) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(jpeg)).convert(mode).save(file, image_format)
    return file.getvalue()


def _request(kind: str, chance: random.Random, pictures: Iterable[bytes]) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=chance.randint(3, 8))
    question, name = chance.choice(QUESTIONS), chance.choice(OBJECTS)
    if kind == "text":
        return Query(chance.choice(TEXT_QUESTIONS), sampling=sampling)
    image = next(iter(pictures))
    if kind == "reasoning":
        return Query(question, image, reasoning=True, sampling=SamplingParams(temperature=0.0, max_tokens=3))
    if kind == "refs":
        box = _box(chance)
        return Query(
            question, image, spatial_refs=(PointRef(chance.random(), chance.random()), box), sampling=sampling
        )
    if kind.startswith("caption "):
        return Caption(image, kind.removeprefix("caption "), sampling)
    if kind == "point":
        return Point(name, image, chance.randint(1, 4), sampling=SamplingParams(temperature=0.0))
    if kind == "detect":
        return Detect(name, image, chance.randint(1, 2), sampling=SamplingParams(temperature=0.0))
    if kind == "segment":
        return Segment(name, image, sampling=sampling)
    if kind == "gaze":
        return Gaze(image, PointRef(chance.random(), chance.random()), SamplingParams(temperature=0.0))
    return Query(question, image, sampling=sampling)


def _box(chance: random.Random) -> BoxRef:
    (left, right), (top, bottom) = (sorted((chance.random(), chance.random())) for _ in range(2))
    return BoxRef(left, top, right, bottom)


@contextlib.contextmanager
def noted_tokens() -> Iterator[dict[int, list[Token]]]:
    """Until the block ends, what every request has generated, by its seed, before its stream tells its end.

    The caller gives each request a different seed, and removes the entries that it has read.
    """
    tokens: dict[int, list[Token]] = {}

    def noting(release: Method) -> Method:
        @functools.wraps(release)
        def note(runner: StepRunner, sequence: Sequence) -> None:
            tokens[sequence.seed] = sequence.tokens[sequence.num_prompt_tokens :]
            release(runner, sequence)

        return note

    with wrapped(StepRunner, "release", noting):
        yield tokens
