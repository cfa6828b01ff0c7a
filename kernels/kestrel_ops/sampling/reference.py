"""Computes random numbers counted by position, samples from rows of logits, and what rows keep of a sample."""

import torch
from torch import Tensor
from torch.nn.functional import pad

_PIECE_LENGTH = 64
NUM_UNIFORMS = 4
"""Numbers of one key and counter."""
_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def pick_allowed(
    logits: Tensor,  # [B, V]
    forbidden: Tensor,  # [S, V] bool
    rules: Tensor,  # [B] int64, may be strided: rows of `forbidden`
) -> Tensor:  # [B] int64
    """Returns the choice of the largest logit that is not forbidden, the first of several; 0 where all are.

    In a row with NaN it is any."""
    return logits.masked_fill(forbidden[rules], float("-inf")).argmax(dim=-1)


def advance_rows(
    integers: Tensor,  # [R, 6] int64, rows may be strided: id, number of values, rule, samples, budget, seed
    row_values: Tensor,  # [R, V] float32, rows may be strided
    successors: Tensor,  # [S, 4] int64: of a rule the next, an id that leads elsewhere and to what, the last; or -1
    rows: Tensor,  # [B] int64: rows that are written; those that come again have equal samples
    ids: Tensor,  # [B] int64
    num_values: Tensor | None = None,  # [B] int64; None for 0
    values: Tensor | None = None,  # [B, V] float32; None for 0
    scores: Tensor | None = None,  # [B, 1] float32; None for -1
    is_finite: Tensor | None = None,  # [B] bool; None for True
) -> Tensor:  # [B, 3 + V] float32: id, or -1 where not `is_finite`, number of values, values, score
    """Writes a sample to rows in place: id, values, their number, one sample more, and the rule that follows.

    The next rule is the last one where as many samples as the budget have been drawn and there is a last one, and
    the other where the id is the one that leads there. Ids lie far below 2^24, up to where float32 is exact.
    """
    before = integers[rows]
    if num_values is None:
        num_values = torch.zeros_like(ids)
    if values is None:
        values = row_values.new_zeros(len(ids), row_values.shape[1])
    if scores is None:
        scores = row_values.new_full((len(ids), 1), -1.0)
    num_sampled = before[:, 3] + 1
    rule, leading, special, last = successors[before[:, 2]].unbind(1)
    rule = torch.where((num_sampled >= before[:, 4]) & (last != -1), last, rule)
    rule = torch.where(ids == leading, special, rule)
    integers[rows, :4] = torch.stack((ids, num_values, rule, num_sampled), dim=1)
    row_values[rows] = values
    if is_finite is not None:
        ids = ids.masked_fill(~is_finite, -1)
    return torch.cat((torch.stack((ids, num_values), dim=1).float(), values, scores), dim=1)


def sample(
    logits: Tensor,  # [B, V]; minus infinity where a choice is forbidden
    temperature: Tensor,  # [B] float32; 0 selects the largest
    top_p: Tensor,  # [B] float32 in (0, 1]
    uniform: Tensor,  # [B] float32 in [0, 1): the randomness, one number per row
    top_k: Tensor | None = None,  # [B] float32, whole numbers: how many choices are kept; 0 keeps all
    min_p: Tensor | None = None,  # [B] float32 in [0, 1]: least share of the largest probability; needs top_k
) -> Tensor:  # [B] int64
    """Rows are independent, so a row's sample is the same in any batch.

    Probabilities are those of the logits divided by `temperature`. Kept are the `top_k` most likely choices, and of
    these the ones with at least `min_p` of the largest probability. The nucleus consists, in descending order, of
    each choice kept for which the probability of all before it, in terms of what is kept, is at most `top_p`, so of
    at least one. The sample is the inverse of its cumulative distribution at `uniform`. A row whose `top_k` and
    `min_p` are 0 has the same bits as without them.
    """
    greedy = logits.argmax(dim=-1)
    scale = torch.where(temperature > 0, temperature, 1.0)[:, None]
    # The largest is subtracted first: divided by a tiny temperature it would be infinite, and the softmax NaN.
    below = logits.float() - logits.amax(dim=-1, keepdim=True)
    ordered, order = (below / scale).softmax(dim=-1).sort(dim=-1, descending=True)
    if top_k is None or min_p is None:
        kept = ordered * ((_running_sums(ordered) - ordered) <= top_p[:, None])
    else:
        ranks = torch.arange(ordered.shape[-1], device=ordered.device)
        is_kept = (ranks < top_k[:, None]) | (top_k[:, None] == 0)
        is_kept &= ordered >= min_p[:, None] * ordered[:, :1]
        ordered = ordered * is_kept
        sums = _running_sums(ordered)
        # All probabilities add up to nearly 1: dividing by it would change bits of rows that keep all.
        total = torch.where((top_k > 0) | (min_p > 0), sums[:, -1], 1.0)
        kept = ordered * ((sums - ordered) <= (top_p * total)[:, None])
    cumulative = _running_sums(kept)
    drawn = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    drawn = drawn.clamp(max=kept.count_nonzero(dim=-1)[:, None] - 1)
    return torch.where(temperature > 0, order.gather(1, drawn)[:, 0], greedy)


def _running_sums(rows: Tensor) -> Tensor:
    """`rows.cumsum(dim=-1)` of [B, V], with the same bits in every run and in any batch.

    Along the last dimension a CUDA device sums in an order that depends on the number of rows, and for a single
    long row on timing. Along other dimensions one thread sums the elements in order. So that no thread sums many, a
    row is divided into pieces, and the sums of whole pieces are summed in the same way.
    """
    num_rows, width = rows.shape
    # One more piece than needed: torch would treat the dimension of a single column as the last one.
    num_pieces = -(-width // _PIECE_LENGTH) + 1
    pieces = pad(rows, (0, num_pieces * _PIECE_LENGTH - width)).view(num_rows, num_pieces, _PIECE_LENGTH)
    within = pieces.mT.contiguous().cumsum(dim=1)  # [B, elements of a piece, pieces]
    if width > _PIECE_LENGTH:
        before = _running_sums(within[:, -1, :-1])
        within[:, :, 1:] += before[:, None]
    return within.mT.flatten(1)[:, :width].contiguous()


def philox_uniform(
    seeds: Tensor,  # [B] int64: the key
    counters: Tensor,  # [B] int64 in [0, 2**32)
) -> Tensor:  # [B, 4] float32 in [0, 1), multiples of 2**-24
    """Returns four uniform numbers for each pair of a seed and a counter."""
    zeros = torch.zeros_like(counters)
    words = philox(seeds, (counters, zeros, zeros, zeros))
    return (torch.stack(words, dim=1) >> 8).float() * 2.0**-24


def philox(seeds: Tensor, counters: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Returns the four 32-bit words of the generator, as int64 tensors [B]."""
    # The first and third word are rows of one tensor, the second and fourth of another: on the host a hundred small
    # operations take most of the time. Constants are filled in, since a CUDA graph cannot copy them from the host.
    first_third, second_fourth = torch.stack(counters).view(2, 2, -1).unbind(1)
    multipliers = torch.cat([seeds.new_full((1, 1), multiplier) for multiplier in _MULTIPLIERS])
    rounds = torch.arange(_NUM_ROUNDS, device=seeds.device)[:, None]
    halves = [half + rounds * step for half, step in zip((seeds, seeds >> 32), _KEY_STEPS, strict=True)]
    keys = torch.stack(halves, dim=1) & _MASK  # [rounds, 2, B]
    for key in keys:
        product = first_third * multipliers  # int64 keeps the bits although the sign is lost
        first_third = ((product >> 32) & _MASK).flip(0) ^ second_fourth ^ key
        second_fourth = (product & _MASK).flip(0)
    return first_third[0], second_fourth[0], first_third[1], second_fourth[1]
