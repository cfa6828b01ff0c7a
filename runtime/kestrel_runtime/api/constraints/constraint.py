"""The constraint of an answer: one of several texts, a regular expression, or a JSON schema.

The bounds keep the work that a constraint causes small before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kestrel_runtime.api.constraints.regex_size import regex_violation
from kestrel_runtime.api.constraints.schema_size import schema_problems
from kestrel_runtime.api.errors import Violation

MAX_CHOICES = 256
MAX_CHOICE_CHARS = 512
MAX_CHOICES_CHARS = 16_384
"""Of all choices together."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Exactly one of the three.

    `choices`: the answer is one of these texts. `regex`: all of it matches, in the syntax of Rust's `regex`, which
    has neither look-around nor back references. `json_schema`: it is JSON, with one space after each comma and
    colon, that is valid under this schema, which is given as text.
    """

    choices: tuple[str, ...] = ()
    regex: str | None = None
    json_schema: str | None = None

    def violations(self) -> Iterator[Violation]:
        """Every breach, with paths below `constraint`."""
        if bool(self.choices) + (self.regex is not None) + (self.json_schema is not None) != 1:
            yield Violation("constraint", "must be exactly one of choices, regex and json_schema")
        yield from self._choice_violations()
        if self.regex is not None:
            problem = "must not be empty" if not self.regex else regex_violation(self.regex)
            if problem is not None:
                yield Violation("constraint.regex", problem)
        if self.json_schema is not None:
            for problem in schema_problems(self.json_schema):
                yield Violation("constraint.json_schema", problem)

    def _choice_violations(self) -> Iterator[Violation]:
        if len(self.choices) > MAX_CHOICES:
            yield Violation("constraint.choices", f"must be at most {MAX_CHOICES} texts")
            return
        if sum(map(len, self.choices)) > MAX_CHOICES_CHARS:
            yield Violation("constraint.choices", f"must be at most {MAX_CHOICES_CHARS} characters long together")
        for index, choice in enumerate(self.choices):
            if not 1 <= len(choice) <= MAX_CHOICE_CHARS:
                yield Violation(f"constraint.choices[{index}]", f"must be 1 to {MAX_CHOICE_CHARS} characters long")
