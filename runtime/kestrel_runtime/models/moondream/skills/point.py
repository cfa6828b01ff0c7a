"""Implements Point: the centre of each object of a kind. Detect uses the same prompt and the same parser of lists.

Before each object the model chooses between another object and the end; the tokens within an object are forced.
Source: the public reference's `_generate_points`.
"""

from __future__ import annotations

import math
from abc import abstractmethod

from kestrel_runtime.api.engine import SkillDefaults
from kestrel_runtime.api.events import Box, FinishReason, FoundObject, Location, PointOutput
from kestrel_runtime.api.requests import Detect, Point
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.family import Prompt
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.skills.base import DEFAULT_MAX_OBJECTS, Skill, framed_prompt
from kestrel_runtime.output.output_parser import Grammar, GrammarState, OutputParser, Token, TokenRule

_SCORE_DIGITS = 4
"""Further digits would differ between batches in float32, where answers are equal otherwise."""


class PointSkill(Skill):
    """Find the places of objects."""

    name = "point"
    text_field = "object"
    defaults = SkillDefaults(temperature=0.0, top_p=1.0, max_objects=DEFAULT_MAX_OBJECTS)

    def prompt(self, request: Point, tokenizer: Tokenizer, config: MoondreamConfig) -> Prompt:
        return object_prompt(self.name, request, tokenizer, config)

    def new_parser(self, request: Point, tokenizer: Tokenizer, config: MoondreamConfig) -> OutputParser:
        return PointParser(config, request.max_objects, request.sampling.max_tokens, request.min_score)


def object_prompt(skill: str, request: Point | Detect, tokenizer: Tokenizer, config: MoondreamConfig) -> Prompt:
    """Returns the prompt for an object's name, which follows one space."""
    text = tokenizer.encode(" " + request.object.strip())
    return framed_prompt(config.tokenizer.templates[skill], request.spatial_refs, text, config)


class ObjectParser(OutputParser):
    """Parses objects of a fixed number of values until the end token, `max_objects` or `max_tokens`.

    The score of an object is the product of those of its tokens. Objects below `min_score` are left out, and count
    towards `max_objects`, which limits what the model generates.
    """

    def __init__(
        self,
        config: MoondreamConfig,
        value_ids: tuple[int, ...],
        max_objects: int | None,
        max_tokens: int | None,
        min_score: float | None = None,
    ) -> None:
        ids = config.tokenizer
        self._eos_id = ids.eos_id
        self._max_objects = max_objects or DEFAULT_MAX_OBJECTS
        max_values = self._max_objects * len(value_ids)
        self.max_tokens = max_values if max_tokens is None else min(max_values, max_tokens)
        self._num_tokens = 0
        self._num_objects = 0
        # In a message it has 32 bits, and may then be above the score that a caller has read from another answer.
        self._min_score = None if min_score is None else round(min_score, _SCORE_DIGITS + 2)
        self._object: list[Token] = []
        self.scores: list[float] = []
        """The scores of the objects so far; empty if tokens have none."""
        self._values_per_object = len(value_ids)
        choices = [(value_ids[0], ids.eos_id), *((value,) for value in value_ids[1:])]
        self.grammar = Grammar(
            tuple(
                GrammarState(TokenRule(allowed=allowed, is_spatial=True), (place + 1) % len(choices))
                for place, allowed in enumerate(choices)
            )
        )

    @abstractmethod
    def add(self, values: list[tuple[float, ...]]) -> Location | Box:
        """Adds one complete object to the answer; returns its place."""

    def parse(self, token: Token) -> list[FoundObject]:
        if token.id == self._eos_id:
            self.finish_reason = FinishReason.STOP
            return []
        found: list[FoundObject] = []
        self._num_tokens += 1
        self._object.append(token)
        if len(self._object) == self._values_per_object:
            found = self._complete()
            self._num_objects += 1
            self._object = []
        if self._num_objects == self._max_objects:
            self.finish_reason = FinishReason.MAX_OBJECTS
        elif self._num_tokens == self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        return found

    def _complete(self) -> list[FoundObject]:
        score = _score(self._object)
        if score is not None:
            if self._min_score is not None and score < self._min_score:
                return []
            self.scores.append(score)
        return [FoundObject(self.add([token.value for token in self._object]), score)]


def _score(tokens: list[Token]) -> float | None:
    """Returns the product of the scores of tokens, rounded; None if one has none."""
    scores = [token.score for token in tokens if token.score is not None]
    return round(math.prod(scores), _SCORE_DIGITS) if len(scores) == len(tokens) else None


class PointParser(ObjectParser):
    """x and y per object."""

    def __init__(
        self,
        config: MoondreamConfig,
        max_objects: int | None,
        max_tokens: int | None,
        min_score: float | None = None,
    ) -> None:
        super().__init__(config, (config.tokenizer.coord_id,) * 2, max_objects, max_tokens, min_score)
        self._points: list[Location] = []

    def add(self, values: list[tuple[float, ...]]) -> Location:
        (x,), (y,) = values
        self._points.append(Location(x, y))
        return self._points[-1]

    def output(self) -> PointOutput:
        return PointOutput(tuple(self._points), tuple(self.scores))
