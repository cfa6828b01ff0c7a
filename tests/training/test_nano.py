"""The built-in model on pictures that plain Pillow draws, not the world that it was trained in."""

import asyncio
import io
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.api.config import BUILT_IN_MODEL, EngineConfig
from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.events import CaptionOutput, DetectOutput, Output, PointOutput, QueryOutput, SegmentOutput
from kestrel_runtime.api.requests import (
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
from kestrel_runtime.engine.engine import LocalEngine
from tests.reference_fixtures import CHECKOUT
from training.scoring import box_iou

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine.start(EngineConfig(model=BUILT_IN_MODEL, device="cpu", max_batch_size=4))
    yield engine
    engine.close()


async def _ask(engine: LocalEngine, request: Request) -> Output:
    return (await engine.submit(request).result()).output


def _star(x: float, y: float, radius: float) -> list[tuple[float, float]]:
    turns = [(radius if corner % 2 == 0 else radius * 0.42, math.pi * corner / 5) for corner in range(10)]
    return [(x + reach * math.sin(turn), y - reach * math.cos(turn)) for reach, turn in turns]


def _encoded(image: Image.Image, kind: str) -> bytes:
    data = io.BytesIO()
    image.save(data, kind)
    return data.getvalue()


@pytest.fixture(scope="module")
def four_shapes() -> bytes:
    image = Image.new("RGB", (640, 480), "white")
    pen = ImageDraw.Draw(image)
    pen.ellipse((60, 60, 180, 180), fill="red")
    pen.rectangle((300, 80, 420, 200), fill="blue", outline="black", width=4)
    pen.polygon([(520, 300), (460, 420), (580, 420)], fill="green")
    pen.polygon(_star(150, 350, 80), fill="orange")
    return _encoded(image, "PNG")


@pytest.fixture(scope="module")
def word_and_circles() -> bytes:
    image = Image.new("RGB", (800, 600), (240, 240, 225))
    pen = ImageDraw.Draw(image)
    for x, y in ((100, 100), (250, 300), (650, 120)):
        pen.ellipse((x, y, x + 90, y + 90), fill="purple")
    pen.line((600, 500, 760, 500), fill="gray", width=30)
    pen.line((680, 420, 680, 580), fill="gray", width=30)
    pen.text((80, 450), "HELLO", font=ImageFont.load_default(100), fill="black")
    return _encoded(image, "JPEG")


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("How many shapes are there?", "4"),
        ("What color is the star?", "orange"),
        ("What shape is the blue object?", "square"),
        ("Is the triangle to the left or right of the star?", "right"),
        ("Is there a purple heart?", "No"),
    ],
)
async def test_it_answers_about_four_shapes(engine: LocalEngine, four_shapes: bytes, question: str, answer: str):
    output = await _ask(engine, Query(question, four_shapes, sampling=GREEDY))
    assert isinstance(output, QueryOutput)
    assert output.answer == answer


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("How many purple circles are there?", "3"),
        ("What does the text say?", "HELLO"),
        ("What color is the cross?", "gray"),
        ("Are there any stars?", "No"),
    ],
)
async def test_it_reads_and_counts(engine: LocalEngine, word_and_circles: bytes, question: str, answer: str):
    output = await _ask(engine, Query(question, word_and_circles, sampling=GREEDY))
    assert isinstance(output, QueryOutput)
    assert output.answer == answer


@pytest.mark.parametrize(
    ("question", "answer"),
    [("What is 7 + 8?", "15"), ("What is the opposite of hot?", "cold"), ("What is green in German?", "grün")],
)
async def test_it_answers_without_a_picture(engine: LocalEngine, question: str, answer: str):
    output = await _ask(engine, Query(question, sampling=GREEDY))
    assert isinstance(output, QueryOutput)
    assert output.answer == answer


async def test_its_reasoning_points_at_what_it_counts(engine: LocalEngine, word_and_circles: bytes):
    question = "How many purple circles are there?"
    output = await _ask(engine, Query(question, word_and_circles, reasoning=True, sampling=GREEDY))
    assert isinstance(output, QueryOutput)
    assert output.answer == "3"
    assert output.reasoning is not None
    (grounding,) = output.reasoning.groundings
    assert len(grounding.points) == 3


async def test_it_describes(engine: LocalEngine, four_shapes: bytes):
    output = await _ask(engine, Caption(four_shapes, "short", sampling=GREEDY))
    assert isinstance(output, CaptionOutput)
    assert all(words in output.caption for words in ("red circle", "orange star", "blue square", "green triangle"))


async def test_it_finds_boxes_and_places(engine: LocalEngine, four_shapes: bytes):
    boxes = await _ask(engine, Detect("circle", four_shapes))
    assert isinstance(boxes, DetectOutput)
    (box,) = boxes.boxes
    assert box_iou((box.x_min, box.y_min, box.x_max, box.y_max), (60 / 640, 60 / 480, 180 / 640, 180 / 480)) > 0.85
    points = await _ask(engine, Point("shapes", four_shapes))
    assert isinstance(points, PointOutput)
    assert len(points.points) == 4


async def test_it_outlines_what_is_there_and_nothing_else(engine: LocalEngine, four_shapes: bytes):
    there = await _ask(engine, Segment("star", four_shapes))
    assert isinstance(there, SegmentOutput)
    (mask,) = there.segments
    assert mask.svg_path.startswith("M")
    assert mask.svg_path.endswith("Z")
    absent = await _ask(engine, Segment("dog", four_shapes))
    assert isinstance(absent, SegmentOutput)
    assert absent.segments == ()


async def _share_right(engine: LocalEngine, asked: list[tuple[Request, str]]) -> float:
    outputs = await asyncio.gather(*(_ask(engine, request) for request, _ in asked))
    answers = [output.answer if isinstance(output, QueryOutput) else None for output in outputs]
    return sum(answer == right for answer, (_, right) in zip(answers, asked, strict=True)) / len(asked)


def _turns(*texts: str, images: tuple[bytes, ...], system: str = "", schema: object = None) -> Chat:
    """A conversation whose messages take turns, and whose first one has the images."""
    roles = itertools.cycle((Role.USER, Role.ASSISTANT))
    messages = [
        ChatMessage(role, text, () if place else images)
        for place, (role, text) in enumerate(zip(roles, texts, strict=False))
    ]
    if system:
        messages.insert(0, ChatMessage(Role.SYSTEM, system))
    constraint = None if schema is None else Constraint(json_schema=json.dumps(schema))
    return Chat(tuple(messages), sampling=GREEDY, constraint=constraint)


async def test_it_tells_which_of_two_pictures_has_something(
    engine: LocalEngine, four_shapes: bytes, word_and_circles: bytes
):
    first, second = (four_shapes, word_and_circles), (word_and_circles, four_shapes)
    in_first = ("a star", "a blue square", "a triangle", "a red circle", "an orange star")
    in_second = ("a cross", "a purple circle", "text")
    asked: list[tuple[Request, str]] = [
        (_turns(f"Which of the two pictures has {thing}?", images=images), f"the {place}")
        for images, places in ((first, ("first", "second")), (second, ("second", "first")))
        for things, place in zip((in_first, in_second), places, strict=True)
        for thing in things
    ]
    asked += [
        (_turns("Which picture has a heart?", images=first), "neither"),
        (_turns("Which picture has a circle?", images=first), "both"),
        (_turns("Do both images have a star?", images=first), "No"),
        (_turns("What color is the star in the first picture?", images=first), "orange"),
    ]
    assert await _share_right(engine, asked) >= 0.9


async def test_it_answers_further_questions_and_follows_wishes(
    engine: LocalEngine, four_shapes: bytes, word_and_circles: bytes
):
    one, other = (four_shapes,), (word_and_circles,)
    asked: list[tuple[Request, str]] = [
        (_turns("Is there a star?", "Yes", "What color is it?", images=one), "orange"),
        (_turns("What color is the square?", "It is blue.", "How many shapes are there?", images=one), "4"),
        (_turns("How many circles are there?", "3", "And crosses?", images=other), "1"),
        (_turns("What does the text say?", "HELLO", "What color is the cross?", images=other), "gray"),
        (_turns("How many shapes are there?", images=one, system="You are a helpful assistant."), "4"),
        (_turns("What shape is the blue object?", images=one, system="Be brief."), "square"),
    ]
    instruction = "Answer with a single word, number or short phrase."
    asked += [
        (Query(f"{question}\n{instruction}", image, sampling=GREEDY), answer)
        for image, question, answer in (
            (four_shapes, "What color is the triangle?", "green"),
            (four_shapes, "Is there a purple heart?", "No"),
            (word_and_circles, "How many purple circles are there?", "3"),
            (word_and_circles, "What does the text say?", "HELLO"),
        )
    ]
    assert await _share_right(engine, asked) >= 0.9


async def test_its_json_is_true(engine: LocalEngine, four_shapes: bytes, word_and_circles: bytes):
    def described(**types: str) -> dict[str, Any]:
        properties = {name: {"type": kind} for name, kind in types.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    one, other = (four_shapes,), (word_and_circles,)
    form = "Answer in JSON with the fields"
    asked: list[tuple[Request, str]] = [
        (_turns("Describe the image.", images=one, schema=described(num_stars="integer")), '{"num_stars": 1}'),
        (_turns("Describe the image.", images=other, schema=described(text="string")), '{"text": "HELLO"}'),
        (
            _turns("What is there?", images=one, schema=described(has_star="boolean", has_text="boolean")),
            '{"has_star": true, "has_text": false}',
        ),
        (_turns(f"Describe the star. {form} color and shape.", images=one), '{"color": "orange", "shape": "star"}'),
        (
            _turns(f"What do you see? {form} num_circles and has_heart.", images=other),
            '{"num_circles": 3, "has_heart": false}',
        ),
    ]
    assert await _share_right(engine, asked) >= 0.8


async def test_a_gaze_is_a_point_of_gaze_with_the_eye_as_reference(engine: LocalEngine, four_shapes: bytes):
    targets: list[Output] = []
    for eye in (PointRef(0.2, 0.25), PointRef(0.55, 0.3), PointRef(0.8, 0.75)):
        gaze = await engine.submit(Gaze(four_shapes, eye)).result()
        point = await engine.submit(Point("gaze", four_shapes, max_objects=1, spatial_refs=(eye,))).result()
        assert gaze.output == point.output
        assert gaze.usage.num_input_tokens == point.usage.num_input_tokens
        targets.append(gaze.output)
    assert len(set(targets)) > 1  # the eye matters, also to a model that has not learned to follow it


async def test_the_example_of_embeddings_finds_the_pictures_that_look_alike(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The blocks of docs/embeddings.md, about pictures of three shapes in three colours."""
    (tmp_path / "pictures").mkdir()
    monkeypatch.chdir(tmp_path)
    for place, (shape, colour) in enumerate(itertools.product(("ellipse", "rectangle"), ("red", "green", "blue"))):
        for number in range(3):
            canvas = Image.new("RGB", (320, 240), "white")
            left = 30 + 60 * number
            getattr(ImageDraw.Draw(canvas), shape)((left, 40 + 9 * place, left + 110, 150 + 9 * place), fill=colour)
            is_query = (shape, colour, number) == ("ellipse", "green", 0)
            canvas.save("query.png" if is_query else f"pictures/{shape}-{colour}-{number}.png")
    blocks = re.findall(r"```python\n(.*?)```", (CHECKOUT / "docs/embeddings.md").read_text(), re.DOTALL)
    async with Server(engine, ServerConfig(port=0)) as server:
        monkeypatch.setenv("KESTREL_GRPC_ADDRESS", f"127.0.0.1:{server.port}")
        names: dict[str, Any] = {}
        for block in blocks:
            await asyncio.to_thread(exec, block, names)
    found = re.findall(r"^(.+)-\d\.png", capsys.readouterr().out, re.MULTILINE)
    assert found[:2] == ["ellipse-green"] * 2
    assert names["patches"].shape == (256, 256)
    assert np.allclose(names["patches"].astype(np.float32).mean(0), names["result"].mean, atol=1e-3)
