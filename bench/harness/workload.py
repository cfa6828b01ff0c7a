"""What is asked: "chart-9" pictures with a question each, and text alone, in a few lengths of answer.

Every picture is drawn from a seed: 800 by 557 pixels, about 40 KB as JPEG, which a Moondream cuts
into 2 × 4 tiles and a global tile. A question has eleven tokens with the published tokenizer, as with the one that
`tokenizer_file.py` makes.
"""

from __future__ import annotations

import bisect
import io
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from PIL import Image, ImageDraw, ImageFont

WIDTH_PX, HEIGHT_PX = 800, 557
JPEG_QUALITY = 90

_ASPECTS = ("value", "label", "height", "width", "color")
_WHICH = ("tallest", "shortest", "first", "second", "third", "last", "left", "right", "middle", "biggest")
QUESTIONS = tuple(f"What is the {aspect} of the {which} bar shown here?" for aspect in _ASPECTS for which in _WHICH)
TEXT_QUESTIONS = tuple(
    f"Tell me about the {thing} of charts" for thing in ("history", "makers", "readers", "kinds", "names")
)

NUM_POPULAR = 1_000

_PALETTE = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#9c755f", "#555555")
_SYLLABLES = ("ka", "to", "mi", "ren", "sol", "va", "dor", "el", "nu", "pra", "shi", "gan")


class Picture(Enum):
    """Which picture a request shows."""

    NONE = "none"
    UNIQUE = "unique"
    SAME = "same"
    REPEATED = "repeated"
    """A share of the requests shows one of `NUM_POPULAR` pictures, by Zipf's law; the others unique ones."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of request. Every answer is greedy and exactly `num_tokens` long, given a model that never ends."""

    name: str
    picture: Picture
    num_tokens: int
    repeat_share: float = 0.0
    """Of requests with `Picture.REPEATED`."""
    is_streamed: bool = True
    """Whether the answer comes in pieces, by `Query`, or whole, by `CompleteQuery`."""
    example: str = ""
    """What has answers of this length."""

    @property
    def description(self) -> str:
        """What it sends and gets, for readers of results."""
        picture = {
            Picture.NONE: "a question without a picture",
            Picture.UNIQUE: "a question about a picture that no other request shows",
            Picture.SAME: "a question about the one picture that all requests show",
            Picture.REPEATED: f"a question about a picture; in {self.repeat_share:.0%} of requests a popular one",
        }[self.picture]
        ending = "" if self.is_streamed else " in one message"
        example = f", as long as {self.example}" if self.example else ""
        return f"{picture}, answered with {self.num_tokens} tokens{ending}{example}"

    def question(self, number: int) -> str:
        """The question of the request with this number."""
        questions = TEXT_QUESTIONS if self.picture is Picture.NONE else QUESTIONS
        return questions[number % len(questions)]


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload("direct", Picture.UNIQUE, 3, example="an answer of a word or a number"),
            Workload(
                "cot", Picture.UNIQUE, 33, example='an answer with a short reasoning ("chain of thought") before it'
            ),
            Workload("long", Picture.UNIQUE, 256, example="a detailed description"),
            Workload("cached", Picture.SAME, 3),
            Workload("cached-whole", Picture.SAME, 3, is_streamed=False),
            Workload("text", Picture.NONE, 300),
            Workload("repeats-0", Picture.REPEATED, 3, 0.0),
            Workload("repeats-50", Picture.REPEATED, 3, 0.5),
            Workload("repeats-90", Picture.REPEATED, 3, 0.9),
        )
    }
)


_POPULARITY = tuple(itertools.accumulate(1 / rank for rank in range(1, NUM_POPULAR + 1)))
"""Added up: Zipf's law gives the picture of a rank the weight 1 / rank."""


def chart(seed: int, width_px: int = WIDTH_PX, height_px: int = HEIGHT_PX) -> bytes:
    """A bar chart as JPEG: bars, the numbers on them, names, a grid and two lines of text."""
    chance = random.Random(seed)
    image = Image.new("RGB", (width_px, height_px), "white")
    draw = ImageDraw.Draw(image)
    large, small = ImageFont.load_default(max(height_px / 22, 8)), ImageFont.load_default(max(height_px / 38, 7))
    left, right, top, bottom = 0.08 * width_px, 0.98 * width_px, 0.17 * height_px, 0.82 * height_px
    draw.text((left, 0.02 * height_px), _words(chance, 3).title(), fill="black", font=large)
    draw.text((left, 0.09 * height_px), _words(chance, 5), fill="#444444", font=small)
    highest = chance.randint(40, 900)
    for step in range(6):
        y = bottom - (bottom - top) * step / 5
        draw.line((left, y, right, y), fill="#c8c8c8")
        draw.text((0.01 * width_px, y - 0.015 * height_px), str(highest * step // 5), fill="black", font=small)
    num_bars = chance.randint(5, 8)
    pitch = (right - left) / num_bars
    for bar in range(num_bars):
        value = chance.uniform(0.1, 1.0)
        x, y = left + pitch * (bar + 0.15), bottom - (bottom - top) * value
        draw.rectangle((x, y, x + 0.7 * pitch, bottom), fill=chance.choice(_PALETTE), outline="black")
        draw.text((x, y - 0.035 * height_px), f"{highest * value:.1f}", fill="black", font=small)
        draw.text((x, bottom + 0.01 * height_px), _words(chance, 1)[:8], fill="black", font=small)
    source = f"{_words(chance, 3)} {chance.randint(1900, 2030)}"
    draw.text((left, 0.93 * height_px), source, fill="#444444", font=small)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


class Album:
    """Pictures for any number of requests, of which so many are drawn; the same file never comes twice.

    Drawing costs the client more than asking. So drawings come again, each time with another comment in the file:
    whoever remembers files by their bytes has not seen it.
    """

    def __init__(self, num_drawn: int) -> None:
        self._drawn = [chart(seed) for seed in range(num_drawn)]

    def picture(self, workload: Workload, number: int) -> bytes | None:
        """The picture of the request with this number; None where it has none."""
        if workload.picture is Picture.NONE:
            return None
        if workload.picture is Picture.SAME:
            return self._drawn[0]
        if workload.picture is Picture.REPEATED:
            chance = random.Random(number)  # so that a request is the same in every run
            if chance.random() < workload.repeat_share:
                rank = bisect.bisect(_POPULARITY, chance.random() * _POPULARITY[-1])
                return _with_comment(self._drawn[rank % len(self._drawn)], f"popular {rank:08d}")
        return _with_comment(self._drawn[number % len(self._drawn)], f"{number:016d}")


def _with_comment(jpeg: bytes, comment: str) -> bytes:
    text = comment.encode()
    return jpeg[:2] + b"\xff\xfe" + (2 + len(text)).to_bytes(2, "big") + text + jpeg[2:]


def vocabulary() -> Iterator[str]:
    """Every word of the questions, with the blank before it where it has one."""
    for question in (*QUESTIONS, *TEXT_QUESTIONS):
        words = question.removesuffix("?").split(" ")
        yield words[0]
        yield from (f" {word}" for word in words[1:])


def _words(chance: random.Random, count: int) -> str:
    return " ".join("".join(chance.choices(_SYLLABLES, k=chance.randint(2, 4))) for _ in range(count))
