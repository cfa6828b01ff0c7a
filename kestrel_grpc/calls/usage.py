"""Counts what each caller asks of the model, since the start of this process: requests, tokens, refusals.

With several processes the supervisor keeps the counts of those that have ended
(`multiprocess/supervision/frontend_questions.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass

from kestrel_grpc.calls.call_context import CallContext, Outcome

USAGE_TOPIC = "usage"
"""The topic of the question of front ends to each other whose answer is `encoded` usage."""
_REFUSALS = frozenset(("UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"))
"""The codes of calls that the server has not let in: for their token, its limits, or its own."""


@dataclass(slots=True)
class CallerUsage:
    """Holds the counts of one caller. Tokens are those of answered requests."""

    num_answered: int = 0
    num_failed: int = 0
    """Requests that ended otherwise: invalid, cancelled, late or with an error."""
    num_refused: int = 0
    num_input_tokens: int = 0
    """Tokens of prompts and images, cached ones included."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    def __add__(self, other: CallerUsage) -> CallerUsage:
        return CallerUsage(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))


class Usage:
    """Counts the calls of the inference group as they end. Belongs to the event loop of the calls; `by_caller` may
    be read in any thread."""

    def __init__(self) -> None:
        self._counts: dict[str, CallerUsage] = {}

    @property
    def by_caller(self) -> Mapping[str, CallerUsage]:
        """The counts by the name of the token; "" stands for callers without one that the server knows."""
        return dict(self._counts)

    def record(self, call: CallContext, outcome: Outcome) -> None:
        """Counts a call that has ended."""
        # Names are those of the file of tokens, so that callers cannot make many.
        counts = self._counts.setdefault(call.principal, CallerUsage())
        if outcome.is_ok:
            counts.num_answered += 1
        elif outcome.code in _REFUSALS:
            counts.num_refused += 1
        else:
            counts.num_failed += 1
        if outcome.is_ok and call.finished is not None:
            usage = call.finished.usage
            counts.num_input_tokens += usage.num_input_tokens
            counts.num_cached_tokens += usage.num_cached_tokens
            counts.num_output_tokens += usage.num_output_tokens


def total(parts: Iterable[Mapping[str, CallerUsage]]) -> Mapping[str, CallerUsage]:
    """Returns the sums of the counts of several processes, by caller."""
    sums: dict[str, CallerUsage] = {}
    for part in parts:
        for name, counts in part.items():
            sums[name] = sums.get(name, CallerUsage()) + counts
    return sums


def encoded(by_caller: Mapping[str, CallerUsage]) -> bytes:
    """Returns the counts in the form in which processes send them to each other."""
    return json.dumps({name: astuple(counts) for name, counts in by_caller.items()}).encode()


def decoded(data: bytes) -> Mapping[str, CallerUsage]:
    """Returns the counts of another process."""
    return {name: CallerUsage(*counts) for name, counts in json.loads(data).items()}


def joined(parts: Iterable[bytes]) -> bytes:
    """Returns the sums of counts that are `encoded`, in the same form."""
    return encoded(total(map(decoded, parts)))
