"""Runs every case of a reference fixture and says which hold.

A fixture is a folder with a small checkpoint, images, and the reference's answers in `expected.json` and
`expected.safetensors`. In float32 every number and every answer is compared. In a shorter format only the numbers
are, since one rounding may change a greedy answer of a random model, and bounds follow from simulated rounding.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError, KestrelError
from kestrel_runtime.api.requests import Query
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.imaging.decoding import decode_image
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.tiling import MoondreamTiling
from kestrel_runtime.models.moondream.verify.answers import answer_differs, answer_of, request_of
from kestrel_runtime.models.moondream.verify.expected_errors import PromptErrors, expected_errors
from kestrel_runtime.models.moondream.verify.formats import Formats
from kestrel_runtime.models.moondream.verify.prompt_run import PromptRun
from kestrel_runtime.models.moondream.verify.prompt_tensors import DECODED_HIDDEN, HIDDEN, LOGITS, prompt_tensors
from kestrel_runtime.models.moondream.verify.tolerances import (
    DEVIATIONS,
    FLOAT32_LOGIT,
    FLOAT32_RELATIVE,
    Comparison,
    ExpectedError,
    LargestError,
)

_CACHE_TOKENS = 8192
"""The prompts are few, and several folders may be checked side by side."""


@dataclass(frozen=True, slots=True)
class Case:
    """What one case came to."""

    name: str
    complaint: str | None
    """Why it fails; None where it holds."""
    comparison: Comparison | None = None
    """Of a tensor of numbers."""
    digest: str = ""
    """Equal for two runs that computed the very same bits, or gave the same answer."""

    def __str__(self) -> str:
        if self.complaint is not None:
            return f"FAILED  {self.name}: {self.complaint}"
        return f"ok      {self.name}" + ("" if self.comparison is None else f": {self.comparison}")


class GoldenFolder:
    """One fixture, loaded; `run` or `cases` goes through its cases, and may do so again."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        """Load the checkpoint, for the device, types and paths of `config`.

        Raises `CheckpointError` where the folder is not a fixture.
        """
        try:
            self._expected = json.loads((folder / "expected.json").read_text())
            self._tensors = load_file(folder / "expected.safetensors")
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder} is no golden folder: {Path(error.filename).name} is missing") from None
        self._folder = folder
        self._config = replace(
            config,
            model=str(folder),
            num_kv_pages=config.num_kv_pages or _CACHE_TOKENS // config.page_size,
            max_queued_requests=len(self._expected["images"]) * 100 + 100,
        )
        self._loaded = LoadedModel.load(self._config)
        self._formats = Formats.of(config, self._loaded.model)
        self._is_exact = self._formats.shortest == torch.float32

    def run(self, print_line: Callable[[str], None]) -> tuple[int, int]:
        """Print a line per case; returns how many passed and how many failed."""
        num_passed = num_failed = 0
        for case in self.cases():
            print_line(str(case))
            num_passed += case.complaint is None
            num_failed += case.complaint is not None
        return num_passed, num_failed

    def cases(self) -> Iterator[Case]:
        """Compute everything and compare it, case by case."""
        for index, image in enumerate(self._expected["images"]):
            yield from self._tiling_cases(index, image)
            yield from self._prompt_cases(index, image)
        if self._is_exact:
            yield from asyncio.run(self._call_cases())

    def _tiling_cases(self, index: int, expected: dict[str, Any]) -> Iterator[Case]:
        name = expected["image"]
        image = decode_image(self._data(name), max_image_pixels=self._config.max_image_pixels)
        tiles = MoondreamTiling(self._loaded.model.config.vision).make_tiles(image)
        shape = [[tiles.rows, tiles.columns], tiles.num_tiles]
        yield Case(f"{name} tiling", _differs(shape, [expected["tiling"], expected["n_crops"]]))
        for key, place in (("global_crop_u8", 0), ("last_crop_u8", -1)):
            if (pixels := self._tensors.get(f"{index}.{key}")) is not None:
                equal = np.array_equal(pixels.numpy(), tiles.pixels[place])
                yield Case(f"{name} {key}", None if equal else "pixels differ")

    def _prompt_cases(self, index: int, expected: dict[str, Any]) -> Iterator[Case]:
        name, request, errors = expected["image"], self._request(expected), self._errors(index)
        with PromptRun(self._loaded, self._prompt_config) as run:
            model = self._loaded.model
            with errors.routing.decided(model, DEVIATIONS) if errors else nullcontext():
                tensors = prompt_tensors(run, request)
            ids = [token.id for token in run.sequence.tokens[1:]]
        yield Case(f"{name} query_prompt_tokens", _differs(ids, expected["query_prompt_tokens"]))
        for key, actual in tensors.items():
            stored = self._tensors.get(f"{index}.{HIDDEN if key == DECODED_HIDDEN else key}")
            if stored is not None:
                bounds = [_float32_bound(key, stored), *([errors.tensors[key]] if errors else [])]
                yield _compared(f"{name} {key}", actual, stored, bounds)

    @property
    def _prompt_config(self) -> EngineConfig:
        # Which experts a token goes to is followed from outside of the model where numbers are rounded, which a
        # captured graph would not do.
        follows = not self._is_exact and self._loaded.model.config.text.moe is not None
        return replace(self._config, cuda_graphs=False) if follows else self._config

    def _errors(self, index: int) -> PromptErrors | None:
        return None if self._is_exact else self._all_errors[index]

    @cached_property
    def _all_errors(self) -> list[PromptErrors]:
        requests = [self._request(image) for image in self._expected["images"]]
        return expected_errors(self._config, self._formats, requests)

    def _request(self, expected: dict[str, Any]) -> Query:
        """The prompt whose tensors are compared: the first question, unless the fixture names one."""
        questions = (call["args"]["question"] for call in expected["calls"] if call["skill"] == "query")
        return Query(expected.get("query_prompt") or next(questions), self._data(expected["image"]))

    async def _call_cases(self) -> list[Case]:
        engine = LocalEngine(self._loaded, self._config)
        try:
            calls = [(image["image"], call) for image in self._expected["images"] for call in image["calls"]]
            calls += [(None, call) for call in self._expected.get("text_only", [])]
            return await asyncio.gather(*(self._call_case(engine, image, call) for image, call in calls))
        finally:
            engine.close()

    async def _call_case(self, engine: LocalEngine, image: str | None, call: dict[str, Any]) -> Case:
        data = None if image is None else self._data(image)
        arguments = ", ".join(f"{key}={value!r}" for key, value in call["args"].items())
        name = f"{image or 'no image'} {call['skill']}({arguments})"
        try:
            finished = await engine.submit(request_of(call, data, self._expected["max_tokens"])).result()
        except KestrelError as error:
            return Case(name, f"{type(error).__name__}: {error}")
        answer = answer_of(finished.output)
        return Case(name, answer_differs(answer, call["expect"]), digest=json.dumps(answer))

    def _data(self, image: str) -> bytes:
        return (self._folder / image).read_bytes()


def _differs(actual: Any, expected: Any) -> str | None:
    return None if actual == expected else f"expected {expected}, got {actual}"


def _float32_bound(key: str, expected: Tensor) -> LargestError:
    return LargestError(FLOAT32_LOGIT if key == LOGITS else FLOAT32_RELATIVE * expected.abs().max().item())


def _compared(name: str, actual: Tensor, expected: Tensor, bounds: Sequence[LargestError | ExpectedError]) -> Case:
    """A tensor's case: one bound that holds is enough, since parts of a model may not be rounded at all."""
    if actual.shape != expected.shape:
        return Case(name, f"expected shape {list(expected.shape)}, got {list(actual.shape)}")
    comparisons = [bound.compare(actual, expected) for bound in bounds]
    comparison = next((comparison for comparison in comparisons if comparison.holds), comparisons[-1])
    digest = hashlib.sha256(actual.contiguous().numpy().tobytes()).hexdigest()
    return Case(name, None if comparison.holds else str(comparison), comparison, digest)
