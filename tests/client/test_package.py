"""The package as its users meet it."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kestrel_client

PACKAGE = Path(kestrel_client.__file__).parent


def test_everything_public_is_exported_and_nothing_else() -> None:
    public = {
        name
        for name, value in vars(kestrel_client).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert public == set(kestrel_client.__all__)


def test_importing_loads_neither_torch_nor_pillow_nor_the_server_and_warns_of_nothing() -> None:
    code = (
        "import sys, kestrel_client, kestrel_client.v1.engine_service_pb2_grpc;"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    assert run.stderr == ""
    assert not {"torch", "numpy", "PIL", "kestrel_grpc", "kestrel_runtime"} & set(run.stdout.split())


def test_the_readme_lists_every_error() -> None:
    errors = {
        name
        for name in kestrel_client.__all__
        if inspect.isclass(value := getattr(kestrel_client, name)) and issubclass(value, Exception)
    }
    listed = re.findall(r"^\| `([A-Z]\w+)` \|", (PACKAGE.parent / "README.md").read_text(), re.MULTILINE)
    assert set(listed) == errors - {"KestrelClientError"}


def test_type_checkers_find_the_types() -> None:
    assert (PACKAGE / "py.typed").exists()
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["kestrel_client"] == ["py.typed", "v1/*.pyi"]


def test_the_examples_of_the_readme_run_as_written(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bird.jpg").write_bytes(b"bird")
    examples = re.findall("```python\n(.*?)```", (PACKAGE.parent / "README.md").read_text(), re.DOTALL)
    # The second, third and fourth example go on inside the `with` of the first.
    for example in ("".join(examples[:4]), examples[4]):
        exec(example.replace("localhost:50051", address), {})
    printed = capsys.readouterr().out
    assert printed.startswith("A red kite – höher.")
    assert len(examples) == 5
