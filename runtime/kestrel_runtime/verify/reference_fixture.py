"""Runs every case of a reference fixture and reports which cases pass.

A fixture is a folder with a small checkpoint, images, and the reference's answers in `expected.json` and
`expected.safetensors`. It may have conversations with their answers in `conversations.json` and
`conversations.safetensors`. The model family compares tensors. Answers are compared if the model computes in
float32: in a shorter format one rounding may change a greedy answer of a random model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError, KestrelError
from kestrel_runtime.api.requests import Request
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.family import Case, Fixture
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.verify.answers import answer_differs, answer_of, request_of
from kestrel_runtime.verify.preparing import preparing

_CACHE_TOKENS = 8192
"""The tokens that the KV cache holds. The prompts are few, and several folders may be checked at the same time."""


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """One call of a fixture and the answer of an engine."""

    image: str | None
    """The file of the image; those of several are joined by "+"."""
    call: Mapping[str, Any]
    """The call as in `expected.json`; without `expect` if the reference has no answer."""
    answer: dict[str, Any] | None
    refused: str = ""
    """The error, if there is no answer."""

    @property
    def name(self) -> str:
        """The name of the call: the image, the skill and the arguments."""
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.call["args"].items())
        return f"{self.image or 'no image'} {self.call['skill']}({arguments})"

    @property
    def complaint(self) -> str | None:
        """The difference from the reference's answer; None if there is none, or if the reference has no answer."""
        if self.answer is None:
            return self.refused
        return answer_differs(self.answer, self.call["expect"]) if "expect" in self.call else None


class ReferenceFixture:
    """A loaded fixture. `run` and `cases` compare its cases, any number of times."""

    def __init__(self, folder: Path, config: EngineConfig, *, has_checkpoint: bool = True) -> None:
        """Loads the checkpoint, for the device, data types and backends of `config`.

        `has_checkpoint` False: the folder has answers alone, and `config` names the model. Raises `CheckpointError`
        if the folder is not a fixture.
        """
        try:
            self.expected = _with_scores(folder, json.loads((folder / "expected.json").read_text()))
            self._fixture = Fixture(
                folder, self.expected, load_file(folder / "expected.safetensors"), *_conversations(folder)
            )
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder} is no reference fixture: {Path(error.filename).name} is missing"
            ) from None
        self.config = replace(
            config,
            model=str(folder) if has_checkpoint else config.model,
            num_kv_pages=config.num_kv_pages or _CACHE_TOKENS // config.page_size,
            max_queued_requests=len(self.expected["images"]) * 100 + 100,
        )
        self.loaded = LoadedModel.load(self.config)
        self._verification = self.loaded.family.verification(self.loaded.model, self.config)

    @property
    def is_exact(self) -> bool:
        """True if everything is computed in float32, so that answers must be equal, too."""
        return self._verification.is_exact

    def run(self, print_line: Callable[[str], None]) -> tuple[int, int]:
        """Prints a line per case. Returns how many cases passed and how many failed."""
        num_passed = num_failed = 0
        for case in self.cases():
            print_line(str(case))
            num_passed += case.complaint is None
            num_failed += case.complaint is not None
        return num_passed, num_failed

    def cases(self) -> Iterator[Case]:
        """Computes everything and compares it, case by case."""
        yield from self.tensor_cases()
        if self.is_exact:
            engine = LocalEngine(self.loaded, self.config)
            try:
                answered = asyncio.run(self.answers(engine))
            finally:
                engine.close()
            yield from (Case(call.name, call.complaint, digest=json.dumps(call.answer)) for call in answered)

    def tensor_cases(self) -> Iterator[Case]:
        """Computes the tensors and compares them, case by case."""
        with preparing(self.loaded, self.config) as prepare:
            yield from self._verification.tensor_cases(self._fixture, prepare)

    async def answers(self, engine: LocalEngine) -> list[AnsweredCall]:
        """Returns the engine's answers to all calls, which run together."""
        calls = [(image["image"], call) for image in self.expected["images"] for call in image["calls"]]
        calls += [(None, call) for call in self.expected.get("text_only", [])]
        max_tokens, data = self.expected["max_tokens"], self._fixture.data
        asked = [
            (image, call, request_of(call, None if image is None else data(image), max_tokens))
            for image, call in calls
        ]
        for each in self._fixture.conversations:
            pictures = "+".join(name for message in each["messages"] for name in message.get("images", ()))
            call = {"skill": "chat", "args": {"name": each["name"]}, "expect": each["expect"]}
            asked.append((pictures or None, call, self._fixture.chat(each)))
        return await asyncio.gather(*(self._answer(engine, *one) for one in asked))

    async def _answer(
        self, engine: LocalEngine, image: str | None, call: dict[str, Any], request: Request
    ) -> AnsweredCall:
        try:
            finished = await engine.submit(request).result()
        except KestrelError as error:
            return AnsweredCall(image, call, None, f"{type(error).__name__}: {error}")
        return AnsweredCall(image, call, answer_of(finished.output))


def _with_scores(folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Returns the answers of a reference, which makes no scores, with those of `scores.json` where there is one."""
    path = folder / "scores.json"
    known = json.loads(path.read_text()) if path.exists() else []
    for image in expected["images"]:
        for call in image["calls"]:
            asked = {"image": image["image"], "skill": call["skill"], "args": call["args"]}
            for row in known:
                if row.items() >= asked.items():
                    call["expect"]["scores"] = row["scores"]
    return expected


def _conversations(folder: Path) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Tensor]]:
    """Returns the conversations of a folder, each with its limit of tokens, and their tensors."""
    file = folder / "conversations.json"
    if not file.exists():
        return (), {}
    fixture = json.loads(file.read_text(encoding="utf-8"))
    limit = {"max_tokens": fixture["max_tokens"]}
    return [each | limit for each in fixture["conversations"]], load_file(folder / "conversations.safetensors")
