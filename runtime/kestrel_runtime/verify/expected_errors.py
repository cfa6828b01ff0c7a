"""How far a path's tensors may be from exact ones: some float32 runs that round at random, for each prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kestrel_runtime.config import EngineConfig
from kestrel_runtime.loading import LoadedModel
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.requests import Request
from kestrel_runtime.verify.formats import Formats
from kestrel_runtime.verify.prompt_run import PromptRun, plain_float32
from kestrel_runtime.verify.prompt_tensors import prompt_tensors
from kestrel_runtime.verify.rounding_noise import RoundingNoise
from kestrel_runtime.verify.routing import Routing
from kestrel_runtime.verify.tolerances import NUM_SIMULATIONS, ExpectedError


@dataclass(frozen=True, slots=True)
class PromptErrors:
    """What rounding may do to one prompt."""

    tensors: Mapping[str, ExpectedError]
    routing: Routing


def expected_errors(config: EngineConfig, formats: Formats, requests: Sequence[Request]) -> list[PromptErrors]:
    """Run each request exactly and then with random rounding, by the plain path in float32 on `config.device`."""
    config = plain_float32(config)
    loaded = LoadedModel.load(config)
    routings = [Routing() for _ in requests]
    exact: list[dict[str, Tensor]] = []
    with _prompt_run(loaded, loaded.model, config) as run:
        for request, routing in zip(requests, routings, strict=True):
            with routing.recorded(run.model):
                exact.append(prompt_tensors(run, request))
    simulated: list[list[dict[str, Tensor]]] = [[] for _ in requests]
    for seed in range(NUM_SIMULATIONS):
        noise = RoundingNoise(formats, seed, loaded.model.device)
        with _prompt_run(loaded, noise.perturbed(loaded.model), config) as run:
            for request, routing, samples in zip(requests, routings, simulated, strict=True):
                with routing.simulated(run.model):
                    samples.append(prompt_tensors(run, request, noise.disturb))
    return [
        PromptErrors(
            {name: ExpectedError.of(tensor, [sample[name] for sample in samples]) for name, tensor in own.items()},
            routing,
        )
        for own, samples, routing in zip(exact, simulated, routings, strict=True)
    ]


def _prompt_run(loaded: LoadedModel, model: Moondream, config: EngineConfig) -> PromptRun:
    return PromptRun(replace(loaded, model=model), config)
