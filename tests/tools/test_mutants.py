"""Mutants are changes of one function, the same for the same seed."""

import ast
from pathlib import Path

import pytest

from tools import mutants
from tools.source import Module

SOURCE = """
def least(values, limit):
    if not values or limit < 1:
        return None
    print(values)
    return min(values) + 1
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some.py"
    path.write_text(SOURCE)
    monkeypatch.setattr(mutants, "product_modules", lambda: [Module("kestrel_grpc.some", path)])


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("least: and or 1", "    if not values and limit < 1:"),
        ("least: compare 1", "    if not values or limit <= 1:"),
        ("least: constant 1", "    if not values or limit < 2:"),
        ("least: condition 1", "    if not (not values or limit < 1):"),
        ("least: call 1", "    None"),
        ("least: return 2", "    return None"),
        ("least: arithmetic 1", "    return min(values) - 1"),
    ],
)
@pytest.mark.usefixtures("own")
def test_an_operator_changes_one_place(name: str, line: str):
    (mutant,) = (mutant for mutant in mutants.all_mutants() if mutant.name == name)
    before = ast.unparse(ast.parse(SOURCE)).splitlines()
    after = mutant.source().splitlines()
    assert [new for old, new in zip(before, after, strict=True) if old != new] == [line]


def test_the_same_seed_draws_the_same_mutants_of_different_functions():
    names = [mutant.name for mutant in mutants.drawn(1, 60)]
    assert names == [mutant.name for mutant in mutants.drawn(1, 60)]
    assert len({name.partition(":")[0] for name in names}) == 60
    assert names != [mutant.name for mutant in mutants.drawn(2, 60)]


def test_a_mutant_is_tried_by_the_tests_that_mirror_its_module():
    (mutant, *_) = (
        mutant for mutant in mutants.all_mutants() if mutant.module.name == "kestrel_grpc.access.limits"
    )
    first, *_ = mutants.tests_of(mutant.module)
    assert first.startswith("tests/server/access")
