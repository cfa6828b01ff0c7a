"""How right are a model's answers about 600 scenes that it never saw?

Every skill is asked about every scene, at temperature 0, and answers are scored against the scene's truth; also
conversations, pairs of pictures, instructions and JSON. `--held-out` takes scenes of fonts, colour values and
layouts that no training scene has. Prints a table with 95 % intervals and writes JSON. Asks over gRPC: the server
at `--address`, or else one of its own on a free port with any model, device and type that the engine takes. Some
scores move by a point or two with a single answer; `--only detect --scenes 2000` says more about boxes in the same
time. Run as `python -m bench.quality`, with the training extra installed.
"""

import argparse
import asyncio
import json
import platform
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from kestrel_client import (
    AsyncClient,
    CaptionResult,
    ChatMessage,
    DetectResult,
    Point,
    PointResult,
    QueryResult,
    SegmentResult,
)
from kestrel_grpc.config.options import ServerConfig, named_values
from kestrel_grpc.server import Server
from kestrel_runtime.api.config import BUILT_IN_MODEL
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.moondream.skills import SKILLS
from training import scoring
from training.captions import normal_caption
from training.dialogues import Turn, dialogue
from training.drawing import encode_scene
from training.examples import object_phrase
from training.exchange import Exchange
from training.facts import FACTS
from training.instructions import HELD_OUT_SYSTEM, SHORT_KINDS
from training.pairs import ask_pair, which
from training.palette import COLORS
from training.phrases import absent, groups, present, unique
from training.questions import KINDS, ask
from training.records import Record, is_true, record
from training.scenes import HELD_OUT, HELD_OUT_SEED, TRAINED, Scene, Thing, World, make_scene
from training.shapes import SHAPES

_QUESTIONS_PER_SCENE = 3
_SECOND = 500_000  # from a scene's seed to that of the second picture
_CONVERSATIONS = (
    "which of two",
    "which of two, constrained",
    "pair",
    "second turn",
    "system",
    "instructed",
    "json",
    "json constrained",
    "json written",
)
_THRESHOLDS = tuple(0.5 + 0.05 * step for step in range(10))
Answer = Any  # one of the client's results, by the skill asked


@dataclass(slots=True)
class Tally:
    """All that has been scored."""

    shares: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By score: one number from 0 to 1 per answer."""
    counts: Counter[str] = field(default_factory=Counter)
    boxes: defaultdict[str, Counter[float]] = field(default_factory=lambda: defaultdict(Counter))
    """By kind of object: matches by threshold, and under -1 and -2 how many were predicted and true."""
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def note(self, score: str, value: float, **details: Any) -> None:
        """Add one answer's share."""
        self.shares[score].append(float(value))
        if value < 0.5:
            self.wrong.append({"score": score, **details})


@dataclass(frozen=True, slots=True)
class Task:
    """A request about a scene and what to do with its answer."""

    skill: str
    ask: Callable[[AsyncClient], Awaitable[Answer]]
    score: Callable[[Tally, Answer], None]


def tasks(seed: int, world: World, skills: Sequence[str]) -> Iterator[Task]:
    """Yields what is asked about the scene of a seed, of these skills."""
    if "chat" in skills:
        yield from _conversations(seed, world)
    if set(skills) - {"chat"}:
        yield from (task for task in _about_scene(seed, world) if task.skill in skills)


def _about_scene(seed: int, world: World) -> Iterator[Task]:
    scene, rng = make_scene(seed, world), random.Random(f"quality {seed}")
    image = encode_scene(scene)
    kinds = [*KINDS]
    rng.shuffle(kinds)
    exchanges = [exchange for kind in kinds if (exchange := ask(scene, kind, rng)) is not None]
    for exchange in exchanges[:_QUESTIONS_PER_SCENE]:
        yield _question(exchange, image, seed)
    yield _question(FACTS[sorted(FACTS)[seed % len(FACTS)]](rng), None, seed)
    yield _caption(scene, image)
    referent = present(scene, rng)
    if referent is not None:
        yield _point(object_phrase(referent, rng), referent.things, image, seed)
        yield _detect(object_phrase(referent, rng), referent.things, image, seed)
    solid = [thing for thing in scene.shapes if not thing.is_hollow and unique(scene, thing, rng) is not None]
    if solid:
        thing = rng.choice(solid)
        yield _segment(unique(scene, thing, rng) or thing.name, thing, image, seed)
    yield _absent(scene, image, rng)


def _conversations(seed: int, world: World) -> Iterator[Task]:
    """Yields conversations, pairs of pictures, instructions and JSON."""
    rng = random.Random(f"conversations {seed}")
    scene, second = scenes = (make_scene(seed, world), make_scene(seed + _SECOND, world))
    images = [encode_scene(scene), encode_scene(second)]
    asked = which(scenes, rng)
    if asked is not None:
        turns = (Turn(asked.question, asked.answer, num_images=2),)
        if seed % 2:
            turns = (Turn("What color is the background?", "", 1), Turn(asked.question, asked.answer, 1))
        yield _turns("which of two", turns, images, seed)
        yield _chosen(asked.answer, turns, images, seed)
    asked = ask_pair(scenes, rng)
    if asked is not None:
        yield _turns("pair", (Turn(asked.question, asked.answer, num_images=2),), images, seed)
    if turns := dialogue(scene, rng):
        yield _turns("second turn", turns, images[:1], seed)
    asked = ask(scene, rng.choice(SHORT_KINDS), rng)
    if asked is not None:
        turns = (Turn(asked.question, asked.answer, num_images=1),)
        yield _turns("system", turns, images[:1], seed, rng.choice(HELD_OUT_SYSTEM))
        instruction = "Answer with a single word, number or short phrase."  # that of `kestrel-grpc evaluate`
        turns = (Turn(f"{asked.question}\n{instruction}", asked.answer, num_images=1),)
        yield _turns("instructed", turns, images[:1], seed)
    found = next((found for _ in range(9) if (found := record(scene, rng)) is not None), None)
    if found is not None:
        yield _json(found, images[0], seed)


def _turns(name: str, turns: Sequence[Turn], images: Sequence[bytes], seed: int, system: str = "") -> Task:
    """A conversation in which each turn has the model's own answers of those before; the last one is scored."""

    async def converse(client: AsyncClient) -> QueryResult:
        messages = [ChatMessage("system", system)] if system else []
        left = iter(images)
        for turn in turns:
            messages.append(ChatMessage("user", turn.question, list(islice(left, turn.num_images))))
            answered = await client.complete_chat(messages, reasoning=False, temperature=0.0)
            messages.append(ChatMessage("assistant", answered.answer))
        return answered

    def score(tally: Tally, output: QueryResult) -> None:
        truth = turns[-1].answer
        texts = (truth, output.answer)
        named = [scoring.normalised(text) for text in texts]
        if " and " in truth:  # a list, in any order
            named = [",".join(sorted(text.replace(" and ", ", ").split(", "))) for text in named]
        details = {"asked": [turn.question for turn in turns], "truth": truth, "got": output.answer}
        tally.note(name, named[0] == named[1], seed=seed, **details)

    return Task("chat", converse, score)


def _chosen(answer: str, turns: Sequence[Turn], images: Sequence[bytes], seed: int) -> Task:
    """The same question where a constraint leaves the words of the answer."""
    words = ["first", "second", "both", "neither"]
    truth = answer.removeprefix("the ").replace("1", "first").replace("2", "second")

    async def converse(client: AsyncClient) -> QueryResult:
        message = ChatMessage("user", turns[-1].question, list(images))
        return await client.complete_chat([message], reasoning=False, temperature=0.0, choices=words)

    def score(tally: Tally, output: QueryResult) -> None:
        details = {"asked": turns[-1].question, "truth": truth, "got": output.answer}
        tally.note("which of two, constrained", output.answer == truth, seed=seed, **details)

    return Task("chat", converse, score)


def _json(found: Record, image: bytes, seed: int) -> Task:
    """A question for JSON, whose form a constraint gives if the question does not."""
    messages = [ChatMessage("system", found.system)] if found.system else []
    messages.append(ChatMessage("user", found.question, [image] if found.needs_image else []))

    async def converse(client: AsyncClient) -> QueryResult:
        schema: dict[str, Any] = {"json_schema": found.schema} if found.is_hidden else {}
        return await client.complete_chat(messages, reasoning=False, temperature=0.0, max_tokens=256, **schema)

    def score(tally: Tally, output: QueryResult) -> None:
        right = is_true(output.answer, found.answer)
        details = {"asked": found.question, "truth": found.answer, "got": output.answer}
        for name in ("json", "json constrained" if found.is_hidden else "json written"):
            tally.note(name, right, seed=seed, **details)

    return Task("chat", converse, score)


def _question(exchange: Exchange, image: bytes | None, seed: int) -> Task:
    def score(tally: Tally, output: QueryResult) -> None:
        if exchange.kind == "contents":
            texts = (exchange.answer, output.answer)
            named = [
                sorted(part.removeprefix("and ") for part in text.replace(" and ", ", ").split(", "))
                for text in texts
            ]
            right = named[0] == named[1]
        else:
            right = scoring.normalised(output.answer) == scoring.normalised(exchange.answer)
        tally.note(
            f"query {exchange.kind}",
            right,
            seed=seed,
            asked=exchange.question,
            truth=exchange.answer,
            got=output.answer,
        )

    refs = [Point(*point) for point in exchange.points]
    return Task(
        "query",
        lambda client: client.complete_query(
            image, exchange.question, reasoning=False, spatial_refs=refs, temperature=0.0
        ),
        score,
    )


def _caption(scene: Scene, image: bytes) -> Task:
    truth = Counter({f"{thing.color} {thing.name}": count for count, thing in groups(scene.shapes)})

    def score(tally: Tally, output: CaptionResult) -> None:
        named = scoring.inventory(output.caption, COLORS, SHAPES)
        shared = scoring.shared_count(named, truth)
        tally.counts.update(caption_shared=shared, caption_named=named.total(), caption_true=truth.total())
        if named != truth:
            details = {"truth": normal_caption(scene), "got": output.caption}
            tally.wrong.append({"score": "caption", "seed": scene.seed, **details})
        for text in scene.texts:
            tally.note("caption text", text.text.lower() in output.caption.lower())

    return Task("caption", lambda client: client.complete_caption(image, length="normal", temperature=0.0), score)


def _point(phrase: str, things: tuple[Thing, ...], image: bytes, seed: int) -> Task:
    def score(tally: Tally, output: PointResult) -> None:
        left = list(things)
        num_inside = 0
        for point in output.points:
            hit = next((thing for thing in left if _covers(thing, point.x, point.y)), None)
            if hit is not None:
                left.remove(hit)
                num_inside += 1
        tally.counts.update(points=len(output.points), points_inside=num_inside)
        right = num_inside == len(things) == len(output.points)
        got = [(round(point.x, 3), round(point.y, 3)) for point in output.points]
        tally.note("point", right, seed=seed, asked=phrase, truth=[thing.mark for thing in things], got=got)
        tally.note("point count", len(output.points) == len(things))

    return Task("point", lambda client: client.point(image, phrase), score)


def _detect(phrase: str, things: tuple[Thing, ...], image: bytes, seed: int) -> Task:
    def score(tally: Tally, output: DetectResult) -> None:
        predicted = [(box.x_min, box.y_min, box.x_max, box.y_max) for box in (item.box for item in output.objects)]
        truth = [thing.box for thing in things]
        names = {thing.name for thing in things}
        kind = names.pop() if len(names) == 1 else "several"
        tally.boxes[kind][-1] += len(predicted)
        tally.boxes[kind][-2] += len(truth)
        for threshold in _THRESHOLDS:
            tally.boxes[kind][threshold] += scoring.matched(predicted, truth, threshold)
        right = scoring.matched(predicted, truth, 0.5) == len(truth) == len(predicted)
        tally.note("detect", right, seed=seed, asked=phrase, truth=truth, got=predicted)

    return Task("detect", lambda client: client.detect(image, phrase), score)


def _segment(phrase: str, thing: Thing, image: bytes, seed: int) -> Task:
    def score(tally: Tally, output: SegmentResult) -> None:
        overlap = 0.0
        if output.segments:
            overlap = scoring.outline_iou(output.segments[0].polygons(), _contours(thing))
        got = [segment.svg_path for segment in output.segments]
        tally.note("segment", overlap, seed=seed, asked=phrase, truth=" ".join(thing.path), got=got)

    return Task("segment", lambda client: client.segment(image, phrase), score)


def _absent(scene: Scene, image: bytes, rng: random.Random) -> Task:
    referent = absent(scene, rng)
    phrase = object_phrase(referent, rng)
    question = f"Is there any {referent.singular} in the image?"
    skill = ("query", "point", "detect", "segment")[scene.seed % 4]
    asks: dict[str, Callable[[AsyncClient], Awaitable[Answer]]] = {
        "query": lambda client: client.complete_query(image, question, reasoning=False, temperature=0.0),
        "point": lambda client: client.point(image, phrase),
        "detect": lambda client: client.detect(image, phrase),
        "segment": lambda client: client.segment(image, phrase),
    }

    def score(tally: Tally, output: Answer) -> None:
        if isinstance(output, QueryResult):
            right, got = scoring.normalised(output.answer) == "no", output.answer
        else:
            found = getattr(output, {"point": "points", "detect": "objects", "segment": "segments"}[skill])
            right, got = not found, len(found)
        for name in ("absent", f"absent {skill}"):
            tally.note(name, right, seed=scene.seed, asked=phrase, got=got)

    return Task(skill, asks[skill], score)


def _placed(points: Any, box: scoring.BoxTuple) -> list[tuple[float, float]]:
    left, top, right, bottom = box
    return [(left + x * (right - left), top + y * (bottom - top)) for x, y in points]


def _contours(thing: Thing) -> list[list[tuple[float, float]]]:
    corners = ((0, 0), (1, 0), (1, 1), (0, 1))
    contours = (corners,) if thing.outline is None else thing.outline.contours
    return [_placed(contour, thing.box) for contour in contours]


def _covers(thing: Thing, x: float, y: float) -> bool:
    return scoring.contains(_contours(thing), x, y)


async def run(
    client: AsyncClient,
    num_passed_over: int,
    num_scenes: int,
    num_at_once: int,
    skills: Sequence[str],
    world: World = TRAINED,
) -> Tally:
    """Ask all there is to ask of the skills and score it."""
    tally, gate = Tally(), asyncio.Semaphore(num_at_once)
    seeds = range(HELD_OUT_SEED + num_passed_over, HELD_OUT_SEED + num_passed_over + num_scenes)

    async def one(task: Task) -> None:
        async with gate:
            task.score(tally, await task.ask(client))

    for place in range(0, num_scenes, 20):  # pictures are made as they are needed
        some = seeds[place : place + 20]
        prepared = await asyncio.to_thread(
            lambda some=some: [task for seed in some for task in tasks(seed, world, skills)]
        )
        await asyncio.gather(*(one(task) for task in prepared))
        print(f"\r{place + len(some)}/{num_scenes} scenes", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return tally


def summary(tally: Tally) -> dict[str, dict[str, Any]]:
    """Every score that something was counted for, with its interval."""
    table: dict[str, dict[str, Any]] = {}

    def share(name: str, right: float, total: int) -> None:
        low, high = scoring.interval(right, total)
        table[name] = {"value": right / max(total, 1), "low": low, "high": high, "of": total}

    questions = {name: values for name, values in tally.shares.items() if name.startswith("query ")}
    share("query", sum(map(sum, questions.values())), sum(map(len, questions.values())))
    for name in sorted(questions):
        share(name, sum(questions[name]), len(questions[name]))
    counts = tally.counts
    share("caption recall", counts["caption_shared"], counts["caption_true"])
    share("caption precision", counts["caption_shared"], counts["caption_named"])
    share("points inside", counts["points_inside"], counts["points"])
    for name in (
        "caption text",
        "point",
        "point count",
        "detect",
        *_CONVERSATIONS,
        *sorted(n for n in tally.shares if n.startswith("absent")),
    ):
        share(name, sum(tally.shares[name]), len(tally.shares[name]))
    by_threshold = [
        sum(scoring.average_precision(b[t], b[-1], b[-2]) for b in tally.boxes.values()) / max(len(tally.boxes), 1)
        for t in _THRESHOLDS
    ]
    num_true = sum(b[-2] for b in tally.boxes.values())
    for name, value in (("mAP@0.5", by_threshold[0]), ("mAP@0.5:0.95", sum(by_threshold) / len(by_threshold))):
        low, high = scoring.interval(value * num_true, num_true)
        table[name] = {"value": value, "low": low, "high": high, "of": num_true}
    overlaps = tally.shares["segment"]
    low, high = scoring.mean_interval(overlaps)
    mean = sum(overlaps) / max(len(overlaps), 1)
    table["segment mean IoU"] = {"value": mean, "low": low, "high": high, "of": len(overlaps)}
    return {name: row for name, row in table.items() if row["of"]}


def main() -> None:
    """Score a model and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", help="a running server; without it one is started")
    parser.add_argument("--model", default=BUILT_IN_MODEL, help="a folder, a file or a hub name (%(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--set",
        metavar="OPTION=VALUE",
        action="append",
        default=[],
        help="another option of serve, such as text-backend=fused; may be repeated",
    )
    parser.add_argument("--scenes", type=int, default=600, help="how many (%(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=list(SKILLS), default=list(SKILLS), help="skills to ask (default: all)"
    )
    parser.add_argument("--first", type=int, default=0, help="held-out scenes to pass over, for a fresh set (0)")
    parser.add_argument("--held-out", action="store_true", help="fonts, colour values and layouts never trained on")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("bench/out/quality.json"))
    arguments = parser.parse_args()
    started = time.monotonic()
    tally, machine = asyncio.run(_score(arguments))
    table = summary(tally)
    for name, row in table.items():
        print(f"{name:24} {row['value']:.3f}  [{row['low']:.3f}, {row['high']:.3f}]  of {row['of']}")
    print(f"{time.monotonic() - started:.0f} s, {machine}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"scores": table, "machine": machine, "wrong": tally.wrong}, indent=1))


async def _score(arguments: argparse.Namespace) -> tuple[Tally, dict[str, Any]]:
    world = HELD_OUT if arguments.held_out else TRAINED
    if arguments.address:
        async with AsyncClient(arguments.address) as client:
            tally = await run(client, arguments.first, arguments.scenes, arguments.at_once, arguments.only, world)
            info = await client.server_info()
            return tally, {"address": arguments.address, "server": str(info)}
    given = {"model": arguments.model, "device": arguments.device, "dtype": arguments.dtype, "port": "0"}
    given["max_batch_size"] = str(arguments.at_once)
    config = ServerConfig.parse({**given, **named_values(arguments.set)}, {})
    engine = await asyncio.to_thread(LocalEngine.start, config.engine_config())
    async with Server(engine, config) as server, AsyncClient(f"127.0.0.1:{server.port}", timeout_s=600) as client:
        tally = await run(client, arguments.first, arguments.scenes, arguments.at_once, arguments.only, world)
    info = engine.info
    return tally, {
        "model": info.model,
        "device": info.device,
        "dtype": info.dtype,
        "torch": torch.__version__,
        "cpu": platform.machine(),
    }


if __name__ == "__main__":
    main()
