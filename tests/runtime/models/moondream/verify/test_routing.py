"""Near ties between experts: decided as the reference does, and nothing else is."""

import pytest
import torch
from torch import nn, tensor

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Query
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.text.decoder import MixtureOfExperts
from kestrel_runtime.models.moondream.verify.prompt_run import PromptRun, prompt_tensors
from kestrel_runtime.models.moondream.verify.routing import Routing, decided_as
from kestrel_runtime.verify.preparing import preparing
from tests.reference_fixtures import MD3_SMALL
from tests.runtime.models.moondream.tiny import random_model, tiny_config

REFERENCE = tensor([[3.0, 2.0, 1.9, 0.0]])


def chosen(logits, count=2):
    return set(logits.topk(count, dim=1).indices[0].tolist())


def choice(logits):
    return chosen(logits[-1:])


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def routers_of(model):
    return [nn.Sequential(experts.router, experts.logits) for experts in experts_of(model)]


def test_a_choice_within_the_tie_is_the_references():
    own = tensor([[3.1, 1.8, 2.1, 0.2]])
    decided = decided_as(REFERENCE, own, 2, 0.2)
    assert chosen(decided) == chosen(REFERENCE) == {0, 1}
    assert decided[0, 1] == own[0, 2], "the expert that is put in weighs what the one it replaces weighed"


def test_a_choice_beyond_the_tie_stays_the_paths_own():
    own = tensor([[0.1, 1.8, 2.1, 0.2]])
    assert torch.equal(decided_as(REFERENCE, own, 2, 0.2), own)


def test_an_equal_choice_is_left_as_it_is():
    own = tensor([[2.9, 2.2, 1.9, 0.1]])
    assert torch.equal(decided_as(REFERENCE, own, 2, 10.0), own)


def test_each_token_has_a_tie_of_its_own():
    own = tensor([[3.1, 1.8, 2.1, 0.2]]).expand(2, 4)
    decided = decided_as(REFERENCE.expand(2, 4), own, 2, tensor([[0.2], [0.05]]))
    assert chosen(decided[:1]) == {0, 1}
    assert chosen(decided[1:]) == {0, 2}


def test_routers_are_followed_by_layer_and_for_the_last_tokens_alone():
    model = random_model(tiny_config(3))
    routers = routers_of(model)
    chance = torch.Generator().manual_seed(1)
    tokens = torch.randn(5, model.config.text.dim, generator=chance)
    routing = Routing()
    with routing.recorded(model):
        wanted = [router(tokens) for router in routers]
    nudged = tokens + 0.3 * torch.randn(tokens.shape, generator=chance)
    with routing.simulated(model):
        for router, logits in zip(routers, wanted, strict=True):
            assert router(nudged).topk(2).indices.sort().values.equal(logits.topk(2).indices.sort().values)
    with routing.decided(model, factor=100.0):
        for router, logits in zip(routers, wanted, strict=True):
            last = router(nudged[-1:])
            assert last.topk(2).indices.sort().values.equal(logits[-1:].topk(2).indices.sort().values)
    assert torch.equal(routers[0](tokens), wanted[0]), "nothing is left on the model"


def test_the_tie_of_a_decode_step_is_that_of_its_own_logits_and_not_of_the_prompts():
    model = random_model(tiny_config(3))
    routers = routers_of(model)
    chance = torch.Generator().manual_seed(1)
    tokens = torch.randn(5, model.config.text.dim, generator=chance)

    def moved(rows, size):
        return rows + size * torch.randn(rows.shape, generator=chance)

    def run(prompt, step):
        return [(router(prompt), router(step)) for router in routers]

    routing = Routing()
    with routing.recorded(model):
        wanted = run(tokens, tokens[-1:])
    for _ in range(8):
        with routing.simulated(model):
            run(moved(tokens, 1e-4), moved(tokens[-1:], 1.0))
    far = -tokens
    own = [(prompt[-1:], step) for prompt, step in run(far, far[-1:])]
    assert any(choice(prompt) != choice(exact[-1:]) for (prompt, _), (exact, _) in zip(own, wanted, strict=True))
    with routing.decided(model, factor=100.0):
        decided = run(far, far[-1:])
    for (prompt, step), (own_prompt, _), (exact, _) in zip(decided, own, wanted, strict=True):
        assert torch.equal(prompt[-1:], own_prompt), (
            "the prompt's logits hardly move, so that its choice is its own"
        )
        assert choice(step) == choice(exact[-1:]), "the step's may have moved as far as this"


@pytest.mark.parametrize("text_backend", ["plain", "fused"])
def test_prompts_and_decode_steps_of_every_path_are_followed(text_backend):
    config = EngineConfig(model=str(MD3_SMALL), device="cpu", dtype="float32", text_backend=text_backend)
    loaded = LoadedModel.load(config)
    request = Query("What is this?", next(MD3_SMALL.glob("image_0_*.png")).read_bytes())
    routing = Routing()
    with preparing(loaded, config) as prepare:
        run = PromptRun(loaded.model, config, prepare)
        with routing.recorded(loaded.model):
            prompt_tensors(run, request)
        with routing.simulated(loaded.model):
            prompt_tensors(run, request)
    assert len(routing._squares) == 2 * len(experts_of(loaded.model)) > 0
    assert {number for _, number in routing._squares} == {0, 1}
