"""Checks complete answers in a worker: the end of a request follows its check, or an error replaces it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from kestrel_runtime.api.errors import AnswerOutsideSchema, EngineUnavailable, InternalError, KestrelError
from kestrel_runtime.api.events import Event, Finished, FinishReason, QueryOutput
from kestrel_runtime.api.stream import Delivery, Stream

_log = logging.getLogger(__name__)


class EndCheck:
    """The check of the answer of one request."""

    def __init__(self, miss: Callable[[str], str | None], submit: Callable[[Callable[[], None]], Any]) -> None:
        """Set the check and the workers.

        `miss` returns the first place in an answer that is not allowed, or None. `submit` has a worker call a
        function, or raises RuntimeError if the workers are closed.
        """
        self._miss = miss
        self._submit = submit

    def deliver(self, stream: Stream, events: list[Event]) -> None:
        """Has a worker check the answer of the last event and deliver what follows. For the engine thread."""
        try:
            self._submit(partial(self._deliver, stream, events))
        except RuntimeError:
            stream.fail(EngineUnavailable("no worker can check the answer"))

    def _deliver(self, stream: Stream, events: list[Event]) -> None:
        error = self._error_of(events[-1])
        if error is None:
            deliveries: list[Delivery] = [(stream, events, None)]
        else:
            deliveries = [(stream, events[:-1], None), (stream, [], error)]
        stream.post(stream.destination, deliveries)

    def _error_of(self, end: Event) -> KestrelError | None:
        assert isinstance(end, Finished)
        assert isinstance(end.output, QueryOutput), "other answers have no constraint"
        if end.finish_reason is not FinishReason.STOP:
            return None  # the answer is only the beginning of one that satisfies its constraint
        try:
            place = self._miss(end.output.answer)
        except Exception as error:  # a bug of ours, which must not leave the caller waiting
            _log.exception("the check of an answer failed")
            return InternalError(error)
        return None if place is None else AnswerOutsideSchema(place)
