"""What Moondream Nano is taught: a request as the engine would get it, and the tokens to answer with.

Prompts come from the runtime's own skills, so training and serving cannot differ.
"""

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kestrel_runtime.api.requests import Caption, Detect, Point, PointRef, Query, Request, Segment
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.family import Prompt
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.skills import SKILLS
from kestrel_runtime.output.output_parser import Token
from training.captions import long_caption, normal_caption, short_caption
from training.exchange import Exchange
from training.facts import ask_fact
from training.phrases import Referent, absent, present, unique
from training.questions import ask
from training.scenes import Scene, Thing
from training.words import with_article

IMAGE = b"-"  # stands for the picture, which reaches the model by another way
_SKILL_WEIGHTS = {"query": 56, "caption": 8, "point": 11, "detect": 13, "segment": 12}
_KIND_WEIGHTS = {
    "count": 10, "color": 7, "shape": 7, "relation": 11, "size": 7, "reading": 14, "presence": 10,
    "contents": 6, "place": 6, "background": 2, "pointed": 4,
}  # fmt: skip
POLISHING_SKILL_WEIGHTS = {"query": 56, "caption": 16, "point": 8, "detect": 9, "segment": 11}
POLISHING_KIND_WEIGHTS = _KIND_WEIGHTS | {"reading": 20, "contents": 16, "relation": 15}
_FACT_SHARE = 0.07
_REASONING_SHARE = 0.12


@dataclass(frozen=True, slots=True)
class Example:
    """A request and its answer in tokens, without the closing one. `kind` is the skill or the kind of question."""

    request: Request
    answer: tuple[Token, ...]
    kind: str
    num_given: int = 0
    """The number of the answer's first tokens that a constraint gives, and that are not learnt."""
    learnt_turns: tuple[bool, ...] = ()
    """Says of each earlier answer of a conversation whether it is learnt too."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """Makes examples in the vocabulary of one model."""

    tokenizer: Tokenizer
    config: MoondreamConfig
    polishing: bool = False

    def examples(self, scene: Scene, rng: random.Random) -> Iterator[Example]:
        """Examples about a scene, without end."""
        shares, _ = self.shares()
        skills, weights = tuple(shares), tuple(shares.values())
        while True:
            skill = rng.choices(skills, weights)[0]
            example = getattr(self, f"_{skill}")(scene, rng)
            if example is not None:
                yield example

    def shares(self) -> tuple[dict[str, int], dict[str, int]]:
        """Returns how often each skill and each kind of question is asked for."""
        if self.polishing:
            return POLISHING_SKILL_WEIGHTS, POLISHING_KIND_WEIGHTS
        return _SKILL_WEIGHTS, _KIND_WEIGHTS

    def prompt(self, request: Request) -> Prompt:
        """Returns the prompt behind BOS, as the runtime makes it."""
        return SKILLS[request.skill].prompt(request, self.tokenizer, self.config)

    def _query(self, scene: Scene, rng: random.Random) -> Example | None:
        if rng.random() < _FACT_SHARE:
            exchange: Exchange | None = ask_fact(rng)
            image = None if rng.random() < 0.8 else IMAGE
        else:
            _, shares = self.shares()
            kind = rng.choices(tuple(shares), tuple(shares.values()))[0]
            exchange, image = ask(scene, kind, rng), IMAGE
        if exchange is None:
            return None
        reasoning = rng.random() < _REASONING_SHARE
        return self.query_example(exchange, image, reasoning=reasoning)

    def query_example(self, exchange: Exchange, image: bytes | None, *, reasoning: bool) -> Example:
        """A question with its answer, on request after a trace of where one looks."""
        refs = tuple(PointRef(*point) for point in exchange.points)
        request = Query(exchange.question, image, reasoning=reasoning, spatial_refs=refs)
        answer = self._text(exchange.answer)
        if reasoning:
            answer = [*self._trace(exchange, image), Token(self.config.tokenizer.answer_id), *answer]
        return Example(request, tuple(answer), "reasoning" if reasoning else exchange.kind)

    def _trace(self, exchange: Exchange, image: bytes | None) -> list[Token]:
        if image is None:
            return self._text("I need no image for this.")
        if not exchange.evidence:
            return self._text("I look at the whole image.")
        ids = self.config.tokenizer
        tokens: list[Token] = []
        for index, (label, things) in enumerate(exchange.evidence):
            tokens += self._text("I see " if index == 0 else " and ")
            if not things:
                tokens += self._text(f"no {label}")
                continue
            tokens += [Token(ids.start_ground_points_id), *self._text(label)]
            for thing in _in_order(things):
                tokens += self._coordinates(thing.mark)
            tokens.append(Token(ids.end_ground_id))
        return [*tokens, *self._text(".")]

    def _caption(self, scene: Scene, rng: random.Random) -> Example:
        length = rng.choice(("short", "normal", "normal", "long"))
        if length == "long" and scene.shapes and not scene.shapes[0].size:
            length = "normal"
        write = {"short": short_caption, "normal": normal_caption, "long": long_caption}[length]
        return Example(Caption(IMAGE, length), tuple(self._text(write(scene))), f"caption {length}")

    def _point(self, scene: Scene, rng: random.Random) -> Example:
        phrase, things, refs = _asked_for(scene, rng)
        answer = [token for thing in _in_order(things) for token in self._coordinates(thing.mark)]
        return Example(Point(phrase, IMAGE, spatial_refs=refs), tuple(answer), _kind("point", things))

    def _detect(self, scene: Scene, rng: random.Random) -> Example:
        phrase, things, refs = _asked_for(scene, rng)
        answer = [token for thing in _in_order(things) for token in self._box(thing)]
        return Example(Detect(phrase, IMAGE, spatial_refs=refs), tuple(answer), _kind("detect", things))

    def _segment(self, scene: Scene, rng: random.Random) -> Example | None:
        phrase, things, refs = _asked_for(scene, rng, segment=True)
        if len(things) != 1 and things and rng.random() < 0.8:
            return None
        answer: list[Token] = []
        if things:
            thing = _in_order(things)[0]
            if thing.is_hollow:
                return None
            answer = [*self._box(thing), *(Token(self._word_id(word)) for word in thing.path)]
        return Example(Segment(phrase, IMAGE, spatial_refs=refs), tuple(answer), _kind("segment", things))

    def _text(self, text: str) -> list[Token]:
        return [Token(id) for id in self.tokenizer.encode(text)]

    def _coordinates(self, point: tuple[float, float]) -> list[Token]:
        return [Token(self.config.tokenizer.coord_id, (value,)) for value in point]

    def _box(self, thing: Thing) -> list[Token]:
        left, top, right, bottom = thing.box
        size = Token(self.config.tokenizer.size_id, (right - left, bottom - top))
        return [*self._coordinates(thing.center), size]

    def _word_id(self, word: str) -> int:
        return word_ids(self.tokenizer)[word]


@functools.lru_cache(maxsize=4)
def word_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The single token that spells each word of a path."""
    ids = {tokenizer.decode([id]): id for id in range(16, tokenizer.vocab_size)}
    return {word: id for word, id in ids.items() if word.isdecimal() or word in "MLCZ"}


def _kind(skill: str, things: Sequence[Thing]) -> str:
    return skill if things else f"{skill} absent"


def _in_order(things: Sequence[Thing]) -> list[Thing]:
    return sorted(things, key=lambda thing: thing.center)


def _asked_for(
    scene: Scene, rng: random.Random, *, segment: bool = False
) -> tuple[str, tuple[Thing, ...], tuple[PointRef, ...]]:
    """What a caller asks to find, what that is, and the places that the caller points at."""
    if scene.things and rng.random() < (0.25 if segment else 0.04):
        thing = rng.choice(scene.things)
        phrase = rng.choice(
            (thing.name, f"{thing.color} {thing.name}", "object", "shape" if not thing.is_text else "text")
        )
        return phrase, (thing,), (PointRef(*thing.mark),)
    if segment and scene.things and rng.random() < 0.5:
        thing = rng.choice(scene.things)
        name = unique(scene, thing, rng)
        if name is not None:
            return rng.choice((name, name, f"the {name}", f"a {name}")), (thing,), ()
    referent = present(scene, rng) if rng.random() < (0.85 if segment else 0.78) else None
    referent = referent or absent(scene, rng)
    return object_phrase(referent, rng), referent.things, ()


def object_phrase(referent: Referent, rng: random.Random) -> str:
    """One of the ways to ask for all that a referent means."""
    one, many = referent.singular, referent.plural
    options = [one, one, f"the {one}"] if referent.count < 2 or one == many else [one, one]
    if one != many:
        options += [many, many, f"the {many}", f"all {many}", f"all the {many}", f"every {one}", with_article(one)]
    phrase = rng.choice(options)
    return phrase if rng.random() < 0.95 else phrase[0].upper() + phrase[1:]
