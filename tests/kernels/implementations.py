"""Every implementation of an operation that can run here, for tests that hold all of them to the definition."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from kestrel_ops import reference
from kestrel_ops.dispatch import function_of, has_implementation, implementation_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT8 = torch.float8_e4m3fn
# Relative errors of rows rounded once.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4, FLOAT8: 0.04}


def implementations(operation, names=("reference", "triton", "cuda", "library")):
    """Functions by implementation, as parameters of a test are. Without a GPU CUDA has the experts of Triton."""
    if DEVICE == "cpu" and operation == "mixture_of_experts":
        names = [name for name in names if name != "cuda"]
    definition = [getattr(reference, operation)] if "reference" in names else []
    others = [name for name in names if name != "reference" and has_implementation(name, operation)]
    return definition + [function_of(name, operation) for name in others]


def in_pairs(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of values of parameters, one of each: all of them on a device. In the interpreter, which takes a
    hundred times as long, so few that any two values of different parameters still come together."""
    every = list(itertools.product(*(range(len(each)) for each in values)))
    chosen = every
    if DEVICE == "cpu":
        chosen, open_pairs = [], {pair for each in every for pair in _pairs(each)}
        while open_pairs:
            best = max(every, key=lambda each: len(open_pairs.intersection(_pairs(each))))
            chosen.append(best)
            open_pairs.difference_update(_pairs(best))
    return [tuple(own[place] for own, place in zip(values, each, strict=True)) for each in chosen]


def _pairs(places: tuple[int, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(places), 2))


def implementation_name(function):
    """`reference`, `triton`, `cuda` or `library`."""
    return implementation_of(function)


def dequantised(rows, scale):
    """Rows as float32, scaled back where they were scaled."""
    return rows.float() if scale is None else rows.float() * scale


def relative_error(got, wanted):
    """‖got - wanted‖ / ‖wanted‖, in float64."""
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()
