"""The configuration and the skills of a model family, for generic code: the part that needs no torch."""

from __future__ import annotations

from typing import Any, Protocol

from kestrel_runtime.api.engine import SkillDefaults
from kestrel_runtime.scheduling.output_parser import OutputParser, Token


class ModelConfig(Protocol):
    """Everything about one model that is not a weight."""

    @property
    def architecture(self) -> str:
        """The family and its generation, as clients are told."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int:
        """The most positions of a sequence."""
        ...

    @property
    def bos_id(self) -> int:
        """The token that begins every prompt."""
        ...

    @property
    def positions_per_image(self) -> int:
        """The positions of an image, which follow the first token."""
        ...


class Skill(Protocol):
    """One task of the model: its prompt, its output parser, its limits and defaults. Stateless; any thread.

    `request`: the skill's type in `api.requests`; `tokenizer`: a `loading.tokenizer.Tokenizer`; `config`: the
    family's own configuration.
    """

    @property
    def name(self) -> str: ...

    @property
    def text_field(self) -> str:
        """The request's field with free text, which is named where the prompt is too long."""
        ...

    @property
    def defaults(self) -> SkillDefaults: ...

    def prompt(self, request: Any, tokenizer: Any, config: Any) -> list[Token]:
        """The tokens of the prompt that follow the first token and the image. Raises `InvalidRequest`."""
        ...

    def new_parser(self, request: Any, tokenizer: Any, config: Any) -> OutputParser:
        """The output parser of one sequence."""
        ...
