"""A question with its answer, and what every kind of question is worded with."""

import random
from dataclasses import dataclass

from training.phrases import unique
from training.scenes import Scene, Thing


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer. `kind` names what is asked for, `points` are places that the question means."""

    kind: str
    question: str
    answer: str
    points: tuple[tuple[float, float], ...] = ()
    evidence: tuple[tuple[str, tuple[Thing, ...]], ...] = ()
    """What one looks at to answer: a phrase and the things it means, perhaps none."""


_PICTURE = ("image", "image", "image", "picture", "photo", "scene")


def worded(rng: random.Random, templates: tuple[str, ...], **words: str) -> str:
    """One of the wordings, filled in."""
    return rng.choice(templates).format(picture=rng.choice(_PICTURE), **words)


def any_thing(scene: Scene, rng: random.Random) -> Thing | None:
    """A shape or text of the scene, if it has any."""
    return rng.choice(scene.things) if scene.things else None


def named_pair(scene: Scene, rng: random.Random) -> tuple[tuple[Thing, str], tuple[Thing, str]] | None:
    """Two things with phrases that mean them alone, if the scene has two such."""
    things = list(scene.things)
    rng.shuffle(things)
    named = [(thing, name) for thing in things if (name := unique(scene, thing, rng)) is not None][:2]
    return (named[0], named[1]) if len(named) == 2 and named[0][1] != named[1][1] else None
