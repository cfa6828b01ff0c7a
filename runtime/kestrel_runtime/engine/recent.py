"""Keeps what recent requests computed: tokens of prompts and compiled constraints.

Repeated prompts and constraints are recognised within a namespace only, since the time that a request takes shows
whether it was recognised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from operator import attrgetter
from threading import Lock
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.errors import InvalidRequest, Violation
from kestrel_runtime.api.requests import REQUEST_TYPES, Request, fields_without_images
from kestrel_runtime.constraints.compiler import ConstraintCompiler
from kestrel_runtime.constraints.masks import AnswerMatcher
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.models.family import ModelConfig, Prompt, Skill
from kestrel_runtime.output.output_parser import OutputParser

_MAX_PROMPTS = 1024
_MAX_PROMPT_TOKENS = 128
"""The longest prompt that is kept: all prompts together take some 10 MB at most."""
_NOT_IN_PROMPTS = frozenset({"sampling", "options", "constraint"})
"""The fields of requests, apart from images, that no prompt depends on."""
_PROMPT_VALUES: Mapping[str, Callable[[Request], Hashable]] = MappingProxyType(
    {
        kind.skill: attrgetter(*(name for name in fields_without_images(kind) if name not in _NOT_IN_PROMPTS))
        for kind in REQUEST_TYPES
    }
)
"""Returns the values of the fields that prompts depend on, by skill."""
_MAX_CONSTRAINTS = 64
"""The most compiled constraints, which take up to some megabytes each."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """A mapping of bounded size that drops the least recently used value. Safe in any thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: OrderedDict[Key, Value] = OrderedDict()  # the one used last at the end
        self._lock = Lock()

    def get(self, key: Key) -> Value | None:
        """Returns the value of a key; None if there is none."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: Key, value: Value) -> None:
        """Store a value."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > self._capacity:
                self._values.popitem(last=False)


class Prompts:
    """A cache of the prompts of requests, without the tokens of images. Safe in any thread."""

    def __init__(self, config: ModelConfig, skills: Mapping[str, Skill], tokenizer: Tokenizer) -> None:
        self._config = config
        self._skills = skills
        self._tokenizer = tokenizer
        self._known: LruCache[Hashable, Prompt] = LruCache(_MAX_PROMPTS)

    def of(self, request: Request, namespace: str) -> Prompt:
        """Returns the prompt of the request. Raises the errors of the skill."""
        key = (namespace, request.skill, _PROMPT_VALUES[request.skill](request))
        known = self._known.get(key)
        if known is not None:
            return known
        prompt = self._skills[request.skill].prompt(request, self._tokenizer, self._config)
        if len(prompt.tokens) <= _MAX_PROMPT_TOKENS:
            self._known.put(key, prompt)
        return prompt


class Matchers:
    """A factory of matchers for constrained sequences, with a cache of constraints. Safe in any thread."""

    def __init__(self, compiler: ConstraintCompiler) -> None:
        self._compiler = compiler
        self._known: LruCache[Hashable, Any] = LruCache(_MAX_CONSTRAINTS)

    def new(
        self, constraint: Constraint, parser: OutputParser, namespace: str, tenant: str, max_tokens: int
    ) -> AnswerMatcher:
        """Returns a matcher of the answer that `parser` parses, for a sequence of at most `max_tokens` new tokens.

        Raises `InvalidRequest` if the constraint cannot be used, and `Overloaded` if too many are being compiled.
        """
        end_id = parser.end_id
        if end_id is None:
            raise InvalidRequest((Violation("constraint", "is not supported by this model"),))
        key = (namespace, end_id, constraint)
        compiled = self._known.get(key)
        if compiled is None:
            compiled = self._compiler.compiled(constraint, end_id, tenant)
            self._known.put(key, compiled)
        return AnswerMatcher(compiled, parser.opens_answer, max_tokens)
