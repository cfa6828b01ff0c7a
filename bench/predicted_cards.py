"""How fast should other cards be, from the bytes and operations of a request? A table; measures nothing.

A request is that of `bench.serve`: 9 crops, 746 prompt tokens, 3 or 33 tokens of answer, in bfloat16 or float8. The
time of its parts is the larger of bytes over a card's bandwidth and operations over its rate, both from data sheets
(dense, sums in float32) times the share of them that one H200 reached with large copies and products. That sum is
divided by the share that the server reached there of its own sum, for one request at a time, for 64, and for 64 in
float8. So a prediction assumes that kernels and libraries are as good on the other card as on the H200, and that it
holds its rate, which cards of little power do not.
"""

from dataclasses import dataclass

_CROP_FLOPS = 0.673e12  # of 27 layers and the projection
_TOKEN_FLOPS = 2 * 1.31e9
_CROPS, _PROMPT_TOKENS = 9, 746
_STEP_WEIGHTS = 1.315e9  # that a decode step reads
_POSITION_VALUES = 24 * 2 * 2048
_REACHED_BANDWIDTH, _REACHED_RATE = 4.17 / 4.8, 785 / 989  # by one H200
_H200_PER_S = {(1, False): 1e3 / 22.9, (64, False): 67.4, (64, True): 108.0}  # direct, measured


@dataclass(frozen=True, slots=True)
class Card:
    """A card by its data sheet."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    """In bfloat16, dense."""
    float8_factor: float
    """Of its rate in float8; 0 for none."""
    peer: str = ""
    """Requests/s that Kestrel publishes: direct at one and at best, cot at one and at best."""


CARDS = (
    Card("H200", 4.8e12, 989e12, 2),
    Card("A100 80 GB PCIe", 1.935e12, 312e12, 0, "19.7 / 26.2, 6.4 / 23.0"),
    Card("A10", 0.6e12, 125e12, 0, "7.4 / 8.9, 3.1 / 7.3"),
    Card("L4", 0.3e12, 121e12, 2, "6.3 / 7.8, 2.1 / 5.8"),
    Card("L40S", 0.864e12, 362e12, 2, "19.7 / 26.4, 5.7 / 21.6"),
    Card("RTX 4090", 1.008e12, 165e12, 2),
)


def least_ms(card: Card, batch: int, tokens: int, *, is_float8: bool = False) -> float:
    """Milliseconds of device time of one request of a full batch, by bytes and operations."""
    bandwidth = card.bytes_per_s * _REACHED_BANDWIDTH
    rate = card.flops_per_s * _REACHED_RATE * (card.float8_factor if is_float8 else 1)
    item_bytes = 1 if is_float8 else 2
    seconds = (_CROPS * _CROP_FLOPS + _PROMPT_TOKENS * _TOKEN_FLOPS) / rate
    context = _PROMPT_TOKENS + tokens / 2
    step_bytes = item_bytes * (_STEP_WEIGHTS + batch * context * _POSITION_VALUES)
    step_flops = batch * _TOKEN_FLOPS
    seconds += (tokens - 1) * max(step_bytes / bandwidth, step_flops / rate) / batch
    return seconds * 1e3


def predicted_per_s(card: Card, batch: int, tokens: int, *, is_float8: bool = False) -> float:
    """Requests a second of so many at once."""
    measured = _H200_PER_S[batch, is_float8]
    longer = least_ms(card, batch, tokens, is_float8=is_float8) / least_ms(CARDS[0], batch, 3, is_float8=is_float8)
    return measured / longer


def main() -> None:
    """Print the table."""
    columns = ("direct, 1 at once", "direct, 64", "cot, 1", "cot, 64", "direct in float8, 64", "the peer publishes")
    print(f"| requests/s, predicted | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for card in CARDS:
        cells = [f"{predicted_per_s(card, batch, tokens):.1f}" for tokens in (3, 33) for batch in (1, 64)]
        cells.append(f"{predicted_per_s(card, 64, 3, is_float8=True):.1f}" if card.float8_factor else "–")
        print(f"| {card.name} | {' | '.join(cells)} | {card.peer or '–'} |")


if __name__ == "__main__":
    main()
