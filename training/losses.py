"""What is minimised, and how often whole answers are right."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from training.batches import KINDS, MAX_EXAMPLES, Rows
from training.network import Prediction

_COORDINATE_SPREAD, _SIZE_SPREAD = 1.2, 1.5  # bins: a neighbour of the right bin is nearly right
_COORDINATE_WEIGHT = 0.5
_BALANCE_WEIGHT = 0.01
_CLOSE = 6  # bins within which a coordinate counts as right, a size within three times as many


def loss(prediction: Prediction, rows: Rows) -> Tensor:
    """Next tokens, coordinates, sizes and the experts' balance in one number."""
    flat = cross_entropy(
        prediction.logits.flatten(0, 1).float(), rows.target.long().flatten(), ignore_index=-100, reduction="none"
    )
    weight = rows.weight.flatten()
    total = (flat * weight).sum() / weight.sum()
    for logits, bins, spread in _places(prediction, rows):
        if len(bins):
            total = total + _COORDINATE_WEIGHT * _soft_cross_entropy(logits, bins, spread)
    return total + _BALANCE_WEIGHT * prediction.balance


def _places(prediction: Prediction, rows: Rows) -> list[tuple[Tensor, Tensor, float]]:
    coord_bins = rows.coord_bin[rows.coord_bin >= 0].long()
    size_bins = rows.size_bins[rows.size_bins[..., 0] >= 0].long()
    return [
        (prediction.coordinates, coord_bins, _COORDINATE_SPREAD),
        (prediction.sizes.flatten(0, 1), size_bins.flatten(), _SIZE_SPREAD),
    ]


def _soft_cross_entropy(logits: Tensor, bins: Tensor, spread: float) -> Tensor:
    steps = torch.arange(logits.shape[-1], device=logits.device)
    wanted = torch.exp(-((steps[None] - bins[:, None]) ** 2) / (2 * spread**2))
    wanted = wanted / wanted.sum(dim=-1, keepdim=True)
    return -(wanted * log_softmax(logits.float(), dim=-1)).sum(dim=-1).mean()


@torch.no_grad()
def right_answers(prediction: Prediction, rows: Rows) -> dict[str, tuple[int, int]]:
    """By kind: how many answers are right in every token and close in every coordinate, of how many.

    Each token is predicted from the true ones before it; where all are right, so would the generated ones be.
    """
    wrong = (prediction.logits.argmax(-1) != rows.target) & (rows.target >= 0)
    for logits, mask, slack, bins in (
        (prediction.coordinates[:, None], rows.coord_bin >= 0, _CLOSE, rows.coord_bin[..., None]),
        (prediction.sizes, rows.size_bins[..., 0] >= 0, 3 * _CLOSE, rows.size_bins),
    ):
        off = ((logits.argmax(-1) - bins[mask]).abs() > slack).any(dim=-1)
        wrong[mask] |= off
    counts = torch.zeros(len(rows.ids), MAX_EXAMPLES + 1, device=wrong.device)
    counts.scatter_add_(1, rows.example.long(), wrong.float())
    scores: dict[str, tuple[int, int]] = {}
    for index, kind in enumerate(KINDS):
        members = rows.kind == index
        scores[kind] = (int((members & (counts == 0)).sum()), int(members.sum()))
    return scores
