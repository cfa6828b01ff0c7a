"""Draw one index per row of logits: greedy, or by temperature and nucleus."""

import torch
from torch import Tensor
from torch.nn.functional import pad

_PIECE_LENGTH = 64


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

    Along the last dimension a CUDA device sums in an order that depends on the number of rows, and of a single long
    row in the order in which its parts are ready. Along any other, one thread sums the elements in their order. So
    that no thread sums many, a row is cut into pieces, and the sums of whole pieces are summed in the same way.
    """
    num_rows, width = rows.shape
    # One piece more than is needed: of a single column torch would take the dimension for the last.
    num_pieces = -(-width // _PIECE_LENGTH) + 1
    pieces = pad(rows, (0, num_pieces * _PIECE_LENGTH - width)).view(num_rows, num_pieces, _PIECE_LENGTH)
    within = pieces.mT.contiguous().cumsum(dim=1)  # [B, elements of a piece, pieces]
    if width > _PIECE_LENGTH:
        before = _running_sums(within[:, -1, :-1])
        within[:, :, 1:] += before[:, None]
    return within.mT.flatten(1)[:, :width].contiguous()
