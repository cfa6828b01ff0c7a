"""Provides what the skills share: prompt tokens and parsers of text. No tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import Any

from kestrel_runtime.api.engine import SkillDefaults
from kestrel_runtime.api.events import FinishReason, TextChannel, TextDelta, TokenLogprob, TopLogprob
from kestrel_runtime.api.requests import BoxRef, SpatialRef
from kestrel_runtime.api.sampling_params import SamplingParams
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.family import Prompt
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.output.output_parser import Grammar, GrammarState, OutputParser, Token, TokenRule
from kestrel_runtime.output.stop_strings import StopMatcher
from kestrel_runtime.output.text_decoder import TextDecoder

DEFAULT_MAX_TOKENS = 768
DEFAULT_MAX_OBJECTS = 150


class Skill(ABC):
    """A task of the model. Stateless: one instance serves all requests."""

    name: str
    template: str | None = ""
    """The prompt template that the model must have; empty for the one with the skill's name, None for none."""
    text_field: str
    """The request's field with free text, which the error names if the prompt is too long."""
    defaults: SkillDefaults

    @abstractmethod
    def prompt(self, request: Any, tokenizer: Tokenizer, config: MoondreamConfig) -> Prompt:
        """Returns the prompt behind BOS."""

    def message_tokens(self, request: Any, tokenizer: Tokenizer, config: MoondreamConfig) -> list[int]:
        """Returns nothing: the prompt has no messages."""
        return []

    @abstractmethod
    def new_parser(self, request: Any, tokenizer: Tokenizer, config: MoondreamConfig) -> OutputParser:
        """Returns the output parser of one sequence."""


class TextEmitter:
    """Turns text tokens into deltas on one channel. Joined, the deltas equal `text`."""

    num_chars = 0
    num_tokens = 0
    _num_emitted = 0
    _num_decoded = 0

    def __init__(
        self,
        tokenizer: Tokenizer,
        channel: TextChannel,
        stop: StopMatcher | None = None,
        num_logprobs: int | None = None,
    ) -> None:
        """Takes `stop`, which ends the text: text that may begin a stop string is held back until more tokens
        decide it.

        With `num_logprobs` each delta has the logprobs of its tokens, and of this many of the most likely tokens.
        """
        self._tokenizer, self._channel = tokenizer, channel
        self._stop, self._num_logprobs = stop, num_logprobs
        self._decoder = TextDecoder(tokenizer.token_bytes)
        self._parts: list[str] = []
        self._is_counting = stop is not None or num_logprobs is not None
        if self._is_counting:
            self._logprobs: list[TokenLogprob] = []
            # Tokens that are not emitted yet, each with its start in the text, if token numbers do not give it.
            self._pending: deque[tuple[int, Token]] = deque()

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def stop_sequence(self) -> str | None:
        """Returns the stop string that has ended the text, if one has."""
        return None if self._stop is None else self._stop.matched

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Returns the logprobs of all deltas; None if the request asks for none."""
        return None if self._num_logprobs is None else tuple(self._logprobs)

    def push(self, token: Token) -> list[TextDelta]:
        """Adds a token; returns a delta if it completes characters."""
        self.num_tokens += 1
        text = self._decoder.push(token.id)
        if self._is_counting:
            self._pending.append((self._num_decoded, token))
            self._num_decoded += len(text)
            if self._stop is not None:
                text = self._stop.push(text)
        return self._emit(text) if text else []

    def flush(self) -> list[TextDelta]:
        """Ends a run of text: the bytes of an incomplete character become U+FFFD."""
        text = self._decoder.flush()
        self._num_decoded += len(text)
        if self._stop is not None:
            text = self._stop.push(text) + self._stop.flush()
        return self._emit(text) if text else []

    def _emit(self, text: str) -> list[TextDelta]:
        self._parts.append(text)
        self.num_chars += len(text)
        start = self._num_emitted
        if not self._is_counting:
            self._num_emitted = end = self.num_tokens
            return [TextDelta(text, self._channel, start, end - start)]
        logprobs: list[TokenLogprob] = []
        while self._pending and self._pending[0][0] < self.num_chars:
            _, token = self._pending.popleft()
            self._num_emitted += 1
            if self._num_logprobs is not None:
                logprobs.append(self._logprob(token, self._num_logprobs))
        self._logprobs += logprobs
        return [TextDelta(text, self._channel, start, self._num_emitted - start, tuple(logprobs))]

    def _logprob(self, token: Token, num_top: int) -> TokenLogprob:
        assert token.logprob is not None, "steps of this sequence sample with logprobs"
        top = tuple(TopLogprob(*self._spelled(token_id), logprob) for token_id, logprob in token.top[:num_top])
        return TokenLogprob(*self._spelled(token.id), token.logprob, top)

    def _spelled(self, token_id: int) -> tuple[int, str, bytes]:
        spelling = self._tokenizer.token_bytes(token_id)
        return token_id, spelling.decode(errors="replace"), spelling


class AnswerParser(OutputParser):
    """Parses plain text until the end token, a stop string or `max_tokens`.

    A skill defines the `output` that holds the text.
    """

    def __init__(self, tokenizer: Tokenizer, config: MoondreamConfig, sampling: SamplingParams) -> None:
        self.grammar = _answer_grammar(_suppressed_later(config))
        stop = StopMatcher(sampling.stop, includes_match=sampling.include_stop) if sampling.stop else None
        self._stop, self._emitter = stop, TextEmitter(tokenizer, TextChannel.ANSWER, stop, sampling.logprobs)
        self.end_id = config.tokenizer.eos_id
        self._max_answer_tokens = self.max_tokens = sampling.max_tokens or DEFAULT_MAX_TOKENS

    @property
    def text(self) -> str:
        return self._emitter.text

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Returns the logprobs of the tokens of the text."""
        return self._emitter.logprobs

    def parse(self, token: Token) -> list[TextDelta]:
        if token.id == self.end_id:
            return self._end(FinishReason.STOP)
        emitter, stop = self._emitter, self._stop
        deltas = emitter.push(token)
        if emitter.num_tokens >= self._max_answer_tokens or (stop is not None and stop.matched is not None):
            deltas += self.truncate()
        return deltas

    def truncate(self) -> list[TextDelta]:
        return self._end(FinishReason.LENGTH)

    def _end(self, reason: FinishReason) -> list[TextDelta]:
        deltas = self._emitter.flush()
        # The replacement of an incomplete character may complete a stop string.
        self.stop_sequence = self._emitter.stop_sequence
        self.finish_reason = reason if self.stop_sequence is None else FinishReason.STOP_SEQUENCE
        return deltas


def answer_states(config: MoondreamConfig, start: int = 0) -> tuple[GrammarState, ...]:
    """Returns the grammar states of text until the end token; `start` is the index of the first one."""
    return _text_states(_suppressed_later(config), start)


def _suppressed_later(config: MoondreamConfig) -> tuple[int, ...]:
    """Returns the tokens that may only begin a text: Moondream 2 must not begin a second answer."""
    return (config.tokenizer.answer_id,) if config.generation == 2 else ()


def _text_states(suppressed: tuple[int, ...], start: int) -> tuple[GrammarState, ...]:
    later = start + 1
    return (GrammarState(TokenRule(), later), GrammarState(TokenRule(suppressed=suppressed), later))


@cache
def _answer_grammar(suppressed: tuple[int, ...]) -> Grammar:
    """Returns the grammar of an answer without reasoning, the same for all requests of a model."""
    return Grammar(_text_states(suppressed, 0))


def framed_prompt(
    template: Mapping[str, tuple[int, ...]], refs: tuple[SpatialRef, ...], text: list[int], config: MoondreamConfig
) -> Prompt:
    """Returns the template's prefix, references, the ids of a text, and the template's suffix."""
    prefix, suffix = text_tokens(template["prefix"]), text_tokens(template["suffix"])
    return Prompt(prefix + spatial_tokens(refs, config) + text_tokens(text) + suffix)


def spatial_tokens(refs: tuple[SpatialRef, ...], config: MoondreamConfig) -> list[Token]:
    """Returns references as prompt tokens: the two coordinates of a point, or of a box's centre before its size."""
    coord_id, size_id = config.tokenizer.coord_id, config.tokenizer.size_id
    tokens: list[Token] = []
    for ref in refs:
        if isinstance(ref, BoxRef):
            centre = ((ref.x_min + ref.x_max) / 2, (ref.y_min + ref.y_max) / 2)
            size = (ref.x_max - ref.x_min, ref.y_max - ref.y_min)
        else:
            centre, size = (ref.x, ref.y), None
        tokens += [Token(coord_id, (value,)) for value in centre]
        if size is not None:
            tokens.append(Token(size_id, size))
    return tokens


def text_tokens(ids: list[int] | tuple[int, ...]) -> list[Token]:
    """Returns plain ids as prompt tokens."""
    return [Token(token_id) for token_id in ids]
