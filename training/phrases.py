"""Ways to name things: a phrase and exactly which things of a scene it means, or a phrase that means none."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from training.palette import COLORS
from training.scenes import Scene, Thing
from training.shapes import SHAPES
from training.words import DIGITS, LETTERS, PRINTED_WORDS, STRANGERS, plural

NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
_EXTREMES = ("leftmost", "rightmost", "topmost", "bottommost", "largest", "smallest")
# How much further out an extreme thing must be than the next, as a share of the image or of its size.
_EXTREME_LEAD, _SIZE_LEAD = 0.04, 1.2


@dataclass(frozen=True, slots=True)
class Referent:
    """A bare noun phrase ("small red star") in both numbers, and what it means."""

    singular: str
    plural: str
    things: tuple[Thing, ...]
    kind: str = "shape"
    """shape, color, any, text, extreme or stranger: what the phrase goes by."""

    @property
    def count(self) -> int:
        return len(self.things)


def bare(color: str, noun: str, size: str = "") -> Referent:
    """A phrase of these words that means nothing yet."""
    words = " ".join(word for word in (size, color, noun) if word)
    many = " ".join(word for word in (size, color, plural(noun)) if word)
    return Referent(words, many, ())


def meant_by(scene: Scene, *, color: str = "", name: str = "", size: str = "") -> tuple[Thing, ...]:
    """The shapes that fit all words given."""
    return tuple(
        thing
        for thing in scene.shapes
        if (not color or thing.color == color)
        and (not name or thing.name == name)
        and (not size or thing.size == size)
    )


def present(scene: Scene, rng: random.Random) -> Referent | None:
    """A phrase that means at least one thing of the scene; None where there is nothing."""
    if not scene.things:
        return None
    draw = rng.random()
    if scene.texts and (draw < 0.2 or not scene.shapes):
        return _text_referent(scene, rng)
    if draw < 0.28 and len(scene.shapes) > 1:
        referent = _extreme_referent(scene, rng)
        if referent is not None:
            return referent
    if draw < 0.36:
        return _general_referent(scene, rng)
    return _shape_referent(scene, rng.choice(scene.shapes), rng)


def absent(scene: Scene, rng: random.Random) -> Referent:
    """A phrase that means nothing in the scene, often nearly something."""
    draw = rng.random()
    colors = {thing.color for thing in scene.shapes}
    names = {thing.name for thing in scene.shapes}
    for _ in range(20):
        color = rng.choice(sorted(colors)) if colors and draw < 0.45 else rng.choice(COLORS)
        name = rng.choice(sorted(names)) if names and rng.random() < 0.5 else rng.choice(SHAPES)
        if draw < 0.6 and not meant_by(scene, color=color, name=name):
            return _spelled(bare(color, name), rng)
        if 0.6 <= draw < 0.82 and name not in names:
            return bare("", name)
        if 0.82 <= draw < 0.87 and not any(thing.color == color for thing in scene.things):
            one = bare(color, rng.choice(("shape", "object", "thing")))
            return _spelled(Referent(one.singular, one.plural, (), "color"), rng)
        if draw >= 0.92 and (missing := _absent_text(scene, rng)) is not None:
            return missing
        if draw >= 0.87:
            one = bare("", rng.choice(STRANGERS))
            return Referent(one.singular, one.plural, (), "stranger")
        draw, name = rng.random(), rng.choice(SHAPES)
    one = bare("", rng.choice(STRANGERS))
    return Referent(one.singular, one.plural, (), "stranger")


def unique(scene: Scene, thing: Thing, rng: random.Random) -> str | None:
    """A phrase without article that means `thing` alone, mostly the shortest; None where there is none."""
    if thing.is_text:
        if len(scene.texts) == 1:
            return rng.choice(("text", thing.name))
        same = [other for other in scene.texts if other.name == thing.name]
        return thing.name if len(same) == 1 else None
    options = []
    if len(meant_by(scene, name=thing.name)) == 1:
        options.append(thing.name)
    if len(meant_by(scene, name=thing.name, color=thing.color)) == 1:
        options.append(f"{thing.color} {thing.name}")
    if thing.size and len(meant_by(scene, name=thing.name, color=thing.color, size=thing.size)) == 1:
        options.append(f"{thing.size} {thing.color} {thing.name}")
    if thing.size and len(meant_by(scene, name=thing.name, size=thing.size)) == 1 and rng.random() < 0.3:
        options.append(f"{thing.size} {thing.name}")
    if not options:
        return None
    return options[0] if rng.random() < 0.6 else rng.choice(options)


def full_name(thing: Thing) -> str:
    """Colour and kind: "red star"; for a text what it is and says."""
    return f'{thing.name} "{thing.text}"' if thing.is_text else f"{thing.color} {thing.name}"


def groups(things: Iterable[Thing]) -> list[tuple[int, Thing]]:
    """Shapes of one colour and kind counted together, each group where its leftmost member stands."""
    ordered = sorted((thing for thing in things if not thing.is_text), key=lambda thing: thing.center[0])
    counts = Counter((thing.color, thing.name) for thing in ordered)
    firsts: dict[tuple[str, str], Thing] = {}
    for thing in ordered:
        firsts.setdefault((thing.color, thing.name), thing)
    return [(counts[key], thing) for key, thing in firsts.items()]


def joined(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _shape_referent(scene: Scene, thing: Thing, rng: random.Random) -> Referent:
    draw = rng.random()
    use_color, use_size = draw < 0.6, draw > 0.88 or draw < 0.12
    color, size = thing.color if use_color else "", thing.size if use_size else ""
    one = bare(color, thing.name, size)
    things = meant_by(scene, color=color, name=thing.name, size=size)
    return _spelled(Referent(one.singular, one.plural, things), rng)


def _general_referent(scene: Scene, rng: random.Random) -> Referent:
    noun = rng.choice(("shape", "object", "thing"))
    if rng.random() < 0.5 or (scene.texts and noun != "shape"):
        colors = sorted({thing.color for thing in scene.shapes} - {thing.color for thing in scene.texts})
        if colors:
            color = rng.choice(colors)
            one = bare(color, noun)
            return _spelled(Referent(one.singular, one.plural, meant_by(scene, color=color), "color"), rng)
    if scene.texts:
        noun = "shape"
    return Referent(noun, plural(noun), scene.shapes, "any")


def _extreme_referent(scene: Scene, rng: random.Random) -> Referent | None:
    word = rng.choice(_EXTREMES)
    if rng.random() < 0.5:
        pool, noun = scene.shapes, rng.choice(("shape", "object") if not scene.texts else ("shape",))
    else:
        noun = rng.choice(scene.shapes).name
        pool = meant_by(scene, name=noun)
    best = extreme(pool, word)
    if best is None:
        return None
    spoken = {"topmost": ("topmost", "top", "highest"), "bottommost": ("bottom", "lowest", "bottommost")}
    spoken |= {"largest": ("largest", "biggest"), "smallest": ("smallest",)}
    phrase = f"{rng.choice(spoken.get(word, (word,)))} {noun}"
    return Referent(phrase, phrase, (best,), "extreme")


def extreme(pool: Sequence[Thing], word: str) -> Thing | None:
    """Which of at least two things lies or is furthest in a direction, if one clearly does."""
    if len(pool) < 2:
        return None
    if word in ("largest", "smallest"):
        # Bands of size are what the picture shows; two of one band are no clear order.
        bands = {"small": 0, "medium": 1, "large": 2}
        if not all(thing.size for thing in pool):
            return None
        ordered = sorted(pool, key=lambda thing: bands[thing.size], reverse=word == "largest")
        return ordered[0] if ordered[0].size != ordered[1].size else None
    axis, sign = (0 if word in ("leftmost", "rightmost") else 1), (1 if word in ("leftmost", "topmost") else -1)
    ordered = sorted(pool, key=lambda thing: sign * thing.center[axis])
    lead = abs(ordered[0].center[axis] - ordered[1].center[axis])
    return ordered[0] if lead >= _EXTREME_LEAD else None


def _text_referent(scene: Scene, rng: random.Random) -> Referent:
    thing = rng.choice(scene.texts)
    same = tuple(other for other in scene.texts if other.name == thing.name)
    draw = rng.random()
    if draw < 0.4:
        return Referent("text", "texts", scene.texts, "text")
    if draw < 0.6:
        return Referent(thing.name, plural(thing.name), same, "text")
    alike = tuple(other for other in same if other.text.lower() == thing.text.lower())
    if draw < 0.85:
        text = f'"{thing.text}"' if rng.random() < 0.4 else thing.text
        phrase = f"{thing.name} {text}"
    else:
        phrase = thing.text
    return Referent(phrase, phrase, alike, "text")


def _absent_text(scene: Scene, rng: random.Random) -> Referent | None:
    texts = {thing.text.lower() for thing in scene.texts}
    if not texts and rng.random() < 0.5:
        noun = rng.choice(("text", "word", "letter", "number"))
        return Referent(noun, plural(noun), (), "text")
    name = rng.choice(("letter", "digit", "word"))
    text = rng.choice({"letter": LETTERS, "digit": DIGITS, "word": PRINTED_WORDS}[name])
    if name == "word":
        text = text.upper() if rng.random() < 0.6 else text
    if text.lower() in texts:
        return None
    phrase = f'{name} "{text}"' if rng.random() < 0.4 else f"{name} {text}"
    return Referent(phrase, phrase, (), "text")


def _spelled(referent: Referent, rng: random.Random) -> Referent:
    """Now and then with the other spelling of gray."""
    if "gray" not in referent.singular or rng.random() < 0.6:
        return referent
    singular, many = (phrase.replace("gray", "grey") for phrase in (referent.singular, referent.plural))
    return Referent(singular, many, referent.things, referent.kind)
