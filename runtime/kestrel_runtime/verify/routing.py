"""Experts that a rounded path may choose differently: near ties of the router are decided as the reference does.

Rounding moves a router's logits. Where two logits differ by less than that, the path may choose either expert, and
its hidden state then differs by the difference of two experts, however exact its arithmetic is. Such a choice says
nothing about the numbers, so that it is made the reference's; every other choice stays the path's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.moe import MixtureOfExperts


class Routing:
    """The router logits of one prompt in the reference's arithmetic, and how far rounding moves them."""

    def __init__(self) -> None:
        self._reference: dict[int, Tensor] = {}  # layer → [tokens, experts] float32
        self._squares: dict[int, Tensor] = {}  # layer → [tokens, 1]: of simulated errors, summed
        self._num_simulations = 0

    @contextmanager
    def recorded(self, model: Moondream) -> Iterator[None]:
        """The model's routers are the reference: what they give for a prompt of one chunk is kept."""

        def keep(layer: int, _: int, logits: Tensor) -> None:
            self._reference.setdefault(layer, logits.float())  # the prompt comes first, decoding follows

        with _hooked(model, keep):
            yield

    @contextmanager
    def simulated(self, model: Moondream) -> Iterator[None]:
        """The model rounds at random: it takes the reference's experts, and its logits' errors are noted."""
        noted: set[int] = set()
        self._num_simulations += 1

        def note(layer: int, num_chosen: int, logits: Tensor) -> Tensor:
            if layer not in noted:
                noted.add(layer)
                squares = (logits.float() - self._reference[layer]).square().mean(dim=1, keepdim=True)
                self._squares[layer] = self._squares.get(layer, torch.zeros_like(squares)) + squares
            return decided_as(self._rows(self._reference, layer, logits), logits, num_chosen, math.inf)

        with _hooked(model, note):
            yield

    @contextmanager
    def decided(self, model: Moondream, factor: float) -> Iterator[None]:
        """Choices between logits that are no further apart than `factor` deviations are the reference's."""

        def decide(layer: int, num_chosen: int, logits: Tensor) -> Tensor:
            variance = self._rows(self._squares, layer, logits) / self._num_simulations
            widest_tie = factor * (2 * variance).sqrt()  # of a difference of two
            return decided_as(self._rows(self._reference, layer, logits), logits, num_chosen, widest_tie)

        with _hooked(model, decide):
            yield

    @staticmethod
    def _rows(by_layer: dict[int, Tensor], layer: int, logits: Tensor) -> Tensor:
        """Of a prompt's tokens the last, as many as the path computes: fused paths leave out what nobody reads."""
        return by_layer[layer][-len(logits) :].to(logits.device)


def decided_as(
    reference: Tensor,  # [tokens, experts]
    logits: Tensor,  # [tokens, experts]
    num_chosen: int,
    widest_tie: float | Tensor,  # [tokens, 1]
) -> Tensor:  # [tokens, experts]
    """`logits` with the reference's choice, where theirs is another and the reference's logits nearly tie.

    An expert that is put in has the smallest logit of the chosen; nothing here waits for the device.
    """
    best = logits.topk(num_chosen, dim=1)
    wanted = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, reference.topk(num_chosen, dim=1).indices, True)
    own = torch.zeros_like(wanted).scatter_(1, best.indices, True)
    left_out, put_in = wanted & ~own, own & ~wanted
    gap = reference.masked_fill(~left_out, -math.inf).amax(dim=1, keepdim=True) - reference.masked_fill(
        ~put_in, math.inf
    ).amin(dim=1, keepdim=True)
    decided = torch.where(left_out, best.values[:, -1:], logits).masked_fill(put_in, -math.inf)
    return torch.where(gap <= widest_tie, decided, logits)


@contextmanager
def _hooked(model: Moondream, hook: Any) -> Iterator[None]:
    """Call hook(layer, experts per token, logits) for each router's result, and take what it returns for it."""
    handles = [
        mlp.router.register_forward_hook(
            lambda _module, _inputs, logits, layer=layer, count=mlp.experts_per_token: hook(layer, count, logits)
        )
        for layer, mlp in enumerate(block.mlp for block in model.text.blocks)
        if isinstance(mlp, MixtureOfExperts)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
