"""Implements Query: a question and its answer, with reasoning before the answer if the request asks for it.

Reasoning is text that the tokens `start_ground_points_id` and `end_ground_id` divide into passages. Coordinate
pairs in a passage are the points in the image that the passage refers to. `answer_id` ends the reasoning.
Source: the public reference's `_generate_reasoning` and `_generate_answer`.
"""

from __future__ import annotations

from kestrel_runtime.api.engine import SkillDefaults
from kestrel_runtime.api.events import (
    Grounding,
    Location,
    QueryOutput,
    Reasoning,
    TextChannel,
    TextDelta,
)
from kestrel_runtime.api.requests import Chat, Query
from kestrel_runtime.api.sampling_params import SamplingParams
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.family import Prompt
from kestrel_runtime.models.moondream.config import MoondreamConfig, TokenizerConfig
from kestrel_runtime.models.moondream.skills.base import (
    DEFAULT_MAX_TOKENS,
    AnswerParser,
    Skill,
    TextEmitter,
    answer_states,
    framed_prompt,
)
from kestrel_runtime.output.output_parser import Grammar, GrammarState, OutputParser, Token, TokenRule


class QuerySkill(Skill):
    """Answer a question."""

    name = "query"
    text_field = "question"
    defaults = SkillDefaults(temperature=0.2, top_p=0.9, max_tokens=DEFAULT_MAX_TOKENS)

    def prompt(self, request: Query, tokenizer: Tokenizer, config: MoondreamConfig) -> Prompt:
        template = {**config.tokenizer.templates["query"], "suffix": opener(config, reasoning=request.reasoning)}
        question = tokenizer.encode(request.question.strip())
        return framed_prompt(template, request.spatial_refs, question, config)

    def new_parser(self, request: Query, tokenizer: Tokenizer, config: MoondreamConfig) -> OutputParser:
        return new_answer_parser(request, tokenizer, config)


def opener(config: MoondreamConfig, *, reasoning: bool = False) -> tuple[int, ...]:
    """Returns the ids between a question and its answer, or the reasoning before the answer."""
    suffix = config.tokenizer.templates["query"]["suffix"]
    end = (config.tokenizer.thinking_id,) if reasoning else suffix
    # The training data of Moondream 2 has the suffix before either end.
    return suffix + end if config.generation == 2 else end


def new_answer_parser(request: Query | Chat, tokenizer: Tokenizer, config: MoondreamConfig) -> OutputParser:
    """Returns the parser of an answer, and of the reasoning before it if the request asks for it."""
    kind = _ReasonedAnswerParser if request.reasoning else _QueryParser
    return kind(tokenizer, config, request.sampling)


class _QueryParser(AnswerParser):
    """Parses an answer without reasoning."""

    def output(self) -> QueryOutput:
        return QueryOutput(self.text, None, self.logprobs)


class _ReasonedAnswerParser(AnswerParser):
    """Parses reasoning, then the answer."""

    def __init__(self, tokenizer: Tokenizer, config: MoondreamConfig, sampling: SamplingParams) -> None:
        super().__init__(tokenizer, config, sampling)
        self._reasoning = _ReasoningParser(tokenizer, config, sampling.logprobs)
        self.grammar = Grammar(_reasoning_states(config))
        self.budget = self._max_answer_tokens
        self.max_tokens = self.budget + 1 + self._max_answer_tokens  # and one token that begins the answer
        self.opens_answer = config.tokenizer.answer_id

    def parse(self, token: Token) -> list[TextDelta]:
        return super().parse(token) if self._reasoning.is_over else self._reasoning.consume(token)

    def truncate(self) -> list[TextDelta]:
        deltas = [] if self._reasoning.is_over else self._reasoning.end()
        return deltas + super().truncate()

    def output(self) -> QueryOutput:
        return QueryOutput(self.text, self._reasoning.output(), self.logprobs)


def _reasoning_states(config: MoondreamConfig) -> tuple[GrammarState, ...]:
    """Returns the states of reasoning until `answer_id`, which the end of the budget forces, then of the answer."""
    ids = config.tokenizer
    later, last, answer = 1, 2, 3
    opens_answer = (ids.answer_id, answer)
    suppressed = (ids.eos_id, ids.size_id) if config.generation == 2 else ()
    return (
        GrammarState(TokenRule(is_spatial=True), later, opens_answer, last),
        GrammarState(TokenRule(suppressed=suppressed, is_spatial=True), later, opens_answer, last),
        GrammarState(TokenRule(allowed=(ids.answer_id,)), answer),
        *answer_states(config, answer),
    )


class _ReasoningParser:
    """Parses text and grounded points until the answer begins."""

    def __init__(self, tokenizer: Tokenizer, config: MoondreamConfig, num_logprobs: int | None) -> None:
        self._ids: TokenizerConfig = config.tokenizer
        self._text = TextEmitter(tokenizer, TextChannel.REASONING, num_logprobs=num_logprobs)
        self._coordinates: list[float] = []
        self._passage_start = 0
        self._groundings: list[Grounding] = []
        self.is_over = False

    def consume(self, token: Token) -> list[TextDelta]:
        if token.id == self._ids.answer_id:
            return self.end()
        deltas: list[TextDelta] = []
        if token.id in (self._ids.start_ground_points_id, self._ids.end_ground_id):
            deltas = self._end_passage()
        elif token.id == self._ids.coord_id and token.value:
            self._coordinates.append(token.value[0])
        return deltas + self._text.push(token)

    def end(self) -> list[TextDelta]:
        """Closes the last passage; the answer comes next."""
        self.is_over = True
        return self._end_passage()

    def output(self) -> Reasoning:
        return Reasoning(self._text.text, tuple(self._groundings), self._text.logprobs)

    def _end_passage(self) -> list[TextDelta]:
        deltas = self._text.flush()
        pairs = zip(self._coordinates[::2], self._coordinates[1::2], strict=False)  # an x without a y is dropped
        points = tuple(Location(x, y) for x, y in pairs)
        if points:
            self._groundings.append(Grounding(self._passage_start, self._text.num_chars, points))
        self._passage_start = self._text.num_chars
        self._coordinates.clear()
        return deltas
