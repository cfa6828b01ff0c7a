"""Replaces a backend's choice of experts by that of the reference where the router's logits nearly tie.

Rounding changes the logits of a router. If two logits differ by less than that, the backend may choose either
expert, and its hidden state then differs by the difference of two experts, however exact its arithmetic is. Such a
choice does not show an error, so the choice of the reference is used. All other choices of the backend are kept.
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
from kestrel_runtime.models.moondream.text.decoder import MixtureOfExperts


class Routing:
    """The router logits of one prompt in the reference's arithmetic, and their changes by rounding.

    Each router runs twice: for the prompt, in one chunk, and then for a decode step of its last token. In exact
    arithmetic both give that token the same logits, but rounding changes them differently: only decode steps read
    rounded keys and values from the cache, and their products may use other types.
    """

    def __init__(self) -> None:
        self._reference: dict[int, Tensor] = {}  # layer → [tokens, experts] float32, of the prompt
        self._squares: dict[tuple[int, int], Tensor] = {}  # layer, run → [tokens, 1]: of errors, summed
        self._num_simulations = 0

    @contextmanager
    def recorded(self, model: Moondream) -> Iterator[None]:
        """Records the logits of this model for a prompt of one chunk as those of the reference."""

        def keep(layer: int, run: int, _: int, logits: Tensor) -> None:
            if run == 0:
                self._reference[layer] = logits.float()

        with _hooked(model, keep):
            yield

    @contextmanager
    def simulated(self, model: Moondream) -> Iterator[None]:
        """Uses the experts of the reference in a model with random rounding; records the errors of its logits."""
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
        """Uses the choice of the reference between logits that differ by at most `factor` standard deviations."""

        def decide(layer: int, run: int, num_chosen: int, logits: Tensor) -> Tensor:
            variance = _last_rows(self._squares[layer, run], logits) / self._num_simulations
            widest_tie = factor * (2 * variance).sqrt()  # the deviation of a difference of two logits
            return decided_as(_last_rows(self._reference[layer], logits), logits, num_chosen, widest_tie)

        with _hooked(model, decide):
            yield


def _last_rows(of_prompt: Tensor, logits: Tensor) -> Tensor:
    """Returns the last tokens of a prompt, as many as the backend computes: fused ones omit needless rows."""
    return of_prompt[-len(logits) :].to(logits.device)


def decided_as(
    reference: Tensor,  # [tokens, experts]
    logits: Tensor,  # [tokens, experts]
    num_chosen: int,
    widest_tie: float | Tensor,  # [tokens, 1]
) -> Tensor:  # [tokens, experts]
    """Returns `logits` with the choice of the reference, if it differs and the logits of the reference nearly tie.

    An added expert gets the smallest logit of the chosen ones. Does not synchronise with the device.
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
    """Calls hook(layer, run, experts per token, logits) for each result of a router, and uses its return value.

    Runs of each router are counted from 0.
    """

    def counting(layer: int, num_chosen: int) -> Any:
        runs = itertools.count()
        return lambda _module, _inputs, logits: hook(layer, next(runs), num_chosen, logits)

    handles = [
        mlp.logits.register_forward_hook(counting(layer, mlp.experts_per_token))
        for layer, mlp in enumerate(block.mlp for block in model.text.blocks)
        if isinstance(mlp, MixtureOfExperts)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
