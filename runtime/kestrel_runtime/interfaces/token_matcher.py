"""Limits the tokens of one answer where a `Grammar` cannot: the host makes a mask for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kestrel_runtime.interfaces.tokens import Token


class TokenMatcher(Protocol):
    """Follows the tokens of one sequence. One thread at a time."""

    def take(self, generated: Sequence[Token]) -> None:
        """Follow the sequence up to here: all that it has generated, whatever was taken before.

        Raises `ConstraintFailed` where a token may not come, or following it takes too much work.
        """
        ...


class MaskRequest(NamedTuple):
    """A sequence whose next token needs a mask."""

    matcher: TokenMatcher
    generated: Sequence[Token]


class MaskMaker(Protocol):
    """Makes the masks of a step. Engine thread only, which has no interpreter lock while they are computed."""

    def masks(self, requests: Sequence[MaskRequest]) -> list[Any]:
        """For each request an int32 array [ceil(vocabulary / 32)], where bit t % 32 of word t // 32 says that the
        token t may come; None where every token may; or the `ConstraintFailed` of this request."""
        ...
