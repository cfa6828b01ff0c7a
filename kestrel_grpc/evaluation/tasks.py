"""Defines a task: the calls that it makes, their answers, and the report about them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from kestrel_grpc.evaluation.intervals import Interval, mean_interval

Item = TypeVar("Item")
BoxSides = tuple[float, float, float, float]
"""Left, top, right and bottom in fractions of the image's width and height."""
Position = tuple[float, float]
"""x and y in fractions of the image's width and height."""
_SAMPLE_SEED = 0


class SetUnusable(Exception):
    """A set cannot be used; the message names the file or the entry."""


@dataclass(frozen=True, slots=True)
class Call:
    """Describes a call: a question (`query`), or an object to find (`point`, `detect`)."""

    skill: Literal["query", "point", "detect"]
    image: Path | bytes
    text: str
    max_objects: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds the answer to a call in the form of its skill, or else `error`, one line with the reason."""

    text: str = ""
    points: tuple[Position, ...] = ()
    boxes: tuple[BoxSides, ...] = ()
    scores: tuple[float, ...] = ()
    """The score of each box; empty where one has none."""
    error: str | None = None
    is_cut: bool = False
    """True if the limit of tokens ended it."""


@dataclass(frozen=True, slots=True)
class Score:
    """Holds a score from 0 to 1 over `count` items, with its 95 % interval; None if the interval is not defined."""

    name: str
    value: float
    interval: Interval | None
    count: int

    @classmethod
    def mean(cls, name: str, values: Sequence[float], pictures: Sequence[str]) -> Score:
        """Returns the mean of values, at least one, each of which belongs to the picture of that name."""
        return cls(name, sum(values) / len(values), mean_interval(values, pictures), len(values))


@dataclass(frozen=True, slots=True)
class Label:
    """Describes a mark to draw into a picture: its name, and a point, a box or outlines."""

    name: str
    point: Position | None = None
    box: BoxSides | None = None
    outlines: Sequence[Sequence[Position]] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """Describes one scored item, for the HTML report and the list of answers."""

    name: str
    picture: str
    """The name of the picture; cases with the same picture are one cluster."""
    image: Path | bytes
    asked: str
    expected: str
    answered: str
    score: float
    error: str | None = None
    """The error of the first call of this case that failed."""
    truth: Sequence[Label] = ()
    found: Sequence[Label] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Holds all scores of a run, its cases in the order of the set, and further data for the JSON file."""

    scores: Sequence[Score]
    cases: Sequence[Case]
    further: dict[str, Any] = field(default_factory=dict[str, Any])
    warnings: Sequence[str] = ()
    """The reasons why the scores may say little about the model."""
    table: Sequence[Sequence[str]] = ()
    """Rows that explain the scores further, the first of them a head."""

    def worst(self, count: int) -> list[Case]:
        """Returns the cases with the lowest scores, of equal ones the earlier in the set. Fully right ones are left
        out."""
        return sorted((case for case in self.cases if case.score < 1.0), key=lambda case: case.score)[:count]


class Task(Protocol):
    """Describes a set whose files have been read."""

    @property
    def source(self) -> str:
        """The file or folder that was read."""
        ...

    @property
    def split(self) -> str:
        """The part of the set that was read."""
        ...

    @property
    def asks(self) -> str:
        """The way in which the set is asked about, in one sentence."""
        ...

    def calls(self) -> Sequence[Call]:
        """Returns all calls."""
        ...

    def report(self, answers: Sequence[Answer]) -> Report:
        """Scores the answers, one for each call, in the order of the calls."""
        ...


def sample(items: Sequence[Item], limit: int | None) -> list[Item]:
    """Returns a random sample in the order of the items, the same in every run; all items if `limit` is None."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[place] for place in sorted(random.Random(_SAMPLE_SEED).sample(range(len(items)), limit))]


def find_file(folder: Path, what: str, *patterns: str) -> Path:
    """Returns the first file, by name, of the first pattern that matches one. Raises `SetUnusable`."""
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            if path.is_file():
                return path
    raise SetUnusable(f"{folder}: has no {what}, such as {patterns[0]}")
