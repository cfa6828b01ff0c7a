"""How likely tokens were: values, and how they are read from messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kestrel_client.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A token that might have been generated. `logprob` is the natural logarithm of its probability."""

    text: str
    bytes: bytes
    logprob: float
    token_id: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that was generated, and the most likely ones in its place, the most likely first."""

    text: str
    bytes: bytes
    logprob: float
    token_id: int
    top: tuple[TopLogprob, ...]


def token_logprobs(messages: Iterable[generation_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """Logprobs, read."""
    return tuple(
        TokenLogprob(
            item.text,
            item.bytes,
            item.logprob,
            item.token_id,
            tuple(TopLogprob(top.text, top.bytes, top.logprob, top.token_id) for top in item.top),
        )
        for item in messages
    )
