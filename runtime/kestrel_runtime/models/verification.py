"""How a model family takes part in `kestrel-grpc verify`: by comparing tensors on the way to an answer.

A reference fixture is a folder with a small checkpoint, images, and what a reference computed from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kestrel_runtime.api.requests import Request
from kestrel_runtime.scheduling.sequence import Sequence

Prepare = Callable[[Request], Sequence]
"""Decodes, tiles and tokenises a request, as the engine does before it is scheduled."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of an error and its bound."""

    measure: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the error is a number within its bound."""
        return self.error <= self.tolerance

    @property
    def share(self) -> float:
        """The error as a part of its bound; infinite where it is no number."""
        if math.isnan(self.error):
            return math.inf
        return self.error / max(self.tolerance, torch.finfo(torch.float32).tiny)

    def __str__(self) -> str:
        return f"{self.measure} {self.error:.2e}, tolerance {self.tolerance:.2e}"


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


@dataclass(frozen=True, slots=True)
class Fixture:
    """What the reference computed."""

    folder: Path
    expected: Mapping[str, Any]
    """`expected.json`. `images` has for each image its file name, and `calls` with their answers."""
    tensors: Mapping[str, Tensor]
    """`expected.safetensors`; the names are the family's own."""

    def data(self, image: str) -> bytes:
        """The bytes of an image."""
        return (self.folder / image).read_bytes()


class Verification(NamedTuple):
    """What a family compares of one model under one configuration."""

    is_exact: bool
    """Whether all is computed in float32, so that greedy answers must be equal too."""
    tensor_cases: Callable[[Fixture, Prepare], Iterator[Case]]
