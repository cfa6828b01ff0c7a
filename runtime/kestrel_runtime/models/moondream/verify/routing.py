"""Experts that a rounded path may choose differently: near ties of the router are decided as the reference does.

Rounding moves a router's logits. Where two logits differ by less than that, the path may choose either expert, and
its hidden state then differs by the difference of two experts, however exact its arithmetic is. Such a choice says
nothing about the numbers, so that it is made the reference's; every other choice stays the path's own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.moe import MixtureOfExperts


class Routing:
    """The router logits of one prompt in the reference's arithmetic, and how far rounding moves them.

    Each router runs twice: for the prompt, in one chunk, and then for a decode step of its last token. In exact
    arithmetic both give that token the same logits, but rounding moves them differently: only decode steps read
    what a cache has rounded, and they may multiply in other types.
    """

    def __init__(self) -> None:
        self._reference: dict[int, Tensor] = {}  # layer → [tokens, experts] float32, of the prompt
        self._squares: dict[tuple[int, int], Tensor] = {}  # layer, run → [tokens, 1]: of simulated errors, summed
        self._num_simulations = 0

    @contextmanager
    def recorded(self, model: Moondream) -> Iterator[None]:
        """The model's routers are the reference: what they give for a prompt of one chunk is kept."""

        def keep(layer: int, run: int, _: int, logits: Tensor) -> None:
            if run == 0:
                self._reference[layer] = logits.float()

        with _hooked(model, keep):
            yield

    @contextmanager
    def simulated(self, model: Moondream) -> Iterator[None]:
        """The model rounds at random: it takes the reference's experts, and its logits' errors are noted."""
        self._num_simulations += 1

        def note(layer: int, run: int, num_chosen: int, logits: Tensor) -> Tensor:
            reference = _last_rows(self._reference[layer], logits)
            squares = (logits.float() - reference).square().mean(dim=1, keepdim=True)
            self._squares[layer, run] = self._squares.get((layer, run), torch.zeros_like(squares)) + squares
            return decided_as(reference, logits, num_chosen, math.inf)

        with _hooked(model, note):
            yield

    @contextmanager
    def decided(self, model: Moondream, factor: float) -> Iterator[None]:
        """Choices between logits that are no further apart than `factor` deviations are the reference's."""

        def decide(layer: int, run: int, num_chosen: int, logits: Tensor) -> Tensor:
            variance = _last_rows(self._squares[layer, run], logits) / self._num_simulations
            widest_tie = factor * (2 * variance).sqrt()  # of a difference of two
            return decided_as(_last_rows(self._reference[layer], logits), logits, num_chosen, widest_tie)

        with _hooked(model, decide):
            yield


def _last_rows(of_prompt: Tensor, logits: Tensor) -> Tensor:
    """Of a prompt's tokens the last, as many as the path computes: fused paths leave out what is not read."""
    return of_prompt[-len(logits) :].to(logits.device)


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
    """Call hook(layer, run, experts per token, logits) for each router's result, and take what it returns for it.

    Runs of each router are counted from 0.
    """

    def counting(layer: int, num_chosen: int) -> Any:
        runs = itertools.count()
        return lambda _module, _inputs, logits: hook(layer, next(runs), num_chosen, logits)

    handles = [
        mlp.router.register_forward_hook(counting(layer, mlp.experts_per_token))
        for layer, mlp in enumerate(block.mlp for block in model.text.blocks)
        if isinstance(mlp, MixtureOfExperts)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
