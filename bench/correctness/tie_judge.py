"""Tells a tie from a wrong answer, by a second copy of the model that is led to where two answers part."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from kestrel_runtime.adapters.files import AdapterSource
from kestrel_runtime.adapters.store import AdapterStore
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Chat, Query, Request
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.adapters.slabs import AdapterSlabs
from kestrel_runtime.models.moondream.adapters.target import MoondreamAdapters
from kestrel_runtime.models.moondream.verify.prompt_run import PromptRun
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.verify.preparing import preparing

TOLERANCES: Mapping[str, float] = MappingProxyType(
    {"float32": 1e-4, "float16": 5e-3, "bfloat16": 0.02, "float8": 0.1}
)
"""How far below the best logit a token may lie that rounding makes the best, as a share of that logit, by the
shortest type that computes."""


class TieJudge:
    """A second copy of the model, on the paths that `config` names and all alone, that is led along an answer."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model."""
        loaded = LoadedModel.load(config)
        self._resources = ExitStack()
        prepare = self._resources.enter_context(preparing(loaded, config))
        self._adapters: AdapterStore | None = None
        slabs: AdapterSlabs | None = None
        if config.adapters is not None:
            text, dtype = loaded.model.config.text, loaded.model.dtype
            slots = config.num_adapter_slots, config.max_adapter_rank
            target = MoondreamAdapters(text, *slots, loaded.model.device, dtype)
            slabs = target.allocate()
            read = AdapterSource(Path(config.adapters), (), target.max_file_bytes).read
            self._adapters = AdapterStore(read, target, config.num_adapter_slots)
            self._resources.callback(self._adapters.close)
        self._run = PromptRun(loaded.model, config, prepare, adapters=slabs)

    def close(self) -> None:
        """End its thread."""
        self._resources.close()

    @torch.inference_mode()
    def margin(self, request: Request, common: Sequence[Token], one: Token | None, other: Token | None) -> float:
        """How far the logit of either token lies below the best there is, after the `common` tokens of an answer.

        As a share of the best, since some heads have logits of 4 and others of 40, and rounding goes by their size.
        Tokens of one id differ by their values, and the logits are those of the values. Infinite where one answer
        goes on and the other does not, or where only one token carries values.
        """
        if one is None or other is None or (one.id == other.id and len(one.value) != len(other.value)):
            return math.inf
        hidden = self._hidden(request, common)
        model = self._run.model
        if one.id != other.id:
            logits = model.text.logits(hidden)[0]
            if request.constraint is not None:  # each was the best of those that may come
                return _margin(logits[[one.id, other.id]], 0, 1)
            rule = self._run.sequence.request.parser.rule
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

    def _hidden(self, request: Request, common: Sequence[Token]) -> Tensor:
        """After the `common` tokens of an answer, [1, dim]."""
        free = replace(request, constraint=None) if isinstance(request, Query | Chat) else request
        self._run.begin(free)
        name = request.options.adapter
        if not name:
            return self._run.hidden_after(common).to(self._run.model.dtype)
        assert self._adapters is not None, "requests name adapters where there are some"
        lease = self._adapters.acquire(name, "").result()
        try:
            self._run.sequence.adapter = lease
            return self._run.hidden_after(common).to(self._run.model.dtype)
        finally:
            self._run.sequence.adapter = None
            lease.end()


def _margin(logits: Tensor, one: int, other: int) -> float:
    if one == other:
        return 0.0
    best = logits.max().item()
    return (best - min(logits[one].item(), logits[other].item())) / max(abs(best), 1.0)


def _bin(values: Tensor, value: float) -> int:
    return int((values - value).abs().argmin())
