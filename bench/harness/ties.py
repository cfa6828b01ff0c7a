"""Whether two greedy answers to one request part at a tie: what the engine's own paths make of both tokens.

What rounding to eight bits does to a logit is many times what company does to it, so the plain path in float32
could not tell a tie from a wrong answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Request
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.verify.prompt_run import PromptRun
from kestrel_runtime.scheduling.output_parser import Token
from kestrel_runtime.verify.preparing import preparing


def first_difference(one: Sequence[Token], other: Sequence[Token]) -> int | None:
    """Where two answers part; None where they do not."""
    for place, (left, right) in enumerate(itertools.zip_longest(one, other)):
        if left != right:
            return place
    return None


class TieJudge:
    """A second copy of the model, on the paths that `config` names and all alone, that is led along an answer."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model."""
        loaded = LoadedModel.load(config)
        self._resources = ExitStack()
        prepare = self._resources.enter_context(preparing(loaded, config))
        self._run = PromptRun(loaded.model, config, prepare)

    def close(self) -> None:
        """End its thread."""
        self._resources.close()

    @torch.inference_mode()
    def margin(self, request: Request, common: Sequence[Token], one: Token | None, other: Token | None) -> float:
        """How far the logit of either token lies below the best there is, after the `common` tokens of an answer.

        As a share of the best, since some heads have logits of 4 and others of 40, and rounding goes by their size.
        Tokens of one id differ by their values, and the logits are those of the values. Infinite where one answer
        goes on and the other does not.
        """
        if one is None or other is None:
            return math.inf
        self._run.begin(request)
        model = self._run.model
        hidden = self._run.hidden_after(common).to(model.dtype)
        if one.id != other.id:
            logits = model.text.logits(hidden)[0]
            rule = self._run.sequence.parser.rule
            if rule.allowed is not None:
                logits = torch.full_like(logits, -math.inf).index_copy_(
                    0, torch.tensor(rule.allowed, device=logits.device), logits[list(rule.allowed)]
                )
            logits[list(rule.suppressed)] = -math.inf
            return _margin(logits, one.id, other.id)
        region = model.region
        if len(one.value) == 1:
            rows, values_of = region.coordinate_logits(hidden), region.coordinates
        else:
            rows, values_of = region.size_logits(hidden)[0], region.sizes
        values = values_of(torch.arange(rows.shape[-1], device=rows.device), rows.shape[-1])
        pairs = zip(rows, one.value, other.value, strict=True)
        return max(_margin(row, _bin(values, left), _bin(values, right)) for row, left, right in pairs)


def _margin(logits: Tensor, one: int, other: int) -> float:
    if one == other:
        return 0.0
    best = logits.max().item()
    return (best - min(logits[one].item(), logits[other].item())) / max(abs(best), 1.0)


def _bin(values: Tensor, value: float) -> int:
    return int((values - value).abs().argmin())
