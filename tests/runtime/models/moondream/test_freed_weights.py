"""Weights stay in memory once: what a fused backend has a copy of is freed while it is built."""

import asyncio
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Caption, Detect, Point, Query, Request, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.backends import Backends
from kestrel_runtime.models.moondream.execution_config import ExecutionConfig
from kestrel_runtime.models.moondream.fused import weights as fused_weights
from kestrel_runtime.models.moondream.fused.vision import FusedVision
from kestrel_runtime.models.moondream.memory import weight_bytes
from kestrel_runtime.models.moondream.model import Moondream
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL

IMAGE = (MD3_SMALL / "image_1_64x64.png").read_bytes()
# What no fused backend has a copy of.
KEPT_OF_TEXT = ("wte", "post_ln", "lm_head", ".ln.", ".tau.", ".router.", "mlp.fc1.scale", "mlp.fc2.scale")


def loaded(folder: object, **settings: Any) -> tuple[LoadedModel, EngineConfig]:
    config = EngineConfig(model=str(folder), device="cpu", dtype="bfloat16", **settings)
    return LoadedModel.load(config), config


def matrices(part: nn.Module) -> dict[str, weakref.ref[Any]]:
    """The weights of a part of the model by name, without keeping any of them."""
    return {name: weakref.ref(tensor) for name, tensor in part.named_parameters()}


def alive(references: dict[str, weakref.ref[Any]]) -> set[str]:
    return {name for name, reference in references.items() if reference() is not None}


def first_matrices(part: nn.Module) -> list[weakref.ref[Any]]:
    """The first matrix of each block."""
    blocks: Any = part.blocks
    return [weakref.ref(block.attn.qkv.weight) for block in blocks]


def build(model: Moondream, config: EngineConfig, *, frees_originals: bool) -> Backends:
    paths = ExecutionConfig.of(config, "cpu", model)
    return Backends.of(model, paths, max_batch_size=2, frees_originals=frees_originals)


@pytest.mark.parametrize("path", ["fused", "fused-float8"])
@pytest.mark.parametrize("folder", [MD2_SMALL, MD3_SMALL], ids=["moondream2", "moondream3"])
def test_a_fused_text_path_leaves_the_model_only_what_it_has_no_copy_of(folder: object, path: str):
    owned, config = loaded(folder, text_backend=path)
    references = matrices(owned.model.text)
    paths = build(owned.model, config, frees_originals=True)
    experts = {name for name in references if owned.model.text.get_parameter(name).ndim == 3}
    kept = {name for name in references if any(part in f"{name}." for part in KEPT_OF_TEXT)} | experts
    assert kept < references.keys()
    assert alive(references) == kept
    assert {name for name in references if not owned.model.text.get_parameter(name).is_meta} == kept
    assert alive(matrices(owned.model.vision)) == dict(owned.model.vision.named_parameters()).keys()
    assert paths.text is not None


@pytest.mark.parametrize("path", ["fused", "fused-float8", "calibrated-float8"])
def test_a_fused_vision_path_leaves_the_model_only_its_last_norm_and_those_it_folds(path: str):
    owned, config = loaded(MD2_SMALL, vision_backend=path)
    references = matrices(owned.model.vision)
    paths = build(owned.model, config, frees_originals=True)
    assert isinstance(paths.vision, FusedVision)
    norms = {name for name in references if ".ln" in f".{name}" or "post_ln" in name}
    assert {f"post_ln.{kind}" for kind in ("weight", "bias")} < norms < references.keys()
    assert alive(references) == norms


@pytest.mark.parametrize("path", ["fused", "fused-float8"])
def test_blocks_are_freed_one_by_one_while_they_are_converted(path: str, monkeypatch: pytest.MonkeyPatch):
    owned, config = loaded(MD2_SMALL, text_backend=path)
    blocks = first_matrices(owned.model.text)
    seen: list[list[bool]] = []
    convert = fused_weights._fused

    def look(*arguments: Any) -> fused_weights.FusedBlock:
        seen.append([block() is not None for block in blocks])
        return convert(*arguments)

    monkeypatch.setattr(fused_weights, "_fused", look)
    build(owned.model, config, frees_originals=True)
    first, count = fused_weights.NUM_WIDE_BLOCKS, len(blocks)
    assert count > first + 1
    assert seen[:count] == [
        [layer < first or layer >= converted for layer in range(count)] for converted in range(count)
    ]
    assert not any(block() is not None for block in blocks)


@pytest.mark.parametrize("path", ["fused", "calibrated-float8"])
def test_blocks_of_the_encoder_are_freed_one_by_one_too(path: str, monkeypatch: pytest.MonkeyPatch):
    owned, config = loaded(MD2_SMALL, vision_backend=path)
    blocks = first_matrices(owned.model.vision)
    seen: list[list[bool]] = []
    convert = FusedVision._fold_block

    def look(self: FusedVision, block: Any) -> Any:
        seen.append([block() is not None for block in blocks])
        return convert(self, block)

    monkeypatch.setattr(FusedVision, "_fold_block", look)
    build(owned.model, config, frees_originals=True)
    assert seen == [[layer >= converted for layer in range(len(blocks))] for converted in range(len(blocks))]


def test_a_model_that_others_use_too_keeps_all_its_weights():
    shared, config = loaded(MD2_SMALL, text_backend="fused", vision_backend="fused")
    before = weight_bytes(shared.model)
    build(shared.model, config, frees_originals=False)
    assert weight_bytes(shared.model) == before > 0


def test_a_model_whose_weights_are_gone_cannot_be_run_by_mistake():
    owned, config = loaded(MD2_SMALL, text_backend="fused")
    build(owned.model, config, frees_originals=True)
    block: Any = owned.model.text.blocks[0]
    with pytest.raises(RuntimeError, match="meta"):
        block.attn.qkv(torch.zeros(1, owned.model.config.text.dim, dtype=torch.bfloat16))


async def answers(engine: LocalEngine) -> list[object]:
    sampling = SamplingParams(temperature=0.7, max_tokens=6, seed=7)
    asked: list[Request] = [
        Query("What is this?", IMAGE, sampling=sampling),
        Query("hello", sampling=sampling),
        Caption(IMAGE, sampling=sampling),
        Point("copy", IMAGE, max_objects=2, sampling=sampling),
        Detect("copy", IMAGE, max_objects=2, sampling=sampling),
    ]
    try:
        return [finished.output for finished in await asyncio.gather(*(engine.submit(r).result() for r in asked))]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("folder", "text_backend", "vision_backend"),
    [
        ("shallow2_folder", "fused", "fused"),
        ("shallow2_folder", "fused-float8", "calibrated-float8"),
        ("shallow3_folder", "fused", "calibrated-float8"),
        ("shallow3_folder", "fused-float8", "fused"),
    ],
)
async def test_answers_are_those_of_an_engine_whose_model_keeps_its_weights(
    folder: str, text_backend: str, vision_backend: str, request: pytest.FixtureRequest
):
    model = str(request.getfixturevalue(folder))
    config = EngineConfig(
        model=model, device="cpu", text_backend=text_backend, vision_backend=vision_backend, num_kv_pages=512
    )
    shared = LoadedModel.load(config)
    wanted = await answers(LocalEngine(shared, config))
    assert await answers(LocalEngine.start(config)) == wanted
