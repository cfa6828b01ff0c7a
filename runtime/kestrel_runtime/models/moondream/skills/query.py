"""Query: a question and its answer, on request with reasoning before it.

Reasoning is text that `start_ground_points_id` and `end_ground_id` part into passages; coordinate pairs in a
passage are the places in the image that it speaks of. It ends with `answer_id`, after which the answer follows.
Source: the public reference's `_generate_reasoning` and `_generate_answer`.
"""

from __future__ import annotations

from kestrel_runtime.api.engine import SkillDefaults
from kestrel_runtime.api.events import (
    FinishReason,
    Grounding,
    Location,
    QueryOutput,
    Reasoning,
    TextChannel,
    TextDelta,
)
from kestrel_runtime.api.requests import Query
from kestrel_runtime.interfaces.output import OutputParser
from kestrel_runtime.interfaces.token_grammar import Grammar, GrammarState
from kestrel_runtime.interfaces.tokens import Token, TokenRule
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.moondream.config import MoondreamConfig, TokenizerConfig
from kestrel_runtime.models.moondream.skills.base import (
    DEFAULT_MAX_TOKENS,
    Skill,
    TextEmitter,
    spatial_tokens,
    text_tokens,
)
from kestrel_runtime.models.moondream.skills.caption import AnswerParser, answer_states


class QuerySkill(Skill):
    """Answer a question."""

    name = "query"
    text_field = "question"
    defaults = SkillDefaults(temperature=0.2, top_p=0.9, max_tokens=DEFAULT_MAX_TOKENS)

    def prompt(self, request: Query, tokenizer: Tokenizer, config: MoondreamConfig) -> list[Token]:
        template = config.tokenizer.templates["query"]
        thinking = (config.tokenizer.thinking_id,)
        if config.generation == 2:  # trained with the suffix, and then once more or the thinking id
            end = template["suffix"] + (thinking if request.reasoning else template["suffix"])
        else:
            end = thinking if request.reasoning else template["suffix"]
        return (
            text_tokens(template["prefix"])
            + spatial_tokens(request.spatial_refs, config)
            + text_tokens(tokenizer.encode(request.question.strip()))
            + text_tokens(end)
        )

    def new_parser(self, request: Query, tokenizer: Tokenizer, config: MoondreamConfig) -> OutputParser:
        return _QueryParser(request, tokenizer, config)


class _QueryParser(OutputParser):
    """Reads reasoning if there is any, then the answer."""

    def __init__(self, request: Query, tokenizer: Tokenizer, config: MoondreamConfig) -> None:
        max_tokens = request.sampling.max_tokens or DEFAULT_MAX_TOKENS
        self._reasoning = _ReasoningParser(tokenizer, config) if request.reasoning else None
        self._answer = AnswerParser(tokenizer, config, max_tokens)
        self._is_reasoning = request.reasoning
        self.grammar = Grammar(_reasoning_states(config) if request.reasoning else answer_states(config))
        self.budget = max_tokens if request.reasoning else None

    def parse(self, token: Token) -> list[TextDelta]:
        if self._is_reasoning and self._reasoning is not None:
            deltas = self._reasoning.consume(token)
            self._is_reasoning = not self._reasoning.is_over
            return deltas
        deltas = self._answer.consume(token)
        self.finish_reason = self._answer.finish_reason
        return deltas

    def truncate(self) -> list[TextDelta]:
        deltas = self._reasoning.end() if self._is_reasoning and self._reasoning is not None else []
        self.finish_reason = FinishReason.LENGTH
        return deltas + self._answer.truncate()

    def output(self) -> QueryOutput:
        reasoning = None if self._reasoning is None else self._reasoning.output()
        return QueryOutput(self._answer.text, reasoning)


def _reasoning_states(config: MoondreamConfig) -> tuple[GrammarState, ...]:
    """Reasoning until the answer id, which the budget forces, and then the answer."""
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
    """Reads text and grounded points until the answer begins."""

    def __init__(self, tokenizer: Tokenizer, config: MoondreamConfig) -> None:
        self._ids: TokenizerConfig = config.tokenizer
        self._text = TextEmitter(tokenizer, TextChannel.REASONING)
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
        return deltas + self._text.push(token.id)

    def end(self) -> list[TextDelta]:
        """Close the last passage; the answer comes next."""
        self.is_over = True
        return self._end_passage()

    def output(self) -> Reasoning:
        return Reasoning(self._text.text, tuple(self._groundings))

    def _end_passage(self) -> list[TextDelta]:
        deltas = self._text.flush()
        pairs = zip(self._coordinates[::2], self._coordinates[1::2], strict=False)  # a lone last x is dropped
        points = tuple(Location(x, y) for x, y in pairs)
        if points:
            self._groundings.append(Grounding(self._passage_start, self._text.num_chars, points))
        self._passage_start = self._text.num_chars
        self._coordinates.clear()
        return deltas
