"""What is asked: "chart-9" pictures with a question each, and text alone, in a few lengths of answer.

Every picture is drawn from a seed: 800 by 557 pixels, about 40 KB as JPEG, which a Moondream cuts
into 2 × 4 crops and a global crop. A question has eleven tokens with the published tokenizer, as with the one that
`tokenizer_file.py` makes.
"""

import bisect
import functools
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from bench.harness.changes import Change, ChangingPictures
from kestrel_grpc.cli.bench.workload import another_picture, chart

_ASPECTS = ("value", "label", "height", "width", "color")
_WHICH = ("tallest", "shortest", "first", "second", "third", "last", "left", "right", "middle", "biggest")
QUESTIONS = tuple(f"What is the {aspect} of the {which} bar shown here?" for aspect in _ASPECTS for which in _WHICH)
TEXT_QUESTIONS = tuple(
    f"Tell me about the {thing} of charts" for thing in ("history", "makers", "readers", "kinds", "names")
)

NUM_POPULAR = 1_000
NUM_RETURNING = 64
"""How many pictures are asked about at a time, with `Picture.RETURNING`."""
NUM_STREAMS = 64
"""How many pictures change, with `Picture.CHANGED`."""


class Picture(Enum):
    """Which picture a request shows."""

    NONE = "none"
    UNIQUE = "unique"
    SAME = "same"
    REPEATED = "repeated"
    """A share of the requests shows one of `NUM_POPULAR` pictures, by Zipf's law; the others unique ones."""
    RETURNING = "returning"
    """Each picture is shown by a few requests, among requests that show others."""
    CHANGED = "changed"
    """Each of `NUM_STREAMS` callers shows a picture of its own, which changes in a part from one request to the
    next."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of request. Every answer is greedy and exactly `num_tokens` long, given a model that never ends."""

    name: str
    picture: Picture
    num_tokens: int
    repeat_share: float = 0.0
    """Of requests with `Picture.REPEATED`."""
    num_questions: int = 1
    """About each picture, with `Picture.RETURNING`."""
    is_streamed: bool = True
    """Whether the answer comes in pieces, by `Query`, or whole, by `CompleteQuery`."""
    example: str = ""
    """What has answers of this length."""
    change: Change = Change.REPAINT
    """How pictures change, with `Picture.CHANGED`."""
    file_format: str = "JPEG"
    """JPEG or PNG, with `Picture.CHANGED`."""

    @property
    def description(self) -> str:
        """What it sends and gets, for readers of results."""
        picture = {
            Picture.NONE: "a question without a picture",
            Picture.UNIQUE: "a question about a picture that no other request shows",
            Picture.SAME: "a question about the one picture that all requests show",
            Picture.REPEATED: f"a question about a picture; in {self.repeat_share:.0%} of requests a popular one",
            Picture.RETURNING: f"one of {self.num_questions} questions about a picture",
            Picture.CHANGED: f"a question about the next {self.file_format} of one of {NUM_STREAMS} callers, in "
            f"which {self.change.value}",
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
            Workload("returning-5", Picture.RETURNING, 3, num_questions=5),
            Workload("changed", Picture.CHANGED, 3),
            Workload("changed-png", Picture.CHANGED, 3, file_format="PNG"),
            Workload("changed-pointer", Picture.CHANGED, 3, change=Change.POINTER, file_format="PNG"),
            Workload("changed-typed", Picture.CHANGED, 3, change=Change.TYPED, file_format="PNG"),
            Workload("changed-scroll", Picture.CHANGED, 3, change=Change.SCROLL, file_format="PNG"),
            Workload("changed-noise", Picture.CHANGED, 3, change=Change.NOISE),
        )
    }
)


_POPULARITY = tuple(itertools.accumulate(1 / rank for rank in range(1, NUM_POPULAR + 1)))
"""Added up: Zipf's law gives the picture of a rank the weight 1 / rank."""


@functools.lru_cache(maxsize=64)
def returning(block: int, num_questions: int, num_pictures: int = NUM_RETURNING) -> tuple[int, ...]:
    """The pictures of so many requests in a row: each of `num_pictures` as often as it is asked about, mixed.

    Kept, because each request of a block looks its own picture up.
    """
    pictures = [block * num_pictures + index for index in range(num_pictures)] * num_questions
    random.Random(block).shuffle(pictures)
    return tuple(pictures)


class Album:
    """Pictures for any number of requests, of which so many are drawn; the same picture never comes twice, unless
    the workload says so.

    Drawing costs the client more than asking. So drawings come again, each time with other pixels
    (`another_picture`): whoever remembers files by their bytes, or crops by their pixels, has not seen it.
    """

    def __init__(self, num_drawn: int) -> None:
        self._drawn = [chart(seed) for seed in range(num_drawn)]
        self._changing: dict[Change, ChangingPictures] = {}

    def picture(self, workload: Workload, number: int) -> bytes | None:
        """The picture of the request with this number; None where it has none."""
        if workload.picture is Picture.NONE:
            return None
        if workload.picture is Picture.SAME:
            return self._drawn[0]
        if workload.picture is Picture.CHANGED:
            if workload.change not in self._changing:
                self._changing[workload.change] = ChangingPictures(workload.change)
            version, stream = divmod(number, NUM_STREAMS)
            return self._changing[workload.change].encoded(stream, version, workload.file_format)
        if workload.picture is Picture.REPEATED:
            chance = random.Random(number)  # so that a request is the same in every run
            if chance.random() < workload.repeat_share:
                rank = bisect.bisect(_POPULARITY, chance.random() * _POPULARITY[-1])
                return another_picture(self._drawn[rank % len(self._drawn)], f"popular {rank:08d}")
        if workload.picture is Picture.RETURNING:
            block, place = divmod(number, workload.num_questions * NUM_RETURNING)
            picture = returning(block, workload.num_questions)[place]
            return another_picture(self._drawn[picture % len(self._drawn)], f"returning {picture:06d}")
        return another_picture(self._drawn[number % len(self._drawn)], f"{number:016d}")


def vocabulary() -> Iterator[str]:
    """Every word of the questions, with the blank before it where it has one."""
    for question in (*QUESTIONS, *TEXT_QUESTIONS):
        words = question.removesuffix("?").split(" ")
        yield words[0]
        yield from (f" {word}" for word in words[1:])
