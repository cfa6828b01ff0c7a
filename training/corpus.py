"""Sentences of the world, for the tokenizer to learn its merges from."""

import random
from collections.abc import Iterator

from training.captions import long_caption, normal_caption, short_caption
from training.examples import object_phrase
from training.facts import ask_fact
from training.phrases import absent, present
from training.questions import KINDS, ask
from training.scenes import make_scene

_NUM_SCENES = 2000


def corpus() -> Iterator[str]:
    """Everything that is said about the first scenes."""
    rng = random.Random(0)
    for seed in range(_NUM_SCENES):
        scene = make_scene(seed)
        yield from (short_caption(scene), normal_caption(scene), long_caption(scene))
        for kind in KINDS:
            exchange = ask(scene, kind, rng)
            if exchange is not None:
                yield from (exchange.question, exchange.answer)
        for referent in (present(scene, rng), absent(scene, rng)):
            if referent is not None:
                yield from (object_phrase(referent, rng), " " + object_phrase(referent, rng))
        fact = ask_fact(rng)
        yield from (fact.question, fact.answer)
    yield from ("I see no", "I look at the whole image.", "I need no image for this.")
