"""A method of the engine wrapped for a while, so that the engine itself carries nothing for those who watch it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

Method = Callable[..., Any]


@contextlib.contextmanager
def wrapped(owner: type, name: str, wrap: Callable[[Method], Method]) -> Iterator[None]:
    """Until the block ends, calls of `owner`'s method `name` go to what `wrap` makes of it."""
    own = vars(owner)[name]
    setattr(owner, name, wrap(own))
    try:
        yield
    finally:
        setattr(owner, name, own)
