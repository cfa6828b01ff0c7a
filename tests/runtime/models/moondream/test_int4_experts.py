"""An engine whose model has experts of 4 bits."""

from pathlib import Path

import torch

from kestrel_ops import dequantise_int4
from kestrel_runtime.api.config import BUILT_IN_MODEL, EngineConfig
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.text.decoder import MixtureOfExperts
from tests.adapter_folders import random_pairs, write_peft
from tests.reference_fixtures import MD3_SMALL, image_paths
from tests.runtime.models.moondream.adapters.test_engine_adapters import outputs, served, with_adapter

LONG = SamplingParams(max_tokens=12, temperature=1.0, seed=14)


def stand_ins() -> tuple[LoadedModel, LoadedModel]:
    """The built-in model with experts of 4 bits, and with the weights that they stand for."""
    short = LoadedModel.load(EngineConfig(model=BUILT_IN_MODEL, device="cpu", expert_dtype="int4"))
    wide = LoadedModel.load(EngineConfig(model=BUILT_IN_MODEL, device="cpu"))
    layers = [
        (mine.mlp, other.mlp)
        for mine, other in zip(short.model.text.blocks, wide.model.text.blocks, strict=True)
        if isinstance(mine.mlp, MixtureOfExperts)
    ]
    assert layers
    for mine, other in layers:
        for stack, stood_for in ((mine.fc1, other.fc1), (mine.fc2, other.fc2)):
            assert stack.scale is not None
            assert (stack.weight.dtype, stack.scale.dtype) == (torch.uint8, torch.bfloat16)
            width = stood_for.weight.shape[2]
            experts = zip(stack.weight, stack.scale, strict=True)
            wide_experts = [dequantise_int4(packed, scales, width) for packed, scales in experts]
            stood_for.weight.data = torch.stack(wide_experts)
            stood_for.scale = None  # that of float8
    return short, wide


async def test_it_answers_with_and_without_adapters_as_one_with_the_weights_that_are_stood_for(tmp_path: Path):
    short, wide = stand_ins()
    write_peft(tmp_path / "own", random_pairs(short.model.config.text, seed=1))
    image = image_paths(MD3_SMALL)[0].read_bytes()
    questions = [Query(text, image, sampling=LONG) for text in ("What colour is it?", "Where is the kite?")]
    asked = [*questions, *(with_adapter(question, "own") for question in questions)]
    found = []
    for loaded in (short, wide):
        async with served(loaded, adapters=str(tmp_path), max_adapter_rank=4) as engine:
            found.append(await outputs(engine, asked))
    assert found[0] == found[1]
    assert found[0][:2] != found[0][2:], "the adapter changes nothing"


def test_it_counts_the_weights_that_it_stands_for_and_takes_less_memory():
    short, wide = stand_ins()
    assert short.num_parameters == wide.num_parameters
    sizes = [sum(tensor.nbytes for tensor in loaded.model.parameters()) for loaded in (short, wide)]
    assert sizes[0] < sizes[1]
