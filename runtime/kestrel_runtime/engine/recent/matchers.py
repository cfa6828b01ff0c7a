"""Makes the matchers of constrained answers, and remembers what was compiled for them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.errors import InvalidRequest, Violation
from kestrel_runtime.constraints.compiler import ConstraintCompiler
from kestrel_runtime.constraints.masks import AnswerMatcher
from kestrel_runtime.engine.recent.values import LruCache
from kestrel_runtime.scheduling.output_parser import OutputParser

_MAX_KNOWN = 64
"""Compiled constraints, which take up to some megabytes each."""


class Matchers:
    """Matchers of sequences. For any thread.

    Repeated constraints are recognised within a namespace only, since the time that a request takes shows it.
    """

    def __init__(self, compiler: ConstraintCompiler) -> None:
        self._compiler = compiler
        self._known: LruCache[Hashable, Any] = LruCache(_MAX_KNOWN)

    def new(
        self, constraint: Constraint, parser: OutputParser, namespace: str, tenant: str, max_tokens: int
    ) -> AnswerMatcher:
        """The matcher of the answer that `parser` parses, of a sequence that generates at most `max_tokens`.

        Raises `InvalidRequest` where the constraint cannot be used, and `Overloaded` where too many are compiled.
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
