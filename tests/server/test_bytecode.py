"""Where a server keeps the bytecode of libraries that have none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from kestrel_grpc.bytecode import keep_bytecode
keep_bytecode()
import torch
print(sys.pycache_prefix, sys.dont_write_bytecode)
"""


def kept(libraries: Path, cache: Path, *, has_bytecode: bool = False, **environment: str) -> tuple[str, str]:
    """Run with a library of that name that has one module; returns the folder of bytecode and whether none is
    written."""
    package = libraries / "torch"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("value = 1\n")
    if has_bytecode:
        subprocess.run([sys.executable, "-m", "compileall", "-q", package], check=True)
    own = {"PYTHONPATH": os.pathsep.join((str(libraries), os.getcwd())), "TRITON_CACHE_DIR": str(cache)}
    base = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=base | own | environment
    )
    prefix, writes_none = done.stdout.split()
    return prefix, writes_none


def test_bytecode_that_python_may_not_write_is_kept_beside_the_kernels(tmp_path: Path) -> None:
    cache = tmp_path / "kernels"
    assert kept(tmp_path, cache, PYTHONDONTWRITEBYTECODE="1") == (str(cache / "kestrel-bytecode"), "False")
    assert list(cache.rglob("torch/__init__.*.pyc"))
    assert (cache / "kestrel-bytecode").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("has_bytecode", "environment"),
    [(True, {"PYTHONDONTWRITEBYTECODE": "1"}), (False, {})],
    ids=["there is some", "python writes it itself"],
)
def test_python_does_as_always_where_there_is_bytecode_or_will_be(
    tmp_path: Path, has_bytecode: bool, environment: dict[str, str]
) -> None:
    prefix, _ = kept(tmp_path, tmp_path / "kernels", has_bytecode=has_bytecode, **environment)
    assert prefix == "None"


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "kernels" / "kestrel-bytecode"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert kept(tmp_path, tmp_path / "kernels", PYTHONDONTWRITEBYTECODE="1")[0] == "None"
