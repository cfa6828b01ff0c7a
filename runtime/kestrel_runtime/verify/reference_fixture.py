"""Runs every case of a reference fixture and says which hold.

A fixture is a folder with a small checkpoint, images, and the reference's answers in `expected.json` and
`expected.safetensors`. The model family compares tensors. Answers are compared where the model computes in float32:
in a shorter format one rounding may change a greedy answer of a random model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError, KestrelError
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.verification import Case, Fixture
from kestrel_runtime.verify.answers import answer_differs, answer_of, request_of
from kestrel_runtime.verify.preparing import preparing

_CACHE_TOKENS = 8192
"""The prompts are few, and several folders may be checked side by side."""


class ReferenceFixture:
    """One fixture, loaded; `run` or `cases` goes through its cases, and may do so again."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        """Load the checkpoint, for the device, types and paths of `config`.

        Raises `CheckpointError` where the folder is not a fixture.
        """
        try:
            expected = json.loads((folder / "expected.json").read_text())
            self._fixture = Fixture(folder, expected, load_file(folder / "expected.safetensors"))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder} is no reference fixture: {Path(error.filename).name} is missing"
            ) from None
        self._config = replace(
            config,
            model=str(folder),
            num_kv_pages=config.num_kv_pages or _CACHE_TOKENS // config.page_size,
            max_queued_requests=len(expected["images"]) * 100 + 100,
        )
        self._loaded = LoadedModel.load(self._config)
        self._verification = self._loaded.family.verification(self._loaded.model, self._config)

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
        with preparing(self._loaded, self._config) as prepare:
            yield from self._verification.tensor_cases(self._fixture, prepare)
        if self._verification.is_exact:
            yield from asyncio.run(self._call_cases())

    async def _call_cases(self) -> list[Case]:
        engine = LocalEngine(self._loaded, self._config)
        try:
            expected = self._fixture.expected
            calls = [(image["image"], call) for image in expected["images"] for call in image["calls"]]
            calls += [(None, call) for call in expected.get("text_only", [])]
            return await asyncio.gather(*(self._call_case(engine, image, call) for image, call in calls))
        finally:
            engine.close()

    async def _call_case(self, engine: LocalEngine, image: str | None, call: dict[str, Any]) -> Case:
        data = None if image is None else self._fixture.data(image)
        arguments = ", ".join(f"{key}={value!r}" for key, value in call["args"].items())
        name = f"{image or 'no image'} {call['skill']}({arguments})"
        try:
            finished = await engine.submit(request_of(call, data, self._fixture.expected["max_tokens"])).result()
        except KestrelError as error:
            return Case(name, f"{type(error).__name__}: {error}")
        answer = answer_of(finished.output)
        return Case(name, answer_differs(answer, call["expect"]), digest=json.dumps(answer))
