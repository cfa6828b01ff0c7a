"""Questions that compare: where one thing is from another or in the picture, and which is larger."""

import random

from training import phrases
from training.captions import place_words
from training.exchange import Exchange, any_thing, named_pair, worded
from training.phrases import full_name, unique
from training.scenes import Scene


def relation(scene: Scene, rng: random.Random) -> Exchange | None:
    """Where a thing is from another."""
    pair = named_pair(scene, rng)
    if pair is None:
        return None
    (first, one), (second, other) = pair
    dx, dy = first.center[0] - second.center[0], first.center[1] - second.center[1]
    horizontal = rng.random() < 0.5
    # As far apart as anybody would say "left of".
    gap = max((first.box[2 if horizontal else 3] - first.box[0 if horizontal else 1]) / 2, 0.06)
    if abs(dx if horizontal else dy) < gap:
        return None
    word = ("left" if dx < 0 else "right") if horizontal else ("above" if dy < 0 else "below")
    opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}
    evidence = ((f"the {one}", (first,)), (f"the {other}", (second,)))
    draw = rng.random()
    if draw < 0.4:
        asked = word if rng.random() < 0.5 else opposite[word]
        spoken = _relation_words(asked, rng)
        templates = (
            "Is the {one} {word} the {other}?",
            "Is the {one} {word} the {other}?",
            "Is the {one} located {word} the {other}?",
            "Does the {one} lie {word} the {other}?",
            "Is the {one} {word} the {other} in the {picture}?",
        )
        question = worded(rng, templates, one=one, other=other, word=spoken)
        return Exchange("relation", question, "Yes" if asked == word else "No", evidence=evidence)
    if draw < 0.7:
        templates = (
            (
                "Is the {one} to the left or right of the {other}?",
                "Is the {one} left or right of the {other}?",
                "Is the {one} on the left or the right of the {other}?",
                "Left or right of the {other}: where is the {one}?",
            )
            if horizontal
            else (
                "Is the {one} above or below the {other}?",
                "Is the {one} above or below the {other} in the {picture}?",
                "Is the {one} higher or lower than the {other}?",
                "Above or below the {other}: where is the {one}?",
            )
        )
        question = worded(rng, templates, one=one, other=other)
        if "higher" in question:
            return Exchange("relation", question, "higher" if word == "above" else "lower", evidence=evidence)
        return Exchange("relation", question, word, evidence=evidence)
    if draw < 0.85:
        # The one direction that clearly prevails.
        far, near = (abs(dx), abs(dy)) if horizontal else (abs(dy), abs(dx))
        if far < 2.2 * near:
            return None
        templates = (
            "Where is the {one} relative to the {other}?",
            "Where is the {one} compared to the {other}?",
            "What is the position of the {one} relative to the {other}?",
            "In which direction from the {other} is the {one}?",
        )
        return Exchange("relation", worded(rng, templates, one=one, other=other), word, evidence=evidence)
    templates = (
        (
            "Which is further to the {side}, the {one} or the {other}?",
            "Which is more to the {side}: the {one} or the {other}?",
        )
        if horizontal
        else ("Which is {high}, the {one} or the {other}?", "Which one is {high}: the {one} or the {other}?")
    )
    side, high = rng.choice(("left", "right")), rng.choice(("higher", "lower"))
    first_wins = (side == word) if horizontal else ((high == "higher") == (word == "above"))
    question = worded(rng, templates, one=one, other=other, side=side, high=high)
    return Exchange("relation", question, f"the {one if first_wins else other}", evidence=evidence)


def size(scene: Scene, rng: random.Random) -> Exchange | None:
    """How large a thing is, alone or beside another."""
    if not scene.shapes or not scene.shapes[0].size:
        return None
    draw = rng.random()
    if draw < 0.4:
        thing = rng.choice(scene.shapes)
        one = unique(scene, thing, rng)
        if one is None or one.startswith(thing.size):
            return None
        templates = (
            "What size is the {one}?",
            "How big is the {one}?",
            "How large is the {one}?",
            "What is the size of the {one}?",
            "Is the {one} small, medium or large?",
        )
        return Exchange("size", worded(rng, templates, one=one), thing.size, evidence=((f"the {one}", (thing,)),))
    if draw < 0.75:
        pair = named_pair(scene, rng)
        if pair is None:
            return None
        (first, one), (second, other) = pair
        if first.is_text or second.is_text or first.size == second.size:
            return None
        evidence = ((f"the {one}", (first,)), (f"the {other}", (second,)))
        bands = {"small": 0, "medium": 1, "large": 2}
        larger = rng.random() < 0.6
        word = rng.choice(("larger", "bigger")) if larger else "smaller"
        first_wins = (bands[first.size] > bands[second.size]) == larger
        if rng.random() < 0.4:
            question = worded(rng, ("Is the {one} {word} than the {other}?",), one=one, other=other, word=word)
            return Exchange("size", question, "Yes" if first_wins else "No", evidence=evidence)
        templates = (
            "Which is {word}, the {one} or the {other}?",
            "Which one is {word}: the {one} or the {other}?",
            "Is the {one} or the {other} {word}?",
            "What is {word}, the {one} or the {other}?",
        )
        question = worded(rng, templates, one=one, other=other, word=word)
        return Exchange("size", question, f"the {one if first_wins else other}", evidence=evidence)
    word = rng.choice(("largest", "smallest"))
    best = phrases.extreme(scene.shapes, word)
    if best is None:
        return None
    spoken = rng.choice(("largest", "biggest")) if word == "largest" else word
    noun = rng.choice(("shape", "object") if not scene.texts else ("shape",))
    if rng.random() < 0.4:
        question = worded(
            rng,
            ("What color is the {word} {noun}?", "What is the color of the {word} {noun}?"),
            word=spoken,
            noun=noun,
        )
        return Exchange("size", question, best.color, evidence=((f"the {spoken} {noun}", (best,)),))
    templates = (
        "What is the {word} {noun}?",
        "Which {noun} is the {word}?",
        "What is the {word} {noun} in the {picture}?",
    )
    return Exchange(
        "size",
        worded(rng, templates, word=spoken, noun=noun),
        full_name(best),
        evidence=((f"the {spoken} {noun}", (best,)),),
    )


def place(scene: Scene, rng: random.Random) -> Exchange | None:
    """Where in the picture a thing is."""
    thing = any_thing(scene, rng)
    one = None if thing is None else unique(scene, thing, rng)
    if thing is None or one is None:
        return None
    # Near a border between two of the nine places the answer is not defined.
    if any(abs(value - line) < 0.035 for value in thing.center for line in (1 / 3, 2 / 3)):
        return None
    templates = (
        "Where is the {one}?",
        "Where is the {one}?",
        "Where is the {one} in the {picture}?",
        "In which part of the {picture} is the {one}?",
        "Where can I find the {one}?",
        "Where is the {one} located?",
    )
    return Exchange(
        "place", worded(rng, templates, one=one), place_words(thing), evidence=((f"the {one}", (thing,)),)
    )


def _relation_words(word: str, rng: random.Random) -> str:
    return rng.choice(
        {
            "left": ("to the left of", "left of", "on the left of"),
            "right": ("to the right of", "right of", "on the right of"),
            "above": ("above", "higher than", "over"),
            "below": ("below", "lower than", "under"),
        }[word]
    )
