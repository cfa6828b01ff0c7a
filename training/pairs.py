"""Questions about two pictures, with the one answer that both scenes support."""

import random
from collections.abc import Callable

from training.exchange import Exchange
from training.palette import COLORS
from training.phrases import Referent, bare, meant_by
from training.questions import ask, inventory
from training.scenes import Scene, Thing
from training.shapes import SHAPES
from training.words import STRANGERS, with_article

ORDINALS = ("first", "second")
_NOUNS = ("image", "image", "picture", "picture", "photo")
_SINGLE_KINDS = (
    "count",
    "count",
    "color",
    "color",
    "shape",
    "presence",
    "reading",
    "contents",
    "relation",
    "place",
)
Pair = tuple[Scene, Scene]


def ask_pair(scenes: Pair, rng: random.Random) -> Exchange | None:
    """Returns a question about both or one of two pictures; None where this draw found none."""
    return rng.choices(tuple(_ASKS), tuple(_ASKS.values()))[0](scenes, rng)


def which(scenes: Pair, rng: random.Random) -> Exchange | None:
    """Asks which of the two pictures has something: in one of them, in both or in neither."""
    wanted = rng.choices(((True, False), (False, True), (True, True), (False, False)), (39, 39, 11, 11))[0]
    for _ in range(20):
        referent = _anything(scenes, rng)
        counts = [len(found(scene, referent)) for scene in scenes]
        if tuple(count > 0 for count in counts) == wanted:
            break
    else:
        return None
    noun = rng.choice(_NOUNS)
    one, many = with_article(referent.singular), referent.plural
    if referent.kind == "text":
        one = rng.choice(("text", "any text", "printed text"))
        many = "text"
    answer = {(True, False): "the first", (False, True): "the second", (True, True): "both"}.get(wanted, "neither")
    if sum(wanted) == 1 and rng.random() < 0.3:
        forms = (
            ("Which {noun} has {one}, the first or the second?", answer),
            ("Is the {what} in the first or the second {noun}?", answer),
            ("Which {noun} has {one}? Answer first or second.", answer.removeprefix("the ")),
            ("Which of the two {noun}s has {one}? Answer with first or second.", answer.removeprefix("the ")),
            ("Which {noun} has {one}, 1 or 2?", "1" if wanted[0] else "2"),
            ("Which of the two {noun}s has {one}? Answer 1 or 2.", "1" if wanted[0] else "2"),
        )
        form, answer = rng.choice(forms)
        question = form.format(noun=noun, one=one, what="text" if referent.kind == "text" else referent.singular)
        return Exchange("pair", question, answer)
    templates = (
        "Which of the two {noun}s has {one}?",
        "Which of the two {noun}s has {one}?",
        "Which of the {noun}s has {one}?",
        "Which of these {noun}s has {one}?",
        "Which {noun} has {one}?",
        "Which one has {one}?",
        "Which {noun} contains {one}?",
        "Which of the two {noun}s contains {one}?",
        "Which {noun} shows {one}?",
        "Which of the two {noun}s shows {one}?",
        "In which {noun} is there {one}?",
        "In which of the two {noun}s do you see {one}?",
        "Which {noun} has {many}?",
        "which of the two {noun}s has {one}",
        "Where is there {one}, in the first or in the second {noun}?",
    )
    # Now and then without the article, so that a choice between "first" and "second" is right too.
    if rng.random() < 0.2:
        answer = answer.removeprefix("the ")
    return Exchange("pair", rng.choice(templates).format(noun=noun, one=one, many=many), answer)


def found(scene: Scene, referent: Referent) -> tuple[Thing, ...]:
    """Returns what a referent's words mean in another scene. Its kind is shape, color, text or stranger."""
    if referent.kind == "text":
        return scene.texts
    if referent.kind == "stranger":
        return ()
    words = referent.singular.split()
    color = next((word for word in words if word in COLORS), "")
    name = next((word for word in words if word in SHAPES), "")
    if not name:
        return tuple(thing for thing in scene.things if thing.color == color)
    return meant_by(scene, color=color, name=name)


def _anything(scenes: Pair, rng: random.Random) -> Referent:
    things = [thing for scene in scenes for thing in scene.shapes]
    kind = rng.random()
    if kind < 0.08:
        return Referent("text", "texts", (), "text")
    if kind < 0.11:
        stranger = bare("", rng.choice(STRANGERS))
        return Referent(stranger.singular, stranger.plural, (), "stranger")
    if not things or rng.random() < 0.15:
        color, name = rng.choice(COLORS), rng.choice(SHAPES)
    else:
        thing = rng.choice(things)
        color, name = thing.color, thing.name
    draw = rng.random()
    if draw < 0.5:
        return bare("", name)
    if draw < 0.9:
        return bare(color, name)
    thing = bare(color, rng.choice(("thing", "object")))
    return Referent(thing.singular, thing.plural, (), "color")


def _more(scenes: Pair, rng: random.Random) -> Exchange | None:
    referent = _anything(scenes, rng)
    if referent.kind == "text":
        return None
    if rng.random() < 0.5:
        counts, noun = [len(scene.shapes) for scene in scenes], rng.choice(("shapes", "shapes", "objects"))
        if noun == "objects" and any(scene.texts for scene in scenes):
            return None
    else:
        counts, noun = [len(found(scene, referent)) for scene in scenes], referent.plural
    if counts[0] == counts[1]:
        return None
    word = rng.choice(("more", "more", "fewer"))
    first_wins = (counts[0] > counts[1]) == (word == "more")
    templates = (
        "Which of the two {picture}s has {word} {noun}?",
        "Which {picture} has {word} {noun}?",
        "Which {picture} shows {word} {noun}?",
        "Does the first or the second {picture} have {word} {noun}?",
    )
    question = rng.choice(templates).format(picture=rng.choice(_NOUNS), word=word, noun=noun)
    return Exchange("pair", question, f"the {ORDINALS[0 if first_wins else 1]}")


def _both(scenes: Pair, rng: random.Random) -> Exchange | None:
    referent = _anything(scenes, rng)
    if referent.kind == "text":
        return None
    counts = [len(found(scene, referent)) for scene in scenes]
    one, many, noun = with_article(referent.singular), referent.plural, rng.choice(_NOUNS)
    draw = rng.random()
    if draw < 0.55:
        templates = (
            "Do both {noun}s have {one}?",
            "Is there {one} in both {noun}s?",
            "Do both {noun}s contain {one}?",
            "Do the two {noun}s both show {one}?",
        )
        return Exchange("pair", rng.choice(templates).format(noun=noun, one=one), "Yes" if all(counts) else "No")
    if draw < 0.8:
        templates = ("How many of the {noun}s have {one}?", "In how many of the two {noun}s is there {one}?")
        question = rng.choice(templates).format(noun=noun, one=one)
        return Exchange("pair", question, str(sum(count > 0 for count in counts)))
    templates = (
        "How many {many} are there in both {noun}s together?",
        "How many {many} are in the two {noun}s in total?",
    )
    return Exchange("pair", rng.choice(templates).format(many=many, noun=noun), str(sum(counts)))


def about_one(scenes: Pair, rng: random.Random) -> Exchange | None:
    """Asks about one of the two pictures, by its number."""
    index = rng.randrange(2)
    exchange = ask(scenes[index], rng.choice(_SINGLE_KINDS), rng)
    if exchange is None:
        return None
    question, noun = exchange.question, rng.choice(_NOUNS)
    which_one = rng.choice((f"the {ORDINALS[index]} {noun}", f"{noun} {index + 1}"))
    for own in ("the image", "the picture", "the photo", "the scene", "this image", "this picture", "this photo"):
        if own in question and rng.random() < 0.8:
            return Exchange("pair", question.replace(own, which_one), exchange.answer)
    draw = rng.random()
    if draw < 0.45 and question.endswith("?") and ":" not in question:
        return Exchange("pair", f"{question[:-1]} in {which_one}?", exchange.answer)
    if draw < 0.75:
        lower = question[0].lower() + question[1:]
        return Exchange("pair", f"In {which_one}, {lower}", exchange.answer)
    templates = ("Look at {which}. {question}", "{Which}: {question}", "{question} I mean {which}.")
    text = rng.choice(templates).format(
        which=which_one, Which=which_one[0].upper() + which_one[1:], question=question
    )
    return Exchange("pair", text, exchange.answer)


def _same(scenes: Pair, rng: random.Random) -> Exchange | None:
    names = [name for name in SHAPES if all(len(meant_by(scene, name=name)) == 1 for scene in scenes)]
    if not names:
        return None
    name, noun = rng.choice(names), rng.choice(_NOUNS)
    colors = [meant_by(scene, name=name)[0].color for scene in scenes]
    templates = ("Is the {name} the same color in both {noun}s?", "Does the {name} have one color in both {noun}s?")
    return Exchange(
        "pair", rng.choice(templates).format(name=name, noun=noun), "Yes" if colors[0] == colors[1] else "No"
    )


def _contents(scenes: Pair, rng: random.Random) -> Exchange | None:
    if any(len(scene.things) > 5 for scene in scenes):
        return None
    noun = rng.choice(("image", "picture"))
    templates = (
        "What is in these {noun}s?",
        "What is in the two {noun}s?",
        "Describe both {noun}s.",
        "Describe the two {noun}s.",
        "What do you see in the {noun}s?",
        "What do the {noun}s show?",
        "Compare the two {noun}s.",
        "What is the difference between the two {noun}s?",
        "What is different?",
        "What is in this {noun}?",
        "Describe them.",
    )
    first, second = (inventory(scene) for scene in scenes)
    answer = f"The first image shows {first}. The second image shows {second}."
    return Exchange("pair", rng.choice(templates).format(noun=noun), answer)


def _backgrounds(scenes: Pair, rng: random.Random) -> Exchange | None:
    index = rng.randrange(2)
    if not scenes[index].background.name:
        return None
    noun = rng.choice(_NOUNS)
    question = f"What color is the background of the {ORDINALS[index]} {noun}?"
    return Exchange("pair", question, scenes[index].background.name)


_ASKS: dict[Callable[[Pair, random.Random], Exchange | None], int] = {
    which: 46,
    _more: 8,
    _both: 12,
    about_one: 24,
    _same: 3,
    _contents: 5,
    _backgrounds: 2,
}
