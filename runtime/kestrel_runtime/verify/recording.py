"""Writes a reference fixture: the questions about images, and the answers of a checkpoint.

`write_questions` writes the images and `questions.json`, which has the form of `expected.json` without answers.
`record_expected` answers them on the plain backend in float32. A family may have a program that asks its reference
implementation instead, such as `models/moondream/verify/reference_program.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Query
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.family import plain_float32
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.verify.answers import answer_of, request_of
from kestrel_runtime.verify.preparing import preparing

QUESTIONS = "questions.json"
_CERTAIN = 4e-6
"""The relative change of all weights that a certain answer does not depend on: about ten times the relative
difference between float32 kernels."""

Call = dict[str, Any]
"""A call: `skill`, `args`, and `expect` once it is answered, as in `expected.json`."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image and the calls about it."""

    name: str
    """The file name in the fixture."""
    data: bytes
    prompt: str
    """The question whose tensors are compared."""
    calls: Sequence[Call]


def call_of(skill: str, **args: Any) -> Call:
    """Returns a call without its answer."""
    return {"skill": skill, "args": args}


def query_call(question: str, *, reasoning: bool = False, **more: Any) -> Call:
    """Returns a query without its answer."""
    return call_of("query", question=question, reasoning=reasoning, **more)


def write_questions(folder: Path, pictures: Sequence[Picture], text_only: Sequence[Call], max_tokens: int) -> None:
    """Writes the pictures and `questions.json`. `max_tokens` limits each answer, and each reasoning before one."""
    entries: list[dict[str, Any]] = []
    for picture in pictures:
        (folder / picture.name).write_bytes(picture.data)
        entries.append({"image": picture.name, "query_prompt": picture.prompt, "calls": list(picture.calls)})
    questions = {"dtype": "float32", "max_tokens": max_tokens, "images": entries, "text_only": list(text_only)}
    (folder / QUESTIONS).write_text(json.dumps(questions, indent=1))


def record_expected(folder: Path, config: EngineConfig) -> tuple[int, int]:
    """Writes `expected.json` and `expected.safetensors`: answers and tensors of the plain backend in float32.

    Calls of skills that the model lacks are left out, and so are calls whose greedy answer changes with the last
    bits of the weights: such an answer cannot distinguish a correct backend from a faulty one. Returns the number
    of calls with and without the latter. Raises `CheckpointError`.
    """
    config = plain_float32(config)
    loaded = LoadedModel.load(config)
    verification = loaded.family.verification(loaded.model, config)
    expected = json.loads((folder / QUESTIONS).read_text())
    skills = loaded.family.skills(loaded.model.config)
    tensors: dict[str, Tensor] = {}
    with preparing(loaded, config) as prepare:
        for index, entry in enumerate(expected["images"]):
            request = Query(entry["query_prompt"], (folder / entry["image"]).read_bytes())
            record = verification.record_prompt(request, prepare)
            entry.update(record.facts)
            tensors |= {f"{index}.{key}": tensor for key, tensor in record.tensors.items()}
            entry["calls"] = [call for call in entry["calls"] if call["skill"] in skills]
    num_calls = asyncio.run(_answer(folder, expected, loaded, config))
    save_file(tensors, folder / "expected.safetensors")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))
    return num_calls


async def _answer(
    folder: Path, expected: dict[str, Any], loaded: LoadedModel, config: EngineConfig
) -> tuple[int, int]:
    """Adds the answer to each call and drops calls without a certain one. Returns the numbers of calls before and
    after."""
    groups: list[tuple[list[Call], bytes | None]] = [(expected["text_only"], None)]
    groups += [(entry["calls"], (folder / entry["image"]).read_bytes()) for entry in expected["images"]]
    asked = [(call, data) for group, data in groups for call in group]
    if not asked:
        return 0, 0
    answers = await _answers(asked, expected["max_tokens"], loaded, config)
    nudge(loaded)
    nudged = await _answers(asked, expected["max_tokens"], loaded, config)
    for (call, _), answer in zip(asked, answers, strict=True):
        call["expect"] = answer
    unsure = {id(call) for (call, _), *both in zip(asked, answers, nudged, strict=True) if both[0] != both[1]}
    for group, _ in groups:
        group[:] = [call for call in group if id(call) not in unsure]
    return len(asked), len(asked) - len(unsure)


async def _answers(
    asked: Sequence[tuple[Call, bytes | None]], max_tokens: int, loaded: LoadedModel, config: EngineConfig
) -> list[dict[str, Any]]:
    engine = LocalEngine(loaded, replace(config, max_queued_requests=len(asked) + 1))
    try:
        streams = [engine.submit(request_of(call, data, max_tokens)) for call, data in asked]
        return [answer_of((await stream.result()).output) for stream in streams]
    finally:
        engine.close()


@torch.inference_mode()
def nudge(loaded: LoadedModel) -> None:
    """Changes all float32 weights by a few units of their last place, at random. Certain answers stay the same."""
    chance = torch.Generator(loaded.model.device).manual_seed(1)
    for parameter in loaded.model.parameters():
        if parameter.dtype == torch.float32:
            noise = torch.empty_like(parameter).uniform_(1 - _CERTAIN, 1 + _CERTAIN, generator=chance)
            parameter.data.mul_(noise)
