"""A reference fixture from a checkpoint: what the plain path in float32 on the CPU computes and answers.

Writes `expected.json` and `expected.safetensors` beside a checkpoint, in the form of the public reference's
fixtures, so that `kestrel-grpc verify` checks any path against either. The plain path is itself held to the
public reference by the fixtures in `tests/golden`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Query
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.imaging.decoding import decode_image
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.tiling import MoondreamTiling
from kestrel_runtime.models.moondream.verify.prompt_run import PromptRun
from kestrel_runtime.models.moondream.verify.prompt_tensors import DECODED_HIDDEN, prompt_tensors
from kestrel_runtime.verify.answers import answer_of, request_of
from kestrel_runtime.verify.preparing import preparing

MAX_TOKENS = 24
_MAX_OBJECTS = 4
_QUESTION = "What is the value of the tallest bar shown here?"
_OBJECT = "tallest bar"
_TIE = 4e-6
"""Relative change of all weights that no kept answer depends on: some ten times what float32 kernels differ by."""


def write_expected(folder: Path, images: Mapping[str, bytes], *, with_answers: bool = True) -> tuple[int, int]:
    """Write the images, by file name, and what the checkpoint makes of them; returns all calls and those kept.

    Without answers there are tensors alone, which is all that paths in short formats are compared with.
    A call whose greedy answer changes with the last bits of the weights is left out: it tells nothing about a path.
    """
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32")
    loaded = LoadedModel.load(config)
    for name, data in images.items():
        (folder / name).write_bytes(data)
    expected: dict[str, Any] = {"dtype": "float32", "max_tokens": MAX_TOKENS}
    expected["images"], tensors = [], {}
    with preparing(loaded, config) as prepare:
        run = PromptRun(loaded.model, config, prepare)
        for index, (name, data) in enumerate(images.items()):
            found = prompt_tensors(run, Query(_QUESTION, data))
            tensors |= {f"{index}.{key}": tensor for key, tensor in found.items() if key != DECODED_HIDDEN}
            ids = [token.id for token in run.sequence.tokens[1:]]
            image = decode_image(data, max_image_pixels=config.max_image_pixels)
            tiles = MoondreamTiling(loaded.model.config.vision).make_tiles(image)
            expected["images"].append(
                {
                    "image": name,
                    "tiling": [tiles.rows, tiles.columns],
                    "n_crops": tiles.num_tiles,
                    "query_prompt": _QUESTION,
                    "query_prompt_tokens": ids,
                    "calls": calls(loaded.model.config.skills) if with_answers else [],
                }
            )
    expected["text_only"] = [_query("What is the value of the bar?"), _query(_QUESTION)] if with_answers else []
    num_calls = asyncio.run(_answer(expected, images, loaded, config))
    save_file(tensors, folder / "expected.safetensors")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))
    return num_calls


def calls(skills: tuple[str, ...]) -> list[dict[str, Any]]:
    """What is asked about each image of a model with these skills, without answers."""
    refs = [[0.25, 0.75], [0.1, 0.2, 0.6, 0.9]]
    own: dict[str, list[dict[str, Any]]] = {
        "query": [_query(_QUESTION), _query(_QUESTION, reasoning=True), _query(_QUESTION, spatial_refs=refs)],
        "caption": [{"skill": "caption", "args": {"length": length}} for length in ("short", "normal", "long")],
        "point": [{"skill": "point", "args": {"object": _OBJECT, "max_objects": _MAX_OBJECTS}}],
        "detect": [{"skill": "detect", "args": {"object": _OBJECT, "max_objects": _MAX_OBJECTS}}],
        "segment": [
            {"skill": "segment", "args": {"object": _OBJECT}},
            {"skill": "segment", "args": {"object": _OBJECT, "spatial_refs": refs[:1]}},
        ],
    }
    return [call for skill in skills for call in own[skill]]


def _query(question: str, *, reasoning: bool = False, **more: Any) -> dict[str, Any]:
    return {"skill": "query", "args": {"question": question, "reasoning": reasoning, **more}}


async def _answer(
    expected: dict[str, Any], images: Mapping[str, bytes], loaded: LoadedModel, config: EngineConfig
) -> tuple[int, int]:
    """Add its answer to every call, and drop those without a certain one; how many there were, and are."""
    groups: list[tuple[list[dict[str, Any]], bytes | None]] = [(expected["text_only"], None)]
    groups += [(image["calls"], images[image["image"]]) for image in expected["images"]]
    asked = [(call, data) for group, data in groups for call in group]
    if not asked:
        return 0, 0
    answers = await _answers(asked, loaded, config)
    _nudge(loaded)
    nudged = await _answers(asked, loaded, config)
    for (call, _), answer in zip(asked, answers, strict=True):
        call["expect"] = answer
    unsure = {id(call) for (call, _), *both in zip(asked, answers, nudged, strict=True) if both[0] != both[1]}
    for group, _ in groups:
        group[:] = [call for call in group if id(call) not in unsure]
    return len(asked), len(asked) - len(unsure)


async def _answers(
    asked: list[tuple[dict[str, Any], bytes | None]], loaded: LoadedModel, config: EngineConfig
) -> list[dict[str, Any]]:
    engine = LocalEngine(loaded, replace(config, max_queued_requests=len(asked) + 1))
    try:
        streams = [engine.submit(request_of(call, data, MAX_TOKENS)) for call, data in asked]
        return [answer_of((await stream.result()).output) for stream in streams]
    finally:
        engine.close()


@torch.inference_mode()
def _nudge(loaded: LoadedModel) -> None:
    chance = torch.Generator().manual_seed(1)
    for parameter in loaded.model.parameters():
        if parameter.dtype == torch.float32:
            noise = torch.empty_like(parameter).uniform_(1 - _TIE, 1 + _TIE, generator=chance)
            parameter.data.mul_(noise)
