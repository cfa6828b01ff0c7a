"""Draw one index per row of logits: greedy, or by temperature and nucleus."""

import torch
from torch import Tensor
from torch.nn.functional import pad

_PIECE = 1024


def sample(
    logits: Tensor,  # [B, V]; minus infinity where a choice is forbidden
    temperature: Tensor,  # [B] float32; 0 takes the largest
    top_p: Tensor,  # [B] float32 in (0, 1]
    uniform: Tensor,  # [B] float32 in [0, 1): the randomness, one number per row
) -> Tensor:  # [B] int64
    """Rows do not see each other, so a row's draw is the same in any batch.

    The nucleus keeps, in falling order, every choice before which less than or exactly `top_p` of the
    probability has been spent, so at least one; the draw inverts its cumulative distribution at `uniform`.
    """
    greedy = logits.argmax(dim=-1)
    scale = torch.where(temperature > 0, temperature, 1.0)[:, None]
    # The largest goes to 0 first: divided by a tiny temperature it would be infinite, and the softmax undefined.
    below = logits.float() - logits.amax(dim=-1, keepdim=True)
    ordered, order = (below / scale).softmax(dim=-1).sort(dim=-1, descending=True)
    kept = ordered * ((_running_sums(ordered) - ordered) <= top_p[:, None])
    cumulative = _running_sums(kept)
    drawn = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    drawn = drawn.clamp(max=kept.count_nonzero(dim=-1)[:, None] - 1)
    return torch.where(temperature > 0, order.gather(1, drawn)[:, 0], greedy)


def _running_sums(rows: Tensor) -> Tensor:
    """`rows.cumsum(dim=-1)` of [B, V], with the same bits in every run and for a row in any company.

    Of a single long row a CUDA device sums parts in the order in which they are ready.
    """
    width = rows.shape[1]
    pieces = pad(rows, (0, -width % _PIECE)).unflatten(1, (-1, _PIECE)).cumsum(dim=-1)
    before = pad(pieces[:, :-1, -1].cumsum(dim=-1), (1, 0))
    return (pieces + before[..., None]).flatten(1)[:, :width].contiguous()
