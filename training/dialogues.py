"""Conversations of several turns about one picture, about two of which one is added later, or about none."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from training import pairs
from training.captions import place_words
from training.exchange import Exchange, worded
from training.facts import ask_fact
from training.palette import COLORS
from training.phrases import meant_by, unique
from training.questions import ask, inventory
from training.scenes import Scene, Thing
from training.shapes import SHAPES
from training.words import plural, with_article

_KINDS = ("count", "color", "shape", "relation", "size", "reading", "presence", "contents", "place", "background")
_KIND_WEIGHTS = (5, 5, 3, 3, 2, 4, 5, 4, 3, 1)


@dataclass(frozen=True, slots=True)
class Turn:
    """A question with its answer, behind `num_images` new pictures."""

    question: str
    answer: str
    num_images: int = 0
    is_true: bool = True
    """False if the answer is worded as the model would not word it: it is context and is not learnt."""


def dialogue(scene: Scene, rng: random.Random) -> tuple[Turn, ...]:
    """Returns two to four turns about one picture."""
    turns = [_plain(exchange) for exchange in _exchanges(scene, rng, rng.choice((2, 2, 2, 3, 4)))]
    if not turns:
        return ()
    return (
        replace(_reworded(turns[0], rng), num_images=1),
        *(_reworded(turn, rng) for turn in turns[1:-1]),
        turns[-1],
    )


def later_picture(first: Scene, second: Scene, rng: random.Random) -> tuple[Turn, ...]:
    """Returns turns of which the first is about one picture, and a later one brings the second."""
    before = [_plain(exchange) for exchange in _exchanges(first, rng, rng.choice((1, 1, 1, 2)))]
    if not before:
        return ()
    before = [_reworded(turn, rng) for turn in before]
    before[0] = replace(before[0], num_images=1)
    turns = list(_about_both(first, second, rng, rng.choice((1, 1, 2))))
    if not turns:
        return ()
    return (*before, replace(turns[0], num_images=1), *turns[1:])


def picture_after_talk(second: Scene, rng: random.Random) -> tuple[Turn, ...]:
    """Returns a turn without a picture, and further ones about a picture that the second turn brings."""
    fact = ask_fact(rng)
    turns = [_plain(exchange) for exchange in _exchanges(second, rng, rng.choice((1, 1, 2)))]
    if not turns:
        return ()
    return (Turn(fact.question, fact.answer), replace(turns[0], num_images=1), *turns[1:])


def both_at_once(first: Scene, second: Scene, rng: random.Random) -> tuple[Turn, ...]:
    """Returns two or three turns about two pictures that the first turn brings."""
    asked = [exchange for _ in range(3) if (exchange := pairs.ask_pair((first, second), rng)) is not None]
    turns = [_plain(exchange) for exchange in asked[: rng.choice((2, 2, 3))]]
    return (replace(turns[0], num_images=2), *turns[1:]) if len(turns) > 1 else ()


def without_picture(rng: random.Random) -> tuple[Turn, ...]:
    """Returns two or three questions that need no picture."""
    return tuple(_plain(ask_fact(rng)) for _ in range(rng.choice((2, 2, 3))))


def _plain(exchange: Exchange) -> Turn:
    return Turn(exchange.question, exchange.answer)


def _exchanges(scene: Scene, rng: random.Random, count: int) -> list[Exchange]:
    """Returns so many questions about a scene, often each about what the one before was about; or none."""
    draw = rng.random()
    if draw < 0.4:
        asked = _about_it(scene, rng)
    elif draw < 0.55:
        asked = _and_others(scene, rng)
    else:
        asked = []
    for _ in range(20):
        if len(asked) >= count:
            break
        exchange = ask(scene, rng.choices(_KINDS, _KIND_WEIGHTS)[0], rng)
        if exchange is not None and exchange.question not in [other.question for other in asked]:
            asked.append(exchange)
    return asked[:count]


def _about_it(scene: Scene, rng: random.Random) -> list[Exchange]:
    """Returns questions about one shape, of which the first names it and the others do not."""
    named = [(thing, name) for thing in scene.shapes if (name := unique(scene, thing, rng)) is not None]
    if not named:
        return []
    thing, name = rng.choice(named)
    by_shape = len(meant_by(scene, name=thing.name)) == 1
    asked = [
        Exchange("dialogue", question, answer)
        for question, answer in (
            (worded(rng, ("Is there {one}?", "Do you see {one}?"), one=with_article(name)), "Yes"),
            (worded(rng, ("What color is the {one}?", "Which color has the {one}?"), one=thing.name), thing.color),
            (worded(rng, ("Where is the {one}?", "Where is the {one} in the {picture}?"), one=name), _place(thing)),
            (worded(rng, ("How big is the {one}?", "What size is the {one}?"), one=name), thing.size),
        )
        if answer and (by_shape or thing.name + "?" not in question or thing.color in question)
    ]
    asked = [exchange for exchange in asked if exchange.answer != thing.size or thing.size not in name]
    if not asked:
        return []
    first = rng.choice(asked)
    follow = list(_follow_ups(scene, thing, first, rng))
    rng.shuffle(follow)
    return [first, *follow]


def _follow_ups(scene: Scene, thing: Thing, first: Exchange, rng: random.Random) -> Iterator[Exchange]:
    said = f"{first.question} {first.answer}"
    if thing.color not in said:
        templates = ("What color is it?", "What colour is it?", "And what color is it?", "Which color has it?",
                     "Which colour has it?", "Which color is it?", "Its color?")  # fmt: skip
        yield Exchange("dialogue", rng.choice(templates), thing.color)
    if _place(thing) and not first.question.startswith("Where"):
        templates = ("Where is it?", "Where is it?", "And where is it?", "Where in the image is it?",
                     "Where is it in the picture?", "Where?")  # fmt: skip
        yield Exchange("dialogue", rng.choice(templates), _place(thing))
    if thing.size and thing.size not in said:
        templates = ("How big is it?", "How large is it?", "What size is it?", "Is it small, medium or large?")
        yield Exchange("dialogue", rng.choice(templates), thing.size)
    color = rng.choice(COLORS) if rng.random() < 0.5 else thing.color
    yield Exchange("dialogue", f"Is it {color}?", "Yes" if color == thing.color else "No")
    others = [other for other in scene.things if other is not thing]
    if len(others) < 6:
        rest = replace(scene, things=tuple(others))
        templates = ("What else is there?", "What else do you see?", "What else is in the image?", "What else?",
                     "Is there anything else?")  # fmt: skip
        question = rng.choice(templates)
        answer = inventory(rest) if others else "nothing"
        if question.startswith("Is"):
            answer = f"Yes, {answer}" if others else "No"
        yield Exchange("dialogue", question, answer)


def _and_others(scene: Scene, rng: random.Random) -> list[Exchange]:
    """Returns one question about several kinds of shapes, in full at first."""
    names = list(dict.fromkeys(thing.name for thing in scene.shapes))
    rng.shuffle(names)
    names = [*names[:2], rng.choice(SHAPES)]
    names = list(dict.fromkeys(names))
    if rng.random() < 0.5:
        forms = ("How many {many} are there?", "How many {many} do you see?")
        again = ("And {many}?", "And how many {many}?", "What about {many}?", "And the {many}?")
        return [
            Exchange(
                "dialogue",
                rng.choice(again if index else forms).format(many=plural(name)),
                str(len(meant_by(scene, name=name))),
            )
            for index, name in enumerate(names)
        ]
    alone = [name for name in names if len(meant_by(scene, name=name)) == 1]
    again = ("And the {one}?", "What about the {one}?", "And what color is the {one}?")
    return [
        Exchange(
            "dialogue",
            rng.choice(again if index else ("What color is the {one}?",)).format(one=name),
            meant_by(scene, name=name)[0].color,
        )
        for index, name in enumerate(alone)
    ]


def _about_both(first: Scene, second: Scene, rng: random.Random, count: int) -> Iterator[Turn]:
    """Yields turns behind a second picture, about it, about both or about the first one."""
    for index in range(count):
        draw = rng.random()
        if draw < 0.45:
            exchange = pairs.which((first, second), rng)
        elif draw < 0.65:
            exchange = pairs.ask_pair((first, second), rng)
        else:
            exchange = _about_the_new(second, rng)
        if exchange is not None and not (index == 0 and exchange.kind == "pair" and "ifferen" in exchange.question):
            yield _plain(exchange)


def _about_the_new(scene: Scene, rng: random.Random) -> Exchange | None:
    exchange = ask(scene, rng.choices(_KINDS, _KIND_WEIGHTS)[0], rng)
    if exchange is None:
        return None
    question = exchange.question
    draw = rng.random()
    if draw < 0.25:
        question = f"And in this {rng.choice(('image', 'picture', 'one'))}: {question[0].lower()}{question[1:]}"
    elif draw < 0.35:
        question = f"Here is another picture. {question}"
    elif draw < 0.4:
        question, exchange = rng.choice(("And this one?", "And in this one?", "And here?")), None
        return Exchange("dialogue", question, inventory(scene)) if len(scene.things) < 6 else None
    return replace(exchange, question=question)


def _place(thing: Thing) -> str:
    """Returns the thing's place, or nothing near a border between two places."""
    if any(abs(value - line) < 0.035 for value in thing.center for line in (1 / 3, 2 / 3)):
        return ""
    return place_words(thing)


def _reworded(turn: Turn, rng: random.Random) -> Turn:
    """Now and then an answer as another model or a person would word it, which later turns are to understand."""
    if rng.random() < 0.75 or len(turn.answer) > 40 or turn.answer in ("Yes", "No"):
        return turn
    answer = rng.choice((f" {turn.answer}", f"{turn.answer}.", f"{turn.answer[0].upper()}{turn.answer[1:]}.",
                         f" {turn.answer[0].upper()}{turn.answer[1:]}.", f"It is {turn.answer}."))  # fmt: skip
    return replace(turn, answer=answer, is_true=False)
