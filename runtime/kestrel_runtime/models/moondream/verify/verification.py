"""Compares the crops of a fixture's images, and the tensors of one prompt about each, with those of the reference.

Bounds are fixed in float32 and come from simulated rounding in shorter formats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Query, Request
from kestrel_runtime.imaging.decoding import decode_image
from kestrel_runtime.models.family import Case, Fixture, Prepare, PromptRecord, Verification
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.verify.prompt_run import (
    DECODED_HIDDEN,
    HIDDEN,
    LOGITS,
    PromptRun,
    prompt_tensors,
)
from kestrel_runtime.models.moondream.verify.simulated_rounding import Formats, PromptErrors, expected_errors
from kestrel_runtime.models.moondream.verify.tolerances import (
    DEVIATIONS,
    FLOAT32_LOGIT,
    FLOAT32_RELATIVE,
    ExpectedError,
    LargestError,
)
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping


def verification(model: Moondream, config: EngineConfig) -> Verification:
    """Returns the family's part of `kestrel-grpc verify`."""
    formats = Formats.of(config, model)
    simulated: dict[tuple[Request, ...], list[PromptErrors]] = {}

    def errors_of(requests: tuple[Request, ...], prepare: Prepare) -> list[PromptErrors]:
        if requests not in simulated:
            simulated[requests] = expected_errors(config, formats, requests, prepare)
        return simulated[requests]

    def tensor_cases(fixture: Fixture, prepare: Prepare) -> Iterator[Case]:
        is_exact = formats.shortest == torch.float32
        return _TensorCases(model, config, fixture, prepare, None if is_exact else errors_of).run()

    def record_prompt(request: Query, prepare: Prepare) -> PromptRecord:
        (file,) = request.images
        assert isinstance(file, bytes), "a prompt about an image file"
        run = PromptRun(model, config, prepare)
        tensors = prompt_tensors(run, request)
        image = decode_image(file, max_image_pixels=config.max_image_pixels)
        crops = MoondreamCropping(model.config.vision).make_crops(image)
        facts = {
            "tiling": [crops.rows, crops.columns],
            "n_crops": crops.num_crops,
            "query_prompt_tokens": [token.id for token in run.sequence.tokens[1:]],
        }
        return PromptRecord(facts, {key: value for key, value in tensors.items() if key != DECODED_HIDDEN})

    return Verification(formats.shortest == torch.float32, tensor_cases, record_prompt)


class _TensorCases:
    """One comparison of a fixture's tensors; `errors_of` simulates the errors of prompts in shorter formats."""

    def __init__(
        self,
        model: Moondream,
        config: EngineConfig,
        fixture: Fixture,
        prepare: Prepare,
        errors_of: Callable[[tuple[Request, ...], Prepare], list[PromptErrors]] | None,
    ) -> None:
        self._model = model
        self._config = config
        self._fixture = fixture
        self._prepare = prepare
        self._errors_of = errors_of

    def run(self) -> Iterator[Case]:
        for index, image in enumerate(self._fixture.expected["images"]):
            yield from self._crop_cases(index, image)
            yield from self._prompt_cases(index, image)
        yield from self._conversation_cases()

    def _crop_cases(self, index: int, expected: dict[str, Any]) -> Iterator[Case]:
        name = expected["image"]
        image = decode_image(self._fixture.data(name), max_image_pixels=self._config.max_image_pixels)
        crops = MoondreamCropping(self._model.config.vision).make_crops(image)
        if "tiling" in expected:  # a reference may not report it
            shape = [[crops.rows, crops.columns], crops.num_crops]
            yield Case(f"{name} crop grid", _differs(shape, [expected["tiling"], expected["n_crops"]]))
        for key, place in (("global_crop_u8", 0), ("last_crop_u8", -1)):
            if (pixels := self._fixture.tensors.get(f"{index}.{key}")) is not None:
                equal = np.array_equal(pixels.numpy(), crops.pixels[place])
                yield Case(f"{name} {key}", None if equal else "pixels differ")

    def _prompt_cases(self, index: int, expected: dict[str, Any]) -> Iterator[Case]:
        if not any(key.startswith(f"{index}.") for key in self._fixture.tensors):
            return  # nor its tensors
        name, errors = expected["image"], self._errors(index)
        tensors, ids = self._run(self._request(expected), errors)
        if "query_prompt_tokens" in expected:
            yield Case(f"{name} query_prompt_tokens", _differs(ids, expected["query_prompt_tokens"]))
        for key, actual in tensors.items():
            stored = self._fixture.tensors.get(f"{index}.{HIDDEN if key == DECODED_HIDDEN else key}")
            if stored is not None:
                bounds = [_float32_bound(key, stored), *([errors.tensors[key]] if errors else [])]
                yield _compared(f"{name} {key}", actual, stored, bounds)

    def _conversation_cases(self) -> Iterator[Case]:
        """Compares the prompts with several images, in which the positions of each image attend to each other."""
        requests = {
            index: self._fixture.chat(conversation)
            for index, conversation in enumerate(self._fixture.conversations)
        }
        requests = {index: request for index, request in requests.items() if len(request.images) > 1}
        errors: Sequence[PromptErrors | None] = [None] * len(requests)
        if self._errors_of is not None and requests:
            errors = self._errors_of(tuple(requests.values()), self._prepare)
        for (index, request), errors_of_it in zip(requests.items(), errors, strict=True):
            conversation, stored = self._fixture.conversations[index], self._fixture.conversation_tensors
            tensors, ids = self._run(request, errors_of_it)
            name = f"conversation {conversation['name']!r}"
            wanted = [token for token in conversation["prompt"] if not isinstance(token, str)]
            yield Case(f"{name} prompt", _differs(ids, wanted[1:]))
            for key, stored_name, every in ((HIDDEN, "last_hidden", 1), (LOGITS, "logits_every_9th", 9)):
                expected = stored[f"{index}.{stored_name}"]
                bounds: list[LargestError | ExpectedError] = [_float32_bound(key, expected)]
                if errors_of_it:
                    simulated = errors_of_it.tensors[key]
                    bounds.append(replace(simulated, elements=simulated.elements[::every]))
                yield _compared(f"{name} {stored_name}", tensors[key][::every], expected, bounds)

    def _run(self, request: Request, errors: PromptErrors | None) -> tuple[dict[str, Tensor], list[int]]:
        """Returns the tensors of a prompt, and its ids after the first one."""
        run = PromptRun(self._model, self._prompt_config, self._prepare)
        with errors.routing.decided(self._model, DEVIATIONS) if errors else nullcontext():
            tensors = prompt_tensors(run, request)
        return tensors, [token.id for token in run.sequence.tokens[1:]]

    @property
    def _prompt_config(self) -> EngineConfig:
        # With rounding, hooks on the routers record and replace their choices. A captured graph would not run them.
        follows = self._errors_of is not None and self._model.config.text.moe is not None
        return replace(self._config, cuda_graphs=False) if follows else self._config

    def _errors(self, index: int) -> PromptErrors | None:
        if self._errors_of is None:
            return None
        requests = tuple(self._request(image) for image in self._fixture.expected["images"])
        return self._errors_of(requests, self._prepare)[index]

    def _request(self, expected: dict[str, Any]) -> Query:
        """Returns the prompt whose tensors are compared: the first question, unless the fixture names one."""
        questions = (call["args"]["question"] for call in expected["calls"] if call["skill"] == "query")
        return Query(expected.get("query_prompt") or next(questions), self._fixture.data(expected["image"]))


def _differs(actual: Any, expected: Any) -> str | None:
    return None if actual == expected else f"expected {expected}, got {actual}"


def _float32_bound(key: str, expected: Tensor) -> LargestError:
    return LargestError(FLOAT32_LOGIT if key == LOGITS else FLOAT32_RELATIVE * expected.abs().max().item())


def _compared(name: str, actual: Tensor, expected: Tensor, bounds: Sequence[LargestError | ExpectedError]) -> Case:
    """Returns the case of a tensor. One bound is enough, since parts of a model may not be rounded at all."""
    if actual.shape != expected.shape:
        return Case(name, f"expected shape {list(expected.shape)}, got {list(actual.shape)}")
    comparisons = [bound.compare(actual, expected) for bound in bounds]
    comparison = next((comparison for comparison in comparisons if comparison.holds), comparisons[-1])
    digest = hashlib.sha256(actual.contiguous().numpy().tobytes()).hexdigest()
    return Case(name, None if comparison.holds else str(comparison), comparison, digest)
