"""The tables of the structure: what is counted, and that the product can be read."""

from pathlib import Path

import pytest

from tools import prose, structure
from tools.source import Module, cycles, imports_of


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """A module of a product that has no other."""
    path = tmp_path / "some.py"
    path.write_text(
        '"""Of a model: its size."""\n'
        "import os\n"
        "import torch\n"
        "from grpc._cython import cygrpc\n"
        "import kestrel_grpc.server as _server\n"
        "class Size:\n"
        '    """Returns nothing."""\n'
        "    def of(self):\n"
        '        """Whether it is small."""\n'
        "        import kestrel_grpc.cli\n"
        "        return torch._C, self._of, os._exit, cygrpc, vars(torch.cuda)['_sleep']\n"
    )
    found = Module("kestrel_grpc.some", path)
    monkeypatch.setattr(structure, "product_modules", lambda: [found])
    monkeypatch.setattr(structure, "modules_of", lambda folder, package: iter(()))
    for user in (structure, prose):
        monkeypatch.setattr(user, "CHECKOUT", tmp_path)
    return found


def test_docstrings_without_a_sentence_are_counted(module: Module):
    assert list(structure.fragments()) == ["some.py:1: Of a model: its size.", "some.py:9: Whether it is small."]


def test_private_names_of_other_packages_are_counted_and_own_ones_are_not(module: Module):
    assert list(structure.private_parts()) == [
        "some.py:4: grpc._cython.cygrpc",
        "some.py:11: torch._C",
        "some.py:11: torch.cuda._sleep",
    ]


def test_only_imports_at_the_time_of_import_make_a_cycle(module: Module):
    names = ["kestrel_grpc.server", "kestrel_grpc.cli"]
    assert imports_of(module, names) == {"kestrel_grpc.server"}
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == [["b", "c"], ["d"]]


def test_every_line_of_the_product_belongs_to_one_feature_and_one_package():
    *_, total = structure.line_table()
    product = int(total.split("|")[2].replace(",", ""))
    lines = [int(row.split("|")[3].replace(",", "")) for row in structure.package_table()[2:]]
    assert product == sum(lines) > 10_000
