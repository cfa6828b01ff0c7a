"""Errors that are kept for a while must not keep what the code that raised them was working on: images, tensors."""

from __future__ import annotations

import traceback
from collections.abc import Iterator


def clear_locals(error: BaseException) -> None:
    """Drop the local variables of all frames that ended with `error` or with an error that led to it.

    Lines and functions stay, for logs. A frame that still runs keeps its variables.
    """
    for item in _chain(error):
        traceback.clear_frames(item.__traceback__)


def drop_tracebacks(error: BaseException) -> None:
    """Forget where `error` and the errors that led to it were raised, for errors whose message says all."""
    for item in _chain(error):
        item.__traceback__ = None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that led to it, each once."""
    met: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        item = waiting.pop()
        if item is not None and id(item) not in met:
            met.add(id(item))
            waiting += [item.__cause__, item.__context__]
            yield item
