"""What Moondream's skills share: prompt tokens and the text of answers. Knows tokens and text, no tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from kestrel_runtime.api.engine import SkillDefaults
from kestrel_runtime.api.events import TextChannel, TextDelta
from kestrel_runtime.api.requests import BoxRef, SpatialRef
from kestrel_runtime.interfaces.output import OutputParser
from kestrel_runtime.interfaces.tokens import Token
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.moondream.config import MoondreamConfig

DEFAULT_MAX_TOKENS = 768
DEFAULT_MAX_OBJECTS = 150


class Skill(ABC):
    """A task of the model. Stateless: one instance serves all requests."""

    name: str
    text_field: str
    """The request's field that holds free text, named where the prompt is too long."""
    defaults: SkillDefaults

    @abstractmethod
    def prompt(self, request: Any, tokenizer: Tokenizer, config: MoondreamConfig) -> list[Token]:
        """The prompt's tokens after BOS and image."""

    @abstractmethod
    def new_parser(self, request: Any, tokenizer: Tokenizer, config: MoondreamConfig) -> OutputParser:
        """The output parser of one sequence."""


class TextEmitter:
    """Turns text tokens into deltas on one channel; what it returns adds up to `text`."""

    def __init__(self, tokenizer: Tokenizer, channel: TextChannel) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.text_decoder()
        self._channel = channel
        self._parts: list[str] = []
        self._num_emitted = 0
        self.num_chars = 0
        self.num_tokens = 0

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def push(self, token_id: int) -> list[TextDelta]:
        """Take a token; returns a delta if characters are complete."""
        self.num_tokens += 1
        return self._emit(self._decoder.push(token_id))

    def flush(self) -> list[TextDelta]:
        """End a run of text: broken bytes become U+FFFD, and nothing later joins them."""
        text = self._decoder.flush()
        self._decoder = self._tokenizer.text_decoder()
        return self._emit(text)

    def _emit(self, text: str) -> list[TextDelta]:
        if not text:
            return []
        self._parts.append(text)
        self.num_chars += len(text)
        start, self._num_emitted = self._num_emitted, self.num_tokens
        return [TextDelta(text, self._channel, start, self.num_tokens - start)]


def spatial_tokens(refs: tuple[SpatialRef, ...], config: MoondreamConfig) -> list[Token]:
    """References as prompt tokens: a point is two coordinates, a box its centre's two and a size."""
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
    """Plain ids as prompt tokens."""
    return [Token(token_id) for token_id in ids]
