from dataclasses import fields
from pathlib import Path

import pytest
import torch

from bench.correctness import kernels
from bench.correctness.kernel_cases import are_equal, cases, error
from kestrel_ops import Kernels, reference

CPU = torch.device("cpu")
CHECKOUT = Path(__file__).resolve().parent.parent.parent


def definition(operation):
    return getattr(reference, operation)


def test_every_operation_has_cases_and_its_definition_gives_the_same_twice():
    found = [case for seed in (0, 1) for case in cases(seed)]
    assert {case.operation for case in found} == {field.name for field in fields(Kernels)}
    for case in found:
        first, again = (case.run(definition(case.operation), CPU) for _ in range(2))
        assert are_equal(first, again), case.name
        assert error(first, again) == 0, case.name


def test_a_seed_gives_the_same_cases_every_time_and_another_one_others():
    names = [[case.name for case in cases(seed)] for seed in (0, 0, 1)]
    assert names[0] == names[1] != names[2]


def test_what_is_wrong_or_differs_from_run_to_run_is_found_and_printed(monkeypatch, capsys):
    runs = iter(range(10_000))

    def function(implementation, operation):
        right = definition(operation)

        def add_layer_norm(hidden, *more):
            out, scale = right(hidden, *more)
            hidden[0, -1] += next(runs) % 3  # an addition too many, at times
            return out, scale

        return right if implementation == "reference" or operation != "add_layer_norm" else add_layer_norm

    monkeypatch.setattr("kestrel_ops.dispatch.function_of", function)
    rows = kernels.check_all([0], 3, "cpu", 1)
    bad = [row for row in rows if kernels.is_wrong(row) or not row["same_bits"]]
    assert len(bad) == 4
    assert {row["operation"] for row in bad} == {"add_layer_norm"}
    assert "runs differ" in capsys.readouterr().out


def test_a_kernel_that_fails_is_a_wrong_one(monkeypatch):
    def function(implementation, operation):
        def fails(*_, **__):
            raise RuntimeError("no such luck")

        return definition(operation) if implementation == "reference" else fails

    monkeypatch.setattr("kestrel_ops.dispatch.function_of", function)
    rows = kernels.check(0, 2, "cpu")
    assert len(rows) > 20
    assert all(kernels.is_wrong(row) and "no such luck" in row["failure"] for row in rows)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_infinitely_wrong(value):
    assert error([torch.tensor([1.0, value])], [torch.ones(2)]) == float("inf")
