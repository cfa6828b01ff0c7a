"""Adds to questions what callers add: messages of the system, and wishes about the form of the answer."""

import random

from training.exchange import Exchange

SHORT_KINDS = ("count", "color", "shape", "relation", "size", "reading", "presence", "place", "background")
"""Kinds of questions whose answer is a word, a number or a short phrase."""

_EVALUATION = "Answer with a single word, number or short phrase."
_SHORT = (
    _EVALUATION,
    _EVALUATION,
    _EVALUATION,
    "Answer the question using a single word or phrase.",
    "Answer with a single word or phrase.",
    "Answer with one word.",
    "Answer in one word.",
    "Answer briefly.",
    "Be brief.",
    "Give a short answer.",
    "Short answer, please.",
    "Answer with the word only.",
    "Answer concisely.",
    "Only give the answer.",
    "Reply with the answer alone.",
)
_OF_KIND = {
    "presence": ("Answer yes or no.", "Answer with yes or no.", "Yes or no?", "Answer only Yes or No."),
    "count": ("Answer with a number.", "Answer with a number only.", "Give only the number.", "Answer in digits."),
    "color": ("Name only the color.", "Answer with the color only.", "Answer with the name of the color."),
    "shape": ("Name only the shape.", "Answer with the name of the shape."),
    "reading": ("Give only the text.", "Answer with the text only.", "Answer with the text as it is printed."),
}
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful AI assistant.",
    "You are an assistant that answers questions about images.",
    "You are a vision model.",
    "You are an expert in looking at pictures.",
    "You look at pictures and answer questions about them.",
    "Answer questions about the picture.",
    "Answer the question of the user.",
    "Be brief.",
    "Be brief.",
    "Be concise.",
    "Be polite.",
    "Be precise and honest.",
    "Answer in one word where you can.",
    "Use as few words as possible.",
    "Keep your answers short.",
    "You are a careful observer. Say only what you see.",
    "You help people who cannot see. Answer truthfully.",
    "Do not guess.",
    "You answer in English.",
    "You are a robot that sorts shapes.",
    "Respond to the user as well as you can.",
    "Today is Monday.",
    "You are ShapeBot, made by a small company.",
    "The user is a child. Use simple words.",
    "Never answer with more than one sentence.",
)
HELD_OUT_SYSTEM = (
    "You are a friendly helper for students.",
    "Give truthful answers about what the image contains.",
    "You are an image analysis service. Reply with the result only.",
    "Please keep it short and simple.",
    "You are Kestrel, a model that sees.",
)
"""Messages of the system that no training example has."""


def instructed(exchange: Exchange, rng: random.Random) -> str:
    """Returns the question of a short answer with a wish about its form."""
    wishes = _OF_KIND.get(exchange.kind, ()) if rng.random() < 0.3 else _SHORT
    wish = rng.choice(wishes or _SHORT)
    if exchange.answer.count(" ") > 2:  # a sentence is no word, so nothing asks for one
        wish = _EVALUATION
    draw = rng.random()
    if draw < 0.5:
        return f"{exchange.question}\n{wish}"
    return f"{exchange.question} {wish}" if draw < 0.9 else f"{wish}\n{exchange.question}"


def system_message(rng: random.Random) -> str:
    """Returns one of the messages that are trained on, now and then two of them."""
    if rng.random() < 0.12:
        return " ".join(rng.sample(_SYSTEM, 2))
    return rng.choice(_SYSTEM)
