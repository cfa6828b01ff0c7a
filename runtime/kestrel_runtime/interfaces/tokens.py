"""A token as the engine passes it on: an id, and for places in the image the value it stands for."""

from typing import NamedTuple


class Token(NamedTuple):
    """`value` is empty for text, one coordinate in [0, 1] for a coordinate, (width, height) for a size."""

    id: int
    value: tuple[float, ...] = ()
    logprob: float | None = None
    """Natural logarithm of its probability; None where no sequence of its step asked for it."""
    top: tuple[tuple[int, float], ...] = ()
    """With `logprob`: ids and logprobs of the most likely tokens, the most likely first."""


class TokenRule(NamedTuple):
    """What the next token of a sequence may be.

    `allowed` None lets every token pass but the `suppressed` ones. With `is_spatial` a coordinate or size
    token is read by the region heads; without, it is a token like any other.
    """

    allowed: tuple[int, ...] | None = None
    suppressed: tuple[int, ...] = ()
    is_spatial: bool = False

    def lets_pass(self, token_id: int) -> bool:
        """Whether the token may come."""
        return token_id not in self.suppressed and (self.allowed is None or token_id in self.allowed)
