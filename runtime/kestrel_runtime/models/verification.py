"""Interface of a model family to `kestrel-grpc verify`: the family compares tensors within the model.

A reference fixture is a folder with a small checkpoint, images, and the answers and tensors of a reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Query, Request
from kestrel_runtime.scheduling.sequence import Sequence

Prepare = Callable[[Request], Sequence]
"""Decodes an image, makes its crops and tokenises a request, as the engine does before it is scheduled."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of an error and its bound."""

    measure: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the error is within its bound and not NaN."""
        return self.error <= self.tolerance

    @property
    def share(self) -> float:
        """The error divided by its bound; infinite for NaN."""
        if math.isnan(self.error):
            return math.inf
        return self.error / max(self.tolerance, torch.finfo(torch.float32).tiny)

    def __str__(self) -> str:
        return f"{self.measure} {self.error:.2e}, tolerance {self.tolerance:.2e}"


@dataclass(frozen=True, slots=True)
class Case:
    """The result of one case."""

    name: str
    complaint: str | None
    """Why the case fails; None if it passes."""
    comparison: Comparison | None = None
    """The errors of a tensor of numbers."""
    digest: str = ""
    """Equal for two runs with the same bits or the same answer."""

    def __str__(self) -> str:
        if self.complaint is not None:
            return f"FAILED  {self.name}: {self.complaint}"
        return f"ok      {self.name}" + ("" if self.comparison is None else f": {self.comparison}")


@dataclass(frozen=True, slots=True)
class Fixture:
    """Answers and tensors of the reference."""

    folder: Path
    expected: Mapping[str, Any]
    """`expected.json`. `images` has for each image its file name, and `calls` with their answers."""
    tensors: Mapping[str, Tensor]
    """`expected.safetensors`; the names are the family's own."""

    def data(self, image: str) -> bytes:
        """The bytes of an image."""
        return (self.folder / image).read_bytes()


class PromptRecord(NamedTuple):
    """What a family records of one prompt about one image."""

    facts: Mapping[str, Any]
    """Added to the image's entry of `expected.json`."""
    tensors: Mapping[str, Tensor]


def _nothing_recorded(request: Query, prepare: Prepare) -> PromptRecord:
    return PromptRecord({}, {})


class Verification(NamedTuple):
    """The comparisons of one model under one configuration, by its family."""

    is_exact: bool
    """Whether everything is computed in float32. Greedy answers must then be equal, too."""
    tensor_cases: Callable[[Fixture, Prepare], Iterator[Case]]
    record_prompt: Callable[[Query, Prepare], PromptRecord] = _nothing_recorded
    """Compute what `tensor_cases` compares, to write it to a fixture."""


def plain_float32(config: EngineConfig) -> EngineConfig:
    """The same model and device on the plain path in float32, which defines the correct results."""
    return replace(
        config,
        dtype="float32",
        text_path="plain",
        vision_path="plain",
        kv_dtype="auto",
        expert_dtype="auto",
        cuda_graphs=None,
        kernels=(),
    )
