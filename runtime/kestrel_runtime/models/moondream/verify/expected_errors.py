"""Estimates the rounding errors of a path's tensors from float32 runs with random rounding, for each prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Request
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.verify.formats import Formats
from kestrel_runtime.models.moondream.verify.prompt_run import PromptRun, pages_of_context
from kestrel_runtime.models.moondream.verify.prompt_tensors import prompt_tensors
from kestrel_runtime.models.moondream.verify.rounding_noise import RoundingNoise
from kestrel_runtime.models.moondream.verify.routing import Routing
from kestrel_runtime.models.moondream.verify.tolerances import NUM_SIMULATIONS, ExpectedError
from kestrel_runtime.models.verification import Prepare, plain_float32


@dataclass(frozen=True, slots=True)
class PromptErrors:
    """The expected rounding errors of one prompt."""

    tensors: Mapping[str, ExpectedError]
    routing: Routing


def expected_errors(
    config: EngineConfig, formats: Formats, requests: Sequence[Request], prepare: Prepare
) -> list[PromptErrors]:
    """Run each request exactly and then with random rounding, on the plain path in float32 on `config.device`."""
    config = plain_float32(config)
    model = LoadedModel.load(config).model
    routings = [Routing() for _ in requests]
    exact: list[dict[str, Tensor]] = []
    run = PromptRun(model, config, prepare)
    for request, routing in zip(requests, routings, strict=True):
        with routing.recorded(model):
            exact.append(prompt_tensors(run, request))
    simulated: list[list[dict[str, Tensor]]] = [[] for _ in requests]
    for seed in range(NUM_SIMULATIONS):
        noise = RoundingNoise(formats, seed, model.device)
        cache = noise.cache(model.config.text, pages_of_context(model, config), config.page_size)
        run = PromptRun(noise.perturbed(model), config, prepare, cache)
        for request, routing, samples in zip(requests, routings, simulated, strict=True):
            with routing.simulated(run.model):
                samples.append(prompt_tensors(run, request))
    return [
        PromptErrors(
            {name: ExpectedError.of(tensor, [sample[name] for sample in samples]) for name, tensor in own.items()},
            routing,
        )
        for own, samples, routing in zip(exact, simulated, routings, strict=True)
    ]
