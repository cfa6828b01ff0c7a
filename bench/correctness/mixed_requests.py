"""Mixed requests of every skill, with pictures of every number of crops, what else may be asked of them, and the
tokens of their answers.
"""

import contextlib
import functools
import io
import itertools
import json
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import PIL.Image

from bench.harness.engines import Method, wrapped
from bench.harness.workload import QUESTIONS, TEXT_QUESTIONS, chart
from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.images import Image
from kestrel_runtime.api.requests import (
    BoxRef,
    Caption,
    Chat,
    ChatMessage,
    Detect,
    Gaze,
    Point,
    PointRef,
    Query,
    Request,
    Role,
    SamplingParams,
    Segment,
)
from kestrel_runtime.execution.step_runner import StepRunner
from kestrel_runtime.models.moondream.config import MoondreamConfig, VisionConfig
from kestrel_runtime.models.moondream.family import FAMILY
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.sequence import TokenSequence

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
_LONGEST_SIDE_CROPS = 25


def sizes_by_crops(vision: VisionConfig) -> dict[int, tuple[int, int]]:
    """The least width and height in pixels of a picture of so many crops, for every number that there is."""
    cropping = MoondreamCropping(vision)
    sides = [cropping.stride_px * quarters // 4 for quarters in range(1, 4 * _LONGEST_SIDE_CROPS)]
    found: dict[int, tuple[int, int]] = {}
    for width, height in sorted(itertools.product(sides, sides), key=lambda size: size[0] * size[1]):
        rows, columns = cropping.select(height, width)
        found.setdefault(1 + rows * columns, (width, height))
    return dict(sorted(found.items()))


def mixed_requests(count: int, config: MoondreamConfig, *, seed: int = 0) -> list[Request]:
    """So many different ones, greedy, of 2 to 8 tokens where the model does not end them before."""
    chance = random.Random(seed)
    kinds = itertools.cycle(_kinds(config))
    pictures = _pictures(config.vision, chance)
    return [_request(next(kinds), chance, pictures) for _ in range(count)]


FEATURES = ("adapters", "constraints", "samples", "logprobs", "conversations")
"""What requests may have beside their skill."""
_SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "is_red": {"type": "boolean"}},
    "required": ["count", "is_red"],
    "additionalProperties": False,
}
CONSTRAINTS = (
    Constraint(choices=("yes", "no", "neither of both")),
    Constraint(regex="(red|green|blue) [0-9]{2,4}"),
    Constraint(json_schema=json.dumps(_SCHEMA)),
)
_CONSTRAINED_TOKENS = 48
_MOST_SAMPLES, _MOST_LOGPROBS = 3, 5
_MOST_PICTURES, _TEXT_POSITIONS = 3, 400
"""Of a conversation; positions are what its texts and the answer may take."""


def most_pictures(config: MoondreamConfig) -> int:
    """How many pictures a conversation may show, so that it fits the context."""
    fitting = (config.text.max_context - _TEXT_POSITIONS) // config.vision.num_image_tokens
    return max(1, min(_MOST_PICTURES, fitting))


def with_features(
    requests: Iterable[Request],
    features: Collection[str],
    adapters: Sequence[str],
    num_pictures: int = _MOST_PICTURES,
    *,
    seed: int = 0,
) -> list[Request]:
    """The same with `features`: adapters for two of three, logprobs and constraints for every second one that can
    have them, several samples for every fourth, up to `num_pictures` pictures in conversations, and every second
    question about a picture as the last of such a conversation.
    """
    chance, others, found = random.Random(seed), random.Random(seed), []
    talks, is_asked_later = "conversations" in features and num_pictures > 1, itertools.cycle((True, False))
    requests = list(requests)
    pictures = [request.images[0] for request in requests if request.images]
    for request in requests:
        shares = {"adapters": 2 / 3, "constraints": 1 / 2, "samples": 1 / 4, "logprobs": 1 / 2}
        drawn = [name for name, share in shares.items() if chance.random() < share]
        has = {name: name in drawn and name in features for name in FEATURES}
        if has["adapters"]:
            request = replace(request, options=replace(request.options, adapter=chance.choice(adapters)))
        if talks and isinstance(request, Chat) and request.images:
            last = Query(request.messages[-1].text, request.images[0], request.reasoning, sampling=request.sampling)
            request = _conversation(replace(last, options=request.options), others, pictures, num_pictures)
        elif talks and isinstance(request, Query) and request.images and not request.spatial_refs:
            request = _conversation(request, others, pictures, num_pictures) if next(is_asked_later) else request
        if isinstance(request, Query | Caption | Chat):
            sampling = request.sampling
            if has["samples"]:
                sampling = replace(sampling, n=chance.randint(2, _MOST_SAMPLES))
            if has["logprobs"]:
                sampling = replace(sampling, logprobs=chance.randint(0, _MOST_LOGPROBS))
            request = replace(request, sampling=sampling)
        if isinstance(request, Query | Chat) and has["constraints"]:
            sampling = replace(request.sampling, max_tokens=_CONSTRAINED_TOKENS)
            request = replace(request, constraint=chance.choice(CONSTRAINTS), sampling=sampling)
        found.append(request)
    return found


def _conversation(question: Query, chance: random.Random, pictures: Sequence[Image], num_pictures: int) -> Chat:
    """A conversation that ends with a question; its own picture and others are shown in any of its turns."""
    assert question.image is not None, "only questions about pictures"
    shown = [*chance.choices(pictures, k=chance.randint(1, num_pictures - 1)), question.image]
    chance.shuffle(shown)
    questions = [*chance.choices(QUESTIONS, k=chance.randint(0, 2)), question.question]
    messages = [ChatMessage(Role.SYSTEM, "Answer briefly.")] if chance.random() < 1 / 2 else []
    for place, text in enumerate(questions):
        if place:
            messages.append(ChatMessage(Role.ASSISTANT, chance.choice(OBJECTS)))
        num_here = len(shown) if place == len(questions) - 1 else chance.randint(0, len(shown))
        messages.append(ChatMessage(Role.USER, text, tuple(shown[:num_here])))
        del shown[:num_here]
    return Chat(tuple(messages), reasoning=question.reasoning, sampling=question.sampling, options=question.options)


def features_of(requests: Iterable[Request]) -> Counter[str]:
    """How many requests have each of `FEATURES`."""
    counts: Counter[str] = Counter(dict.fromkeys(FEATURES, 0))
    for request in requests:
        counts["adapters"] += request.options.adapter != ""
        counts["constraints"] += request.constraint is not None
        counts["samples"] += request.sampling.n is not None
        counts["logprobs"] += request.sampling.logprobs is not None
        counts["conversations"] += len(request.images) > 1
    return counts


def _kinds(config: MoondreamConfig) -> list[str]:
    """Returns the skills whose answers have tokens to compare, and what else there is to ask of them."""
    kinds = [skill for skill in FAMILY.skills(config) if skill != "embed"]
    if "query" in kinds:
        kinds += ["text", "reasoning", "refs"]
    if "caption" in kinds:
        kinds.remove("caption")
        kinds += [f"caption {length}" for length in config.tokenizer.templates["caption"]]
    return kinds


def _pictures(vision: VisionConfig, chance: random.Random) -> Iterator[bytes]:
    """One after another: each number of crops in turn, upright and lying, in each format in turn."""
    sizes = [*sizes_by_crops(vision).values()]
    formats = itertools.cycle(FORMATS)
    for width, height in itertools.cycle(sizes):
        size = (width, height) if chance.random() < 0.5 else (height, width)
        yield _converted(chart(chance.randrange(2**32), *size), *next(formats))


def _converted(jpeg: bytes, image_format: str, mode: str) -> bytes:
    file = io.BytesIO()
    PIL.Image.open(io.BytesIO(jpeg)).convert(mode).save(file, image_format)
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
    if kind == "chat":
        turns = (
            ChatMessage(Role.USER, question, (image,)),
            ChatMessage(Role.ASSISTANT, f" {name}"),
            ChatMessage(Role.USER, chance.choice(QUESTIONS)),
        )
        return Chat(turns, sampling=sampling)
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
        def note(runner: StepRunner, sequence: TokenSequence) -> None:
            tokens[sequence.request.seed] = sequence.tokens[sequence.num_prompt_tokens :]
            release(runner, sequence)

        return note

    with wrapped(StepRunner, "release", noting):
        yield tokens
