"""How tokens are sampled and when an answer ends, as the caller asks for it. Knows no tokens, only their ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kestrel_runtime.api.errors import Violation

MAX_OUTPUT_TOKENS = 32_768
MAX_SEED = 2**63 - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 256
_TEXT_ONLY = "is for queries and captions only"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`None` takes the skill's default.

    `temperature` 0 is greedy. `top_p` keeps the smallest set of tokens whose probability reaches it.
    `max_tokens` bounds the generated tokens (of the reasoning and of the answer, each on its own). `seed`
    makes a draw repeatable; without one it is random. The answer or the caption ends before the first of the
    strings `stop`, or behind it with `include_stop`.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False

    def violations(self, *, is_text: bool = True) -> Iterator[Violation]:
        """Every breach, with paths below `sampling`. `is_text`: whether the answer is a text."""
        if self.temperature is not None and not 0.0 <= self.temperature <= 100.0:  # also catches NaN
            yield Violation("sampling.temperature", "must be a number from 0 to 100")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            yield Violation("sampling.top_p", "must be above 0 and at most 1")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_OUTPUT_TOKENS:
            yield Violation("sampling.max_tokens", f"must be from 1 to {MAX_OUTPUT_TOKENS}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            yield Violation("sampling.seed", "must not be negative")
        yield from self._text_violations() if is_text else self._violations_without_text()

    def _text_violations(self) -> Iterator[Violation]:
        if len(self.stop) > MAX_STOPS:
            yield Violation("sampling.stop", f"must be at most {MAX_STOPS} strings")
        for index, text in enumerate(self.stop[:MAX_STOPS]):
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                yield Violation(f"sampling.stop[{index}]", f"must be 1 to {MAX_STOP_CHARS} characters long")

    def _violations_without_text(self) -> Iterator[Violation]:
        if self.stop:
            yield Violation("sampling.stop", _TEXT_ONLY)
        if self.include_stop:
            yield Violation("sampling.include_stop", _TEXT_ONLY)
