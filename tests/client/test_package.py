"""The package as its users meet it."""

import importlib.metadata
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from PIL import Image

import kestrel_client
from kestrel_client import errors
from tools.blocking_client import generated

PACKAGE = Path(kestrel_client.__file__).parent


def test_everything_public_is_exported_and_nothing_else():
    public = {
        name
        for name, value in vars(kestrel_client).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert public == set(kestrel_client.__all__)


def test_importing_loads_neither_torch_nor_pillow_nor_the_server_and_warns_of_nothing():
    code = (
        "import sys, kestrel_client, kestrel_client.v1.engine_service_pb2_grpc;"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert run.stderr == ""
    assert not {"torch", "numpy", "PIL", "kestrel_grpc", "kestrel_runtime"} & set(run.stdout.split())


def test_the_readme_lists_every_error():
    errors = {
        name
        for name in kestrel_client.__all__
        if inspect.isclass(value := getattr(kestrel_client, name)) and issubclass(value, Exception)
    }
    listed = re.findall(r"^\| `([A-Z][a-z]\w+)` \|", (PACKAGE.parent / "README.md").read_text(), re.MULTILINE)
    assert set(listed) == errors - {"KestrelClientError"}


def test_the_readme_lists_every_reason_of_the_client():
    text = (PACKAGE.parent / "README.md").read_text()
    listed = re.findall(r"^\| `([A-Z_]+)` \|", text, re.MULTILINE)
    others = (
        *(errors.SERVER_UNREACHABLE, errors.CLIENT_CLOSED, errors.RESULT_MISSING, errors.SCORES_MISSING),
        errors.SERVER_LOST,
    )
    assert set(listed) == {*errors.LOCAL_REASONS.values(), *others}


def test_the_package_tells_its_version():
    assert kestrel_client.__version__ == importlib.metadata.version("kestrel-grpc-client")


def test_the_blocking_client_is_generated_from_the_asyncio_client():
    for name, text in generated().items():
        assert (PACKAGE / name).read_text(encoding="utf-8") == text, "run: python -m tools.blocking_client"


@pytest.mark.parametrize("client", [kestrel_client.Client, kestrel_client.AsyncClient])
def test_the_help_of_each_method_describes_each_argument(client: type):
    for name, method in inspect.getmembers(client, inspect.isfunction):
        arguments = [argument for argument in inspect.signature(method).parameters if argument != "self"]
        if (name.startswith("__") and name != "__init__") or not arguments:
            continue
        text = inspect.getdoc(client if name == "__init__" else method) or ""
        described = re.findall(r"^    \**(\w+): ", text, re.MULTILINE)
        assert [argument for argument in arguments if argument not in described] == [], name


def test_the_help_of_the_options_describes_each_of_them():
    options = kestrel_client.CallOptions
    described = re.findall(r"^    (\w+): ", inspect.getdoc(options) or "", re.MULTILINE)
    assert described == list(options.__annotations__)
    for client in (kestrel_client.Client, kestrel_client.AsyncClient):
        for method in (client.query, client.caption, client.point, client.detect, client.segment):
            assert "see `CallOptions`" in (method.__doc__ or "")


def test_the_readme_lists_every_option():
    text = (PACKAGE.parent / "README.md").read_text()
    _, _, section = text.partition("## What every call takes")
    listed = re.findall(r"^\| `([a-z]\w*)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert listed == list(kestrel_client.CallOptions.__annotations__)


def test_type_checkers_find_the_types():
    assert (PACKAGE / "py.typed").exists()
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["kestrel_client"] == ["py.typed", "v1/*.pyi"]


def test_the_examples_of_the_readme_run_as_written(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 30), "white").save("bird.jpg")
    examples = re.findall("```python\n(.*?)```", (PACKAGE.parent / "README.md").read_text(), re.DOTALL)
    monkeypatch.setenv("KESTREL_GRPC_ADDRESS", address)
    for example in examples:
        exec(example.replace("localhost:50051", address), {})
    printed = capsys.readouterr().out
    assert printed.startswith("A red kite – höher.")
    assert len(examples) == 14
    assert Path("mask.png").exists()
    with Image.open("drawn.jpg") as drawn:
        assert drawn.size == (40, 30)
