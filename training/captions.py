"""Descriptions of a scene in three lengths, each the one true caption of its length."""

from training.phrases import NUMBER_WORDS, full_name, groups, joined
from training.scenes import Scene, Thing
from training.words import plural, with_article


def short_caption(scene: Scene) -> str:
    """What there is: "A red circle and two blue stars." """
    return _sentence(joined(_inventory(scene)))


def normal_caption(scene: Scene) -> str:
    """What there is, on what ground."""
    return f"The image shows {joined(_inventory(scene))} on {background_phrase(scene)}."


def long_caption(scene: Scene) -> str:
    """The ground, and every thing with its size and place, from left to right."""
    sentences = [f"The image has {background_phrase(scene)}."]
    count = len(scene.shapes)
    if count:
        sentences.append(f"It shows {NUMBER_WORDS[count]} {'shape' if count == 1 else 'shapes'}.")
    for thing in sorted(scene.things, key=lambda thing: thing.center[0]):
        if thing.is_text:
            sentences.append(f'The {thing.color} {thing.name} "{thing.text}" is {place_phrase(thing)}.')
        else:
            sentences.append(
                _sentence(f"{with_article(f'{thing.size} {full_name(thing)}'.strip())} is {place_phrase(thing)}")
            )
    return " ".join(sentences)


def background_phrase(scene: Scene) -> str:
    """The ground with its article."""
    background = scene.background
    if background.kind == "plain":
        return f"a plain {background.name} background" if background.name else "a plain background"
    adjective = {"gradient": "gradient", "noise": "noisy"}.get(background.kind, "patterned")
    return f"a {adjective} background"


def place_phrase(thing: Thing) -> str:
    """Where in the picture: "at the top left", "in the center"."""
    words = place_words(thing)
    return (
        "in the center"
        if words == "center"
        else f"at the {words}"
        if " " in words
        else f"on the {words}"
        if words in ("left", "right")
        else f"at the {words}"
    )


def place_words(thing: Thing) -> str:
    """One of nine places by the thing's centre."""
    x, y = thing.center
    row = "top" if y < 1 / 3 else "bottom" if y > 2 / 3 else ""
    column = "left" if x < 1 / 3 else "right" if x > 2 / 3 else ""
    return f"{row} {column}".strip() or "center"


def _inventory(scene: Scene) -> list[str]:
    parts = [
        with_article(full_name(thing))
        if count == 1
        else f"{NUMBER_WORDS[count]} {thing.color} {plural(thing.name)}"
        for count, thing in groups(scene.shapes)
    ]
    parts += [
        f'the {thing.name} "{thing.text}"' for thing in sorted(scene.texts, key=lambda thing: thing.center[0])
    ]
    return parts or ["nothing"]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
