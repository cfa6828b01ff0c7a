"""Questions about a scene with the one answer that it supports, by kind and in many wordings."""

import random
from collections.abc import Callable

from training import phrases
from training.comparisons import place, relation, size
from training.exchange import Exchange, any_thing, worded
from training.phrases import NUMBER_WORDS, absent, full_name, groups, joined, present, unique
from training.scenes import Scene
from training.words import plural, with_article


def _count(scene: Scene, rng: random.Random) -> Exchange | None:
    referent = present(scene, rng) if rng.random() < 0.85 else absent(scene, rng)
    if (
        referent is None
        or referent.kind == "extreme"
        or (referent.kind == "text" and referent.plural == referent.singular)
    ):
        return None
    templates = (
        "How many {many} are there?",
        "How many {many} are there?",
        "How many {many} are in the {picture}?",
        "How many {many} are there in the {picture}?",
        "How many {many} are in this {picture}?",
        "How many {many} do you see?",
        "How many {many} can you see?",
        "How many {many} are shown?",
        "Count the {many}.",
        "Count all the {many} in the {picture}.",
        "What is the number of {many}?",
        "Tell me how many {many} there are.",
        "how many {many}?",
        "how many {many} are there",
    )
    return Exchange(
        "count",
        worded(rng, templates, many=referent.plural),
        str(referent.count),
        evidence=((referent.plural, referent.things),),
    )


def _color(scene: Scene, rng: random.Random) -> Exchange | None:
    templates = (
        "What color is the {one}?",
        "What color is the {one}?",
        "What colour is the {one}?",
        "What is the color of the {one}?",
        "What is the {one}'s color?",
        "Which color is the {one}?",
        "Which color does the {one} have?",
        "What color is the {one} in the {picture}?",
        "Tell me the color of the {one}.",
        "what color is the {one}",
        "The {one} is what color?",
    )
    if rng.random() < 0.12:
        missing = absent(scene, rng)
        if missing.kind == "text" or any(word in missing.singular.split() for word in phrases.COLORS):
            return None
        answer = f"There is no {missing.singular} in the image."
        return Exchange(
            "color", worded(rng, templates, one=missing.singular), answer, evidence=((missing.singular, ()),)
        )
    thing = any_thing(scene, rng)
    if thing is None:
        return None
    if thing.is_text:
        one = unique(scene, thing, rng)
    elif len(phrases.meant_by(scene, name=thing.name)) == 1:
        one = thing.name
    elif thing.size and len(phrases.meant_by(scene, name=thing.name, size=thing.size)) == 1:
        one = f"{thing.size} {thing.name}"
    else:
        word = rng.choice(("leftmost", "rightmost", "largest", "smallest", "topmost"))
        best = phrases.extreme(phrases.meant_by(scene, name=thing.name), word)
        if best is None:
            return None
        thing, one = best, f"{word} {thing.name}"
    if one is None:
        return None
    return Exchange("color", worded(rng, templates, one=one), thing.color, evidence=((f"the {one}", (thing,)),))


def _shape(scene: Scene, rng: random.Random) -> Exchange | None:
    thing = rng.choice(scene.shapes) if scene.shapes else None
    if thing is None:
        return None
    fitting = phrases.meant_by(scene, color=thing.color)
    if any(other.name != thing.name for other in fitting):
        fitting = phrases.meant_by(scene, color=thing.color, size=thing.size)
        if not thing.size or any(other.name != thing.name for other in fitting):
            return None
        words = f"{thing.size} {thing.color}"
    else:
        words = thing.color
    if any(other.color == thing.color for other in scene.texts):
        return None
    if len(fitting) > 1:
        templates = (
            "What shape are the {words} objects?",
            "What shape are the {words} things?",
            "What are the {words} shapes?",
            "What shape do the {words} objects have?",
        )
        return Exchange(
            "shape", worded(rng, templates, words=words), thing.name, evidence=((f"the {words} shapes", fitting),)
        )
    templates = (
        "What shape is the {words} object?",
        "What shape is the {words} object?",
        "What shape is {words}?",
        "What is the {words} shape?",
        "What is the {words} object?",
        "Which shape is {words}?",
        "What shape is the {words} thing?",
        "What shape does the {words} object have?",
        "What kind of shape is the {words} one?",
        "Name the {words} shape.",
        "what is the shape of the {words} object",
    )
    return Exchange(
        "shape", worded(rng, templates, words=words), thing.name, evidence=((f"the {words} shape", fitting),)
    )


def _reading(scene: Scene, rng: random.Random) -> Exchange | None:
    if not scene.texts:
        if rng.random() < 0.8:
            return None
        templates = (
            "What does the text say?",
            "What text is in the {picture}?",
            "What is written in the {picture}?",
            "Read the text.",
            "What word is shown?",
            "Is there any text in the {picture}?",
            "What letter is shown?",
        )
        question = worded(rng, templates)
        return Exchange(
            "reading",
            question,
            "No" if question.startswith("Is") else "There is no text in the image.",
            evidence=(("text", ()),),
        )
    thing = rng.choice(scene.texts)
    by_color = len({other.color for other in scene.texts}) == len(scene.texts) and rng.random() < 0.3
    name = rng.choice((thing.name, "text")) if by_color else unique(scene, thing, rng)
    if name is None:
        if scene.texts[0].center[0] == scene.texts[1].center[0]:
            return None
        ordered = sorted(scene.texts, key=lambda text: text.center[0])
        return Exchange(
            "reading",
            worded(rng, ("What does all the text say?", "Read all the text.", "List all the texts.")),
            joined([text.text for text in ordered]),
        )
    words = f"{thing.color} {name}" if by_color else name
    templates = (
        "What does the {words} say?",
        "What {words} is shown?",
        "What {words} is in the {picture}?",
        "What is the {words}?",
        "What is the {words} in the {picture}?",
        "Which {words} do you see?",
        "Which {words} is printed in the {picture}?",
        "What {words} can you see?",
        "Read the {words}.",
        "Please read the {words}.",
        "What {words} is written?",
    )
    plain = (
        "What is written in the {picture}?",
        "What is written?",
        "What text is in the {picture}?",
        "Read the text.",
        "What does it say?",
        "What does the text say?",
        "What does the {picture} say?",
    )
    if len(scene.texts) == 1 and rng.random() < 0.35:
        return Exchange("reading", worded(rng, plain), thing.text, evidence=((f"the {thing.name}", (thing,)),))
    return Exchange(
        "reading", worded(rng, templates, words=words), thing.text, evidence=((f"the {thing.name}", (thing,)),)
    )


def _presence(scene: Scene, rng: random.Random) -> Exchange | None:
    if scene.things and rng.random() < 0.3:
        return _attribute(scene, rng)
    is_there = rng.random() < 0.5 and bool(scene.things)
    referent = present(scene, rng) if is_there else absent(scene, rng)
    if referent is None or referent.kind == "extreme":
        return None
    text = referent.singular
    article = (
        "any "
        if text == "text"
        else ""
        if referent.plural == text
        else (
            "the "
            if text.split()[0] in ("letter", "digit", "number", "word") and len(text.split()) > 1
            else with_article(text)[: -len(text)]
        )
    )
    one = article + text
    many = referent.plural
    templates = (
        "Is there {one}?",
        "Is there {one} in the {picture}?",
        "Is there {one} in this {picture}?",
        "Do you see {one}?",
        "Can you see {one}?",
        "Does the {picture} contain {one}?",
        "Does the {picture} show {one}?",
        "Is {one} visible?",
        "is there {one}",
        *(
            ()
            if many == text
            else (
                "Are there any {many}?",
                "Are there any {many} in the {picture}?",
                "Are there {many} here?",
                "Do you see any {many}?",
            )
        ),
    )
    return Exchange(
        "presence",
        worded(rng, templates, one=one, many=many),
        "Yes" if is_there else "No",
        evidence=((text, referent.things),),
    )


def _attribute(scene: Scene, rng: random.Random) -> Exchange | None:
    thing = rng.choice(scene.things)
    one = unique(scene, thing, rng)
    if one is None or thing.color in one or (thing.is_text and len(scene.texts) > 1):
        return None
    color = thing.color if rng.random() < 0.5 else rng.choice(phrases.COLORS)
    templates = (
        "Is the {one} {color}?",
        "Is the {one} {color}?",
        "Is the color of the {one} {color}?",
        "Is the {one} in the {picture} {color}?",
    )
    return Exchange(
        "presence",
        worded(rng, templates, one=one, color=color),
        "Yes" if color == thing.color else "No",
        evidence=((f"the {one}", (thing,)),),
    )


def _contents(scene: Scene, rng: random.Random) -> Exchange | None:
    draw = rng.random()
    if draw < 0.6:
        templates = (
            "What is in this image?",
            "What is in the {picture}?",
            "What's in this {picture}?",
            "What do you see?",
            "What can you see in the {picture}?",
            "What does the {picture} show?",
            "Describe the {picture}.",
            "What objects are in the {picture}?",
            "Describe this {picture} briefly.",
            "List everything in the {picture}.",
            "What is shown here?",
            "What is this?",
        )
        return Exchange("contents", worded(rng, templates), inventory(scene))
    if not scene.shapes:
        return None
    ordered = sorted(scene.shapes, key=lambda thing: thing.center[0])
    if draw < 0.8:
        names = list(dict.fromkeys(thing.name for thing in ordered))
        templates = (
            "What shapes are there?",
            "What shapes do you see?",
            "Which shapes are in the {picture}?",
            "What kinds of shapes are in the {picture}?",
            "List the shapes.",
        )
        return Exchange("contents", worded(rng, templates), joined(names))
    if scene.texts:
        return None
    colors = list(dict.fromkeys(thing.color for thing in ordered))
    templates = (
        "What colors are the shapes?",
        "Which colors do the shapes have?",
        "What colors do you see on the shapes?",
        "List the colors of the shapes.",
    )
    return Exchange("contents", worded(rng, templates), joined(colors))


def _background(scene: Scene, rng: random.Random) -> Exchange | None:
    if not scene.background.name:
        return None
    templates = (
        "What color is the background?",
        "What is the background color?",
        "What colour is the background?",
        "What color is the background of the {picture}?",
    )
    return Exchange("background", worded(rng, templates), scene.background.name)


def _pointed(scene: Scene, rng: random.Random) -> Exchange | None:
    thing = any_thing(scene, rng)
    if thing is None:
        return None
    points = (thing.mark,)
    draw = rng.random()
    if draw < 0.5:
        templates = (
            "What is this?",
            "What is at this point?",
            "What is here?",
            "What object is this?",
            "Describe this object.",
        )
        return Exchange(
            "pointed",
            rng.choice(templates),
            with_article(full_name(thing)) if not thing.is_text else f"the {full_name(thing)}",
            points,
        )
    if draw < 0.75:
        templates = ("What color is this?", "What color is this object?", "What is the color here?")
        return Exchange("pointed", rng.choice(templates), thing.color, points)
    if thing.is_text:
        return Exchange("pointed", rng.choice(("What does this say?", "Read this.")), thing.text, points)
    return Exchange("pointed", rng.choice(("What shape is this?", "Which shape is this?")), thing.name, points)


KINDS: dict[str, Callable[[Scene, random.Random], Exchange | None]] = {
    "count": _count,
    "color": _color,
    "shape": _shape,
    "relation": relation,
    "size": size,
    "reading": _reading,
    "presence": _presence,
    "contents": _contents,
    "place": place,
    "background": _background,
    "pointed": _pointed,
}


def ask(scene: Scene, kind: str, rng: random.Random) -> Exchange | None:
    """A question of this kind; None where this draw found none that the scene answers."""
    return KINDS[kind](scene, rng) or None


def inventory(scene: Scene) -> str:
    """Returns everything in a scene, from left to right, shapes of one colour and kind counted together."""
    parts = [
        with_article(full_name(thing))
        if count == 1
        else f"{NUMBER_WORDS[count]} {thing.color} {plural(thing.name)}"
        for count, thing in groups(scene.shapes)
    ]
    parts += [f"the {full_name(thing)}" for thing in sorted(scene.texts, key=lambda thing: thing.center[0])]
    return joined(parts) if parts else "nothing"
