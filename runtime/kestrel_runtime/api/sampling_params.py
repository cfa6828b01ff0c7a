"""Defines the caller's settings of how tokens are sampled and when an answer ends."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kestrel_runtime.api.errors import InvalidRequest, Violation

MAX_OUTPUT_TOKENS = 32_768
MAX_SEED = 2**64 - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 128
MAX_TOP_K = 100_000
MAX_LOGIT_BIASES = 300
MAX_LOGPROBS = 20
MAX_SAMPLES = 16
MAX_LOGPROBS_IN_ALL = 2**18
"""The most logprobs of an answer: one for each token of its samples, and one for each of the most likely ones.

They take tens of megabytes in JSON. All samples of the default length may have all logprobs.
"""
RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0.0, 100.0),
        "max_tokens": (1, MAX_OUTPUT_TOKENS),
        "top_k": (1, MAX_TOP_K),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (0.1, 10.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "logprobs": (0, MAX_LOGPROBS),
        "n": (1, MAX_SAMPLES),
    }
)
"""The least and the greatest value of each setting, both inclusive."""
_NUMBERS_OF_TEXT = tuple(name for name in RANGES if name not in ("temperature", "max_tokens"))
_TEXT_FIELDS = ("stop", "include_stop", *_NUMBERS_OF_TEXT, "logit_bias")
_TEXT_ONLY = "is for queries and captions only"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling settings of a request. `None` takes the skill's default.

    `temperature` 0 is greedy. `top_p` keeps the smallest set of tokens whose probability reaches it. `max_tokens`
    bounds the generated tokens of the reasoning and of the answer, each separately. `seed` makes a draw repeatable;
    without one it is random. The answer or the caption ends before the first of the strings `stop`, or after it
    with `include_stop`.

    `top_k` keeps the most likely tokens, `min_p` those with at least this share of the largest probability; both
    apply before `top_p`, and to text only, not to coordinates in a reasoning. `execution.logits` defines the effect
    of the penalties and of `logit_bias` (pairs of a token's id and the number that is added to its logit). With
    `logprobs` the tokens of a text have their logprobs, and those of as many of the most likely tokens.

    `n` asks for as many samples. The engine answers with one: frontends submit a separate request for each
    (`samples`).
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    n: int | None = None

    @property
    def controls_tokens(self) -> bool:
        """True if the settings limit the choice of tokens by more than `top_p`, or adjust logits."""
        if self.top_k is not None or self.repetition_penalty not in (None, 1.0):
            return True
        return bool(self.min_p or self.presence_penalty or self.frequency_penalty or self.logit_bias)

    def samples(self) -> tuple[SamplingParams, ...]:
        """Returns the settings of each of the `n` samples. The first has the seed itself, others one derived from
        it."""
        if self.n is None or self.n == 1:
            return (self,)
        return tuple(replace(self, n=None, seed=_seed_of_sample(self.seed, index)) for index in range(self.n))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises `InvalidRequest` for biases of tokens that the model does not have."""
        unknown = [token_id for token_id, _ in self.logit_bias if not 0 <= token_id < vocab_size]
        if unknown:
            description = f"is no token: this model has {vocab_size}"
            raise InvalidRequest(tuple(Violation(f"sampling.logit_bias[{name}]", description) for name in unknown))

    def violations(self, *, is_text: bool = True) -> Iterator[Violation]:
        """Yields every violation, with paths that begin with `sampling`. `is_text`: True if the answer is a
        text."""
        yield from self._range_violations("temperature")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            yield Violation("sampling.top_p", "must be above 0 and at most 1")
        yield from self._range_violations("max_tokens")
        if self.seed is not None and self.seed < 0:
            yield Violation("sampling.seed", "must not be negative")
        if self.seed is not None and self.seed > MAX_SEED:
            yield Violation("sampling.seed", f"must be at most {MAX_SEED}")
        yield from self._text_violations() if is_text else self._violations_without_text()

    def _range_violations(self, *names: str) -> Iterator[Violation]:
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            least, most = RANGES[name]
            if not least <= value <= most:  # also catches NaN
                yield Violation(f"sampling.{name}", f"must be from {least:g} to {most:g}")

    def _text_violations(self) -> Iterator[Violation]:
        if len(self.stop) > MAX_STOPS:
            yield Violation("sampling.stop", f"must be at most {MAX_STOPS} strings")
        for index, text in enumerate(self.stop[:MAX_STOPS]):
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                yield Violation(f"sampling.stop[{index}]", f"must be 1 to {MAX_STOP_CHARS} characters long")
        yield from self._range_violations(*_NUMBERS_OF_TEXT)
        num_per_token = 0 if self.logprobs is None else 1 + self.logprobs
        if (self.n or 1) * (self.max_tokens or 0) * num_per_token > MAX_LOGPROBS_IN_ALL:
            text = f"max_tokens x n x (1 + logprobs) must be at most {MAX_LOGPROBS_IN_ALL}"
            yield Violation("sampling.logprobs", text)
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            yield Violation("sampling.logit_bias", f"must be for at most {MAX_LOGIT_BIASES} tokens")
            return
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            yield Violation("sampling.logit_bias", "must name each token once")
        for token_id, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                yield Violation(f"sampling.logit_bias[{token_id}]", "must be from -100 to 100")

    def _violations_without_text(self) -> Iterator[Violation]:
        for name in _TEXT_FIELDS:
            value = getattr(self, name)
            if value is not None and value is not False and value != ():
                yield Violation(f"sampling.{name}", _TEXT_ONLY)


def _seed_of_sample(seed: int | None, index: int) -> int | None:
    if seed is None or index == 0:
        return seed
    digest = hashlib.sha256(b"sample %d of %d" % (index, seed)).digest()
    return int.from_bytes(digest[:8]) >> 1
