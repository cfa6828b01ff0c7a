"""Caption: a description of an image, and the reading of plain answers that query shares."""

from __future__ import annotations

from kestrel_runtime.api.engine import SkillDefaults
from kestrel_runtime.api.errors import InvalidRequest, Violation
from kestrel_runtime.api.events import CaptionOutput, FinishReason, TextChannel, TextDelta
from kestrel_runtime.api.requests import Caption
from kestrel_runtime.interfaces.output import OutputParser
from kestrel_runtime.interfaces.token_grammar import Grammar, GrammarState
from kestrel_runtime.interfaces.tokens import Token, TokenRule
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.skills.base import (
    DEFAULT_MAX_TOKENS,
    Skill,
    TextEmitter,
    text_tokens,
)


class CaptionSkill(Skill):
    """Describe an image in one of three lengths."""

    name = "caption"
    text_field = "length"
    defaults = SkillDefaults(temperature=0.2, top_p=0.9, max_tokens=DEFAULT_MAX_TOKENS)

    def prompt(self, request: Caption, tokenizer: Tokenizer, config: MoondreamConfig) -> list[Token]:
        templates = config.tokenizer.templates["caption"]
        if request.length not in templates:
            raise InvalidRequest((Violation("length", f"this model's captions are {', '.join(templates)}"),))
        return text_tokens(templates[request.length])

    def new_parser(self, request: Caption, tokenizer: Tokenizer, config: MoondreamConfig) -> OutputParser:
        return _CaptionParser(tokenizer, config, request.sampling.max_tokens or DEFAULT_MAX_TOKENS)


def answer_states(config: MoondreamConfig, start: int = 0) -> tuple[GrammarState, ...]:
    """Text to the end, as states from `start` on."""
    # Moondream 2 must not open a second answer, but its very first token is free.
    suppressed = (config.tokenizer.answer_id,) if config.generation == 2 else ()
    later = start + 1
    return (GrammarState(TokenRule(), later), GrammarState(TokenRule(suppressed=suppressed), later))


class AnswerParser:
    """Reads text until the end token or `max_tokens`."""

    def __init__(self, tokenizer: Tokenizer, config: MoondreamConfig, max_tokens: int) -> None:
        self._text = TextEmitter(tokenizer, TextChannel.ANSWER)
        self._eos_id = config.tokenizer.eos_id
        self._max_tokens = max_tokens
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        return self._text.text

    def consume(self, token: Token) -> list[TextDelta]:
        """Take the next token."""
        if token.id == self._eos_id:
            self.finish_reason = FinishReason.STOP
            return self._text.flush()
        deltas = self._text.push(token.id)
        return deltas + self.truncate() if self._text.num_tokens >= self._max_tokens else deltas

    def truncate(self) -> list[TextDelta]:
        """End here."""
        self.finish_reason = FinishReason.LENGTH
        return self._text.flush()


class _CaptionParser(OutputParser):
    """An answer parser whose text is the caption."""

    def __init__(self, tokenizer: Tokenizer, config: MoondreamConfig, max_tokens: int) -> None:
        self.grammar = Grammar(answer_states(config))
        self._answer = AnswerParser(tokenizer, config, max_tokens)

    def parse(self, token: Token) -> list[TextDelta]:
        deltas = self._answer.consume(token)
        self.finish_reason = self._answer.finish_reason
        return deltas

    def truncate(self) -> list[TextDelta]:
        deltas = self._answer.truncate()
        self.finish_reason = self._answer.finish_reason
        return deltas

    def output(self) -> CaptionOutput:
        return CaptionOutput(self._answer.text)
