"""Makes the tokens of prompts, and remembers those of short ones. Knows skills and the tokenizer, no images."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import get_args

from kestrel_runtime.api.requests import Request
from kestrel_runtime.engine.recent.values import LruCache
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.skill import ModelConfig, Skill
from kestrel_runtime.scheduling.output_parser import Token

_MAX_KNOWN = 1024
_MAX_KNOWN_TOKENS = 128
"""Of a prompt that is remembered: all together take some 10 MB at most."""
_NOT_IN_PROMPTS = frozenset({"image", "sampling", "options", "constraint"})
"""Fields of requests that no prompt depends on."""
_PROMPT_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        kind.skill: tuple(item.name for item in fields(kind) if item.name not in _NOT_IN_PROMPTS)
        for kind in get_args(Request)
    }
)
"""The other fields, by skill."""


class Prompts:
    """Prompts of requests, without the tokens of images. For any thread.

    Repeated prompts are recognised within a namespace only, since the time that a request takes shows it.
    """

    def __init__(self, config: ModelConfig, skills: Mapping[str, Skill], tokenizer: Tokenizer) -> None:
        self._config = config
        self._skills = skills
        self._tokenizer = tokenizer
        self._known: LruCache[Hashable, tuple[Token, ...]] = LruCache(_MAX_KNOWN)

    def tokens(self, request: Request, namespace: str) -> list[Token]:
        """BOS and the tokens of the request's text. Raises what the skill raises."""
        key = (namespace, request.skill, *(getattr(request, name) for name in _PROMPT_FIELDS[request.skill]))
        known = self._known.get(key)
        if known is not None:
            return list(known)
        prompt = self._skills[request.skill].prompt(request, self._tokenizer, self._config)
        tokens = [Token(self._config.bos_id), *prompt]
        if len(tokens) <= _MAX_KNOWN_TOKENS:
            self._known.put(key, tuple(tokens))
        return tokens
