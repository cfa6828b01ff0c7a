"""Makes the masks of a step: the library computes them in threads of its own, without the interpreter lock."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import llguidance
import numpy as np
from numpy.typing import NDArray

from kestrel_runtime.api.errors import ConstraintFailed
from kestrel_runtime.constraints.matcher import AnswerMatcher
from kestrel_runtime.interfaces.token_matcher import MaskRequest

_BITS = 32
_log = logging.getLogger(__name__)


class LibraryMasks:
    """A `MaskMaker`."""

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        self._num_words = -(-vocab_size // _BITS)
        self._num_threads = num_threads
        self._executor: llguidance.LLExecutor | None = None  # its threads are started with the first constraint

    def masks(self, requests: Sequence[MaskRequest]) -> list[NDArray[np.int32] | ConstraintFailed | None]:
        """As `MaskMaker` says."""
        results: list[NDArray[np.int32] | ConstraintFailed | None] = [None] * len(requests)
        table = np.zeros((len(requests), self._num_words), dtype=np.int32)
        asked: list[tuple[AnswerMatcher, int]] = []
        for place, (matcher, generated) in enumerate(requests):
            own = cast(AnswerMatcher, matcher)
            try:
                own.take(generated)
            except ConstraintFailed as error:
                results[place] = error
                continue
            if own.is_in_answer:
                asked.append((own, place))
        try:
            self._compute([(own.library, place) for own, place in asked], table)
        except BaseException:  # a panic of the library, which is no `Exception`
            _log.exception("the masks of %d answers cannot be computed", len(asked))
            table[:] = 0
        for own, place in asked:
            # llguidance never returns an empty mask without an error; treat one as a failure.
            if own.library.is_error() or not table[place].any():
                results[place] = ConstraintFailed()
                continue
            own.narrow(table[place])
            results[place] = table[place]
        return results

    def _compute(self, asked: list[tuple[llguidance.LLMatcher, int]], table: NDArray[np.int32]) -> None:
        row_bytes = table.shape[1] * table.itemsize
        if len(asked) == 1:
            library, place = asked[0]
            library.unsafe_compute_mask_ptr(table[place].ctypes.data, row_bytes)
        elif asked:
            if self._executor is None:
                self._executor = llguidance.LLExecutor(self._num_threads)
            self._executor.unsafe_compute_mask_ptr(asked, table.ctypes.data, row_bytes, len(table))
