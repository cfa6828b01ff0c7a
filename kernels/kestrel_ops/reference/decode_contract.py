"""The second product of a decoder block for one token of each sequence, added to the stream."""

from torch import Tensor
from torch.nn.functional import linear


def decode_contract(
    activations: Tensor,  # [B, K] of any floating type
    weight: Tensor,  # [N, K], the model's type or float8_e4m3fn
    weight_scale: Tensor | None,  # [N] float32 where the weight is float8: weight * scale is meant
    bias: Tensor,  # [N] float32
    hidden: Tensor,  # [B, N] float32, changed in place
    may_defer: bool = False,
) -> Tensor | None:  # [S, B, N] float32
    """hidden += activations @ weight.T + bias. The order of the sum over K is the same in every run.

    With `may_defer` an implementation may leave `hidden` unchanged and return the terms to add, in the order of S,
    for `decode_expand`. None: nothing is deferred. The reference defers nothing.
    """
    wide = weight.float() if weight_scale is None else weight.float() * weight_scale[:, None]
    hidden += linear(activations.float(), wide, bias)
    return None
