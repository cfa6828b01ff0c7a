"""Follows constrained answers and makes the masks of a step: the tokens that each answer may have next.

The grammar library computes masks in separate threads, without the interpreter lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import llguidance
import numpy as np
from numpy.typing import NDArray

from kestrel_runtime.api.errors import ConstraintFailed
from kestrel_runtime.constraints.answer_check import AnswerCheck
from kestrel_runtime.constraints.json_answer import JsonAnswer, JsonTokens, Mask
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.batch import Batch
from kestrel_runtime.scheduling.sequence import SequenceState, TokenMatcher, TokenSequence

_BITS = 32
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompiledConstraint:
    """A compiled constraint, for any number of answers."""

    library: llguidance.LLMatcher
    """The matcher at the start of an answer; each answer gets a copy."""
    end_id: int
    json: JsonTokens | None = None
    """The classes of tokens in JSON; None if the answer is not JSON."""
    rest_tokens: int = 0
    min_text_tokens: int = 0
    """`rest_tokens` and `min_text_tokens` of `JsonAnswer`."""
    check: AnswerCheck | None = None
    """Checks the numbers of complete answers; None if the schema does not restrict them."""

    def new_json(self, max_tokens: int) -> JsonAnswer | None:
        """Returns the start of an answer of at most `max_tokens`, or None if the answer is not JSON."""
        if self.json is None:
            return None
        return JsonAnswer(self.json, max_tokens, self.rest_tokens, self.min_text_tokens)


class AnswerMatcher:
    """Follows an answer under its constraint, as a `TokenMatcher`. Tokens before the answer, such as reasoning, are
    free."""

    def __init__(self, compiled: CompiledConstraint, opens_answer: int | None, max_tokens: int) -> None:
        """Creates a matcher at the start of the sequence.

        `opens_answer`: the token before the answer; None if the answer begins at once. `max_tokens`: the most
        tokens that the sequence generates.
        """
        self.library = compiled.library.deep_copy()
        self._compiled = compiled
        self._opens_answer = opens_answer
        self._max_tokens = max_tokens
        self._restart()

    def _restart(self) -> None:
        self._num_taken = 0
        self.is_in_answer = self._opens_answer is None
        """True if the next token belongs to the answer."""
        self._json = self._compiled.new_json(self._max_tokens) if self.is_in_answer else None

    @property
    def check(self) -> Callable[[str], str | None] | None:
        """Returns the JSON pointer of an invalid part of a complete answer; None if no check is needed."""
        return None if self._compiled.check is None else self._compiled.check.miss

    def take(self, generated: Sequence[Token]) -> None:
        """Follows the sequence. If tokens were removed, the matcher follows it again from its beginning."""
        if len(generated) < self._num_taken:
            self.library.reset()
            self._restart()
        while self._num_taken < len(generated):
            token_id = generated[self._num_taken].id
            self._num_taken += 1
            if not self.is_in_answer:
                self.is_in_answer = token_id == self._opens_answer
                if self.is_in_answer:
                    self._json = self._compiled.new_json(self._max_tokens - self._num_taken)
            elif token_id != self._compiled.end_id:
                if not self.library.consume_token(token_id):
                    raise ConstraintFailed
                if self._json is not None:
                    self._json.follow(token_id)

    def narrow(self, mask: Mask) -> None:
        """Removes tokens that the constraint allows and that delay the end of the answer."""
        if self._json is not None:
            self._json.narrow(mask)


class MaskRequest(NamedTuple):
    """A sequence whose next token needs a mask."""

    matcher: TokenMatcher
    generated: Sequence[Token]


class LibraryMasks:
    """Makes masks with the grammar library. Engine thread only."""

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        self._num_words = -(-vocab_size // _BITS)
        self._num_threads = num_threads
        self._executor: llguidance.LLExecutor | None = None  # its threads are started with the first constraint

    def masks(self, requests: Sequence[MaskRequest]) -> list[NDArray[np.int32] | ConstraintFailed | None]:
        """Returns an int32 array [ceil(vocabulary / 32)] for each request: bit t % 32 of word t // 32 is 1 if token
        t is allowed.

        The array is None if every token is allowed. A request that fails has its `ConstraintFailed` instead.
        """
        results: list[NDArray[np.int32] | ConstraintFailed | None] = [None] * len(requests)
        table = np.zeros((len(requests), self._num_words), dtype=np.int32)
        asked: list[tuple[AnswerMatcher, int]] = []
        for index, (matcher, generated) in enumerate(requests):
            own = cast(AnswerMatcher, matcher)
            try:
                own.take(generated)
            except ConstraintFailed as error:
                results[index] = error
                continue
            if own.is_in_answer:
                asked.append((own, index))
        try:
            self._compute([(own.library, index) for own, index in asked], table)
        except BaseException:  # a panic of the library is not an `Exception`
            _log.exception("the masks of %d answers cannot be computed", len(asked))
            table[:] = 0
        for own, index in asked:
            # llguidance never returns an empty mask without an error; treat one as a failure.
            if own.library.is_error() or not table[index].any():
                results[index] = ConstraintFailed()
                continue
            own.narrow(table[index])
            results[index] = table[index]
        return results

    def _compute(self, asked: list[tuple[llguidance.LLMatcher, int]], table: NDArray[np.int32]) -> None:
        row_bytes = table.shape[1] * table.itemsize
        if len(asked) == 1:
            library, index = asked[0]
            library.unsafe_compute_mask_ptr(table[index].ctypes.data, row_bytes)
        elif asked:
            if self._executor is None:
                self._executor = llguidance.LLExecutor(self._num_threads)
            self._executor.unsafe_compute_mask_ptr(asked, table.ctypes.data, row_bytes, len(table))


def step_masks(
    batch: Batch, make_masks: Callable[[list[MaskRequest]], list[Any]] | None
) -> tuple[list[Any], list[TokenSequence]]:
    """Returns a mask for each of `batch.sampled`, None for every token, and the sequences whose constraint has
    failed.

    The tokens of all steps before must be known.
    """
    asked = [
        (index, MaskRequest(sequence.request.matcher, sequence.generated))
        for index, sequence in enumerate(batch.sampled)
        # One that has ended meanwhile is still in the step; its token is dropped.
        if sequence.request.matcher is not None and sequence.state is not SequenceState.FINISHED
    ]
    masks: list[Any] = [None] * len(batch.sampled)
    failed: list[TokenSequence] = []
    if asked:
        assert make_masks is not None, "an engine that takes constraints has one"
        for (index, _), mask in zip(asked, make_masks([request for _, request in asked]), strict=True):
            if isinstance(mask, Exception):
                failed.append(batch.sampled[index])
            else:
                masks[index] = mask
    return masks, failed
