"""A server keeps the bytecode of libraries that have none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kestrel_grpc.process.bytecode_writer import imported_by

SCRIPT = """
import os, sys
from kestrel_grpc.process.bytecode import compile_ahead, keep_bytecode, use_kept_bytecode
if "AHEAD" in os.environ:
    os.sched_getaffinity = lambda _: {0, 1, 2, 3}
    compile_ahead(["torch"]).wait()
use_kept_bytecode()
prefix = sys.pycache_prefix
import other, torch
writing = keep_bytecode()
print(prefix, other.__cached__, "nothing" if writing is None else writing.wait())
"""
NOT_WRITTEN = {"PYTHONDONTWRITEBYTECODE": "1"}


class Libraries:
    """Two libraries, one of the name that counts, and a folder of kernels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernels = folder / "kernels"
        self.kept = self.kernels / "kestrel-bytecode"
        for name in ("torch", "other"):
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text("value = 1\n")

    def compile(self) -> None:
        subprocess.run([sys.executable, "-m", "compileall", "-q", self.folder / "torch"], check=True)

    def start(self, **environment: str) -> list[str]:
        """Where bytecode is found, that of the other library, and how writing it has ended."""
        own = {
            "PYTHONPATH": os.pathsep.join((str(self.folder), os.getcwd())),
            "TRITON_CACHE_DIR": str(self.kernels),
        }
        base = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=base | own | environment)
        return done.stdout.split()


@pytest.fixture
def libraries(tmp_path: Path) -> Libraries:
    return Libraries(tmp_path)


def test_bytecode_that_python_may_not_write_is_kept_for_later_starts(
    libraries: Libraries,
) -> None:
    prefix, _, ended = libraries.start(**NOT_WRITTEN)
    assert (prefix, ended) == ("None", "0")
    assert libraries.kept.stat().st_mode & 0o777 == 0o700
    assert {file.parent.name for file in libraries.kept.rglob("__init__.*.pyc")} >= {"torch", "other"}
    prefix, cached, ended = libraries.start(**NOT_WRITTEN)
    assert (prefix, ended) == (str(libraries.kept), "nothing")
    assert cached.startswith(prefix)


def test_python_does_as_always_where_there_is_bytecode(libraries: Libraries) -> None:
    libraries.compile()
    assert libraries.start(**NOT_WRITTEN)[::2] == ["None", "nothing"]


def test_python_does_as_always_where_it_writes_bytecode_itself(libraries: Libraries) -> None:
    assert libraries.start()[::2] == ["None", "nothing"]


def test_python_does_as_always_where_a_variable_says_where_bytecode_is(
    libraries: Libraries, tmp_path: Path
) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    assert libraries.start(**NOT_WRITTEN, PYTHONPYCACHEPREFIX=elsewhere)[::2] == [elsewhere, "nothing"]


def test_a_folder_that_others_can_write_is_not_used(libraries: Libraries) -> None:
    libraries.start(**NOT_WRITTEN)
    libraries.kept.chmod(0o777)
    assert libraries.start(**NOT_WRITTEN)[::2] == ["None", "nothing"]


def test_a_folder_that_cannot_be_made_costs_the_bytecode_alone(libraries: Libraries) -> None:
    libraries.kernels.write_text("a file")
    assert libraries.start(**NOT_WRITTEN)[::2] == ["None", "nothing"]


def test_the_first_start_has_bytecode_compiled_ahead_of_its_imports(libraries: Libraries) -> None:
    (libraries.folder / "torch" / "__init__.py").write_text("from other import part\n")
    (libraries.folder / "other" / "part.py").write_text("value = 2\n")
    prefix, cached, ended = libraries.start(**NOT_WRITTEN, AHEAD="1")
    assert (prefix, ended) == (str(libraries.kept), "0")
    assert Path(cached).exists()
    assert list(libraries.kept.rglob("part.*.pyc"))
    assert list(libraries.kept.rglob("*.kept"))


def test_imports_at_the_top_level_are_found() -> None:
    source = """
from typing import TYPE_CHECKING
from . import near
from ..above.far import name, other
try:
    import a.b
except ImportError:
    from c import *
if TYPE_CHECKING:
    import for_types
else:
    import d
def late():
    import e
"""
    found = set(imported_by(compile(source, "", "exec"), "one.two"))
    assert found >= {"one.two", "one.two.near", "one.above.far", "one.above.far.other", "a.b", "c", "d"}
    assert not found & {"for_types", "e", "c.*"}
