"""Caption: a description of an image, and the reading of plain answers that query shares."""

from __future__ import annotations

from collections.abc import Iterator

from kestrel_runtime.errors import InvalidRequest, Violation
from kestrel_runtime.events import CaptionOutput, FinishReason, TextChannel, TextDelta
from kestrel_runtime.grammar import Grammar, GrammarState
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.requests import Caption
from kestrel_runtime.skills.base import (
    DEFAULT_MAX_TOKENS,
    Reader,
    SamplingDefaults,
    Skill,
    TextReader,
    text_tokens,
)
from kestrel_runtime.tokenizer import Tokenizer
from kestrel_runtime.tokens import Token, TokenRule


class CaptionSkill(Skill):
    """Describe an image in one of three lengths."""

    name = "caption"
    text_field = "length"
    defaults = SamplingDefaults(temperature=0.2, top_p=0.9)

    def prompt(self, request: Caption, tokenizer: Tokenizer, config: MoondreamConfig) -> list[Token]:
        templates = config.tokenizer.templates["caption"]
        if request.length not in templates:
            raise InvalidRequest((Violation("length", f"this model's captions are {', '.join(templates)}"),))
        return text_tokens(templates[request.length])

    def reader(self, request: Caption, tokenizer: Tokenizer, config: MoondreamConfig) -> Reader:
        return _CaptionReader(tokenizer, config, request.sampling.max_tokens or DEFAULT_MAX_TOKENS)


def answer_states(config: MoondreamConfig, start: int = 0) -> tuple[GrammarState, ...]:
    """Text to the end, as states from `start` on."""
    # Moondream 2 must not open a second answer, but its very first token is free.
    suppressed = (config.tokenizer.answer_id,) if config.generation == 2 else ()
    later = start + 1
    return (GrammarState(TokenRule(), later), GrammarState(TokenRule(suppressed=suppressed), later))


class AnswerReader:
    """Reads text until the end token or `max_tokens`."""

    def __init__(self, tokenizer: Tokenizer, config: MoondreamConfig, max_tokens: int) -> None:
        self._text = TextReader(tokenizer, TextChannel.ANSWER)
        self._eos_id = config.tokenizer.eos_id
        self._max_tokens = max_tokens
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        return self._text.text

    def read(self, token: Token) -> Iterator[TextDelta]:
        """Take the next token."""
        if token.id == self._eos_id:
            yield from self._text.flush()
            self.finish_reason = FinishReason.STOP
            return
        yield from self._text.push(token.id)
        if self._text.num_tokens >= self._max_tokens:
            yield from self.cut()

    def cut(self) -> Iterator[TextDelta]:
        """End here."""
        yield from self._text.flush()
        self.finish_reason = FinishReason.LENGTH


class _CaptionReader(Reader):
    """An answer reader whose text is the caption."""

    def __init__(self, tokenizer: Tokenizer, config: MoondreamConfig, max_tokens: int) -> None:
        self.grammar = Grammar(answer_states(config))
        self._answer = AnswerReader(tokenizer, config, max_tokens)

    def take(self, token: Token) -> Iterator[TextDelta]:
        yield from self._answer.read(token)
        self.finish_reason = self._answer.finish_reason

    def cut(self) -> Iterator[TextDelta]:
        yield from self._answer.cut()
        self.finish_reason = self._answer.finish_reason

    def output(self) -> CaptionOutput:
        return CaptionOutput(self._answer.text)
