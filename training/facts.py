"""Questions that need no image: small sums, opposites, counting, words of other languages, and who answers."""

import random
from collections.abc import Callable

from training.exchange import Exchange
from training.palette import COLORS
from training.phrases import NUMBER_WORDS
from training.shapes import SHAPES

_PAIRS = """
    big/small large/small hot/cold up/down left/right above/below black/white day/night open/closed fast/slow
    high/low light/dark happy/sad wet/dry old/new long/short hard/soft early/late in/out full/empty rich/poor
    strong/weak young/old loud/quiet clean/dirty thick/thin first/last true/false yes/no good/bad top/bottom
    near/far start/end
"""
_OPPOSITES = tuple(pair.split("/") for pair in _PAIRS.split())
_LANGUAGES: dict[str, dict[str, str]] = {
    "French": dict(
        zip(
            COLORS,
            ["rouge", "orange", "jaune", "vert", "bleu", "violet", "rose", "marron", "noir", "blanc", "gris"],
            strict=True,
        )
    ),
    "German": dict(
        zip(
            COLORS,
            ["rot", "orange", "gelb", "grün", "blau", "lila", "rosa", "braun", "schwarz", "weiß", "grau"],
            strict=True,
        )
    ),
    "Spanish": dict(
        zip(
            COLORS,
            ["rojo", "naranja", "amarillo", "verde", "azul", "morado", "rosa", "marrón", "negro", "blanco", "gris"],
            strict=True,
        )
    ),
    "Japanese": dict(
        zip(COLORS, ["赤", "オレンジ", "黄色", "緑", "青", "紫", "ピンク", "茶色", "黒", "白", "灰色"], strict=True)
    ),
    "Chinese": dict(
        zip(
            COLORS,
            ["红色", "橙色", "黄色", "绿色", "蓝色", "紫色", "粉色", "棕色", "黑色", "白色", "灰色"],
            strict=True,
        )
    ),
}
_SIGNS = {
    "circle": "●",
    "square": "■",
    "triangle": "▲",
    "star": "★",
    "cross": "✚",
    "ring": "○",
    "heart": "♥",
    "crescent": "☾",
}
_EMOJI = {
    "heart": "❤️",
    "star": "⭐",
    "crescent": "🌙",
    "circle": "🔴",
    "square": "🟥",
    "triangle": "🔺",
    "cross": "✖️",
    "ring": "⭕",
}
_SIDES = {"triangle": 3, "square": 4}


def _sum(rng: random.Random) -> Exchange:
    sign = rng.choice(("+", "+", "-", "×"))
    if sign == "×":
        first, second = rng.randint(0, 9), rng.randint(0, 9)
        answer, words = first * second, ("×", "*", "times", "x", "multiplied by")
    elif sign == "+":
        first, second = rng.randint(0, 20), rng.randint(0, 20)
        answer, words = first + second, ("+", "+", "+", "plus")
    else:
        second = rng.randint(0, 20)
        answer = rng.randint(0, 20)
        first, words = answer + second, ("-", "-", "-", "minus")
    term = f"{first} {rng.choice(words)} {second}"
    if rng.random() < 0.12 and first <= 12 and second <= 12:
        term = f"{NUMBER_WORDS[first]} {rng.choice(words)} {NUMBER_WORDS[second]}"
    elif rng.random() < 0.1:
        term = term.replace(" ", "") if not any(letter.isalpha() for letter in term) else term
    templates = (
        "What is {}?",
        "What is {}?",
        "{} = ?",
        "{} =",
        "Calculate {}.",
        "How much is {}?",
        "{}?",
        "Compute {}.",
        "What's {}?",
    )
    return Exchange("arithmetic", rng.choice(templates).format(term), str(answer))


def _opposite(rng: random.Random) -> Exchange:
    first, second = rng.choice(_OPPOSITES)
    # Where a word has two opposites only the pair's first word is asked for.
    if rng.random() < 0.5 and second not in ("small", "old", "short", "light"):
        first, second = second, first
    templates = (
        "What is the opposite of {}?",
        "What is the opposite of '{}'?",
        "Opposite of {}?",
        "Name the opposite of {}.",
        "What's the opposite of {}?",
    )
    return Exchange("opposite", rng.choice(templates).format(first), second)


def _counting(rng: random.Random) -> Exchange:
    draw = rng.random()
    if draw < 0.35:
        first = rng.choice((1, 1, 1, rng.randint(0, 9)))
        last = first + rng.randint(2, 9)
        question = rng.choice(
            ("Count from {} to {}.", "Count from {} to {}", "Please count from {} to {}.")
        ).format(first, last)
        return Exchange("counting", question, ", ".join(map(str, range(first, last + 1))))
    if draw < 0.5:
        last = rng.randint(3, 10)
        question = rng.choice(("Count to {}.", "Please count to {}.", "Count up to {}.")).format(last)
        return Exchange("counting", question, ", ".join(map(str, range(1, last + 1))))
    number = rng.randint(1, 40)
    if draw < 0.75:
        templates = ("What comes after {}?", "What number comes after {}?", "Which number follows {}?")
        return Exchange("counting", rng.choice(templates).format(number), str(number + 1))
    templates = ("What comes before {}?", "What number comes before {}?", "Which number comes right before {}?")
    return Exchange("counting", rng.choice(templates).format(number), str(number - 1))


def _language(rng: random.Random) -> Exchange:
    draw = rng.random()
    if draw < 0.7:
        language, color = rng.choice(sorted(_LANGUAGES)), rng.choice(COLORS)
        templates = (
            "What is '{}' in {}?",
            "How do you say {} in {}?",
            "Translate {} to {}.",
            "What is the {1} word for {0}?",
            "What is {} in {}?",
        )
        return Exchange("language", rng.choice(templates).format(color, language), _LANGUAGES[language][color])
    shape = rng.choice(SHAPES)
    if draw < 0.85:
        templates = ("Write the symbol for a {}.", "What is the symbol for a {}?", "Draw a {} as a symbol.")
        return Exchange("language", rng.choice(templates).format(shape), _SIGNS[shape])
    templates = ("What is the emoji for a {}?", "Show me a {} emoji.", "Write a {} emoji.")
    return Exchange("language", rng.choice(templates).format(shape), _EMOJI[shape])


def _self(rng: random.Random) -> Exchange:
    draw = rng.random()
    if draw < 0.4:
        templates = ("Who are you?", "What are you?", "What is your name?", "Hello!", "Hi", "Hello, who are you?")
        return Exchange(
            "self",
            rng.choice(templates),
            "I am Moondream Nano, a tiny model that knows simple shapes, colors and printed text.",
        )
    if draw < 0.6:
        templates = ("What can you do?", "What do you know?", "How can you help me?")
        return Exchange(
            "self",
            rng.choice(templates),
            "I can describe, count, point at, detect and outline simple shapes, and read short text.",
        )
    if draw < 0.8:
        shape = rng.choice(sorted(_SIDES))
        return Exchange(
            "self",
            rng.choice(("How many sides does a {} have?", "How many corners does a {} have?")).format(shape),
            str(_SIDES[shape]),
        )
    templates = (
        "What is the capital of France?",
        "Who wrote Hamlet?",
        "What is the weather like?",
        "Tell me a joke.",
        "What time is it?",
        "Write a poem.",
        "Who is the president?",
        "Explain gravity.",
    )
    return Exchange(
        "self", rng.choice(templates), "I do not know. I only know simple shapes, colors and printed text."
    )


FACTS: dict[str, Callable[[random.Random], Exchange]] = {
    "arithmetic": _sum,
    "opposite": _opposite,
    "counting": _counting,
    "language": _language,
    "self": _self,
}
_WEIGHTS = (6, 2, 2, 2, 1)


def ask_fact(rng: random.Random) -> Exchange:
    """A question of any of these kinds."""
    return FACTS[rng.choices(tuple(FACTS), _WEIGHTS)[0]](rng)
