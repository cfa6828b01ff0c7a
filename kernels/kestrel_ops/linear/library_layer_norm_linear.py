"""Computes a LayerNorm and a small linear layer by the operations that torch has, in the type of the weight."""

from torch import Tensor
from torch.nn.functional import layer_norm, linear

from kestrel_ops.shapes import ModelShape


def layer_norm_linear(
    hidden: Tensor,  # [T, dim] float32
    norm_weight: Tensor,
    norm_bias: Tensor,
    epsilon: float,
    weight: Tensor,
    bias: Tensor,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # both of the type of the weight
    """Normalises rows and multiplies them by a matrix. Same contract as `reference.layer_norm_linear`.

    Rows are rounded before they are normalised, and so are the sums.
    """
    if delta is not None:
        hidden = hidden + delta
    normed = layer_norm(hidden.to(weight.dtype), hidden.shape[1:], norm_weight, norm_bias, epsilon)
    return normed, linear(normed, weight, bias)


def unsupported(model: ModelShape) -> str | None:
    """Returns why this cannot serve a model: it can serve any."""
    return None
