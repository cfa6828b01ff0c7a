"""The two packages, as their users install them: built, installed with what they need alone, served and asked."""

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kestrel_client
from kestrel_grpc import __version__
from tests.reference_fixtures import CHECKOUT

DEMO_PICTURE = CHECKOUT / "kestrel_grpc" / "demo_picture.png"
# Users' settings of Python and of this server have no effect on what is tested.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KESTREL"))}


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; fails with what it complains about."""
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The server's and the client's, built from a copy of the files that git tracks."""
    source = tmp_path_factory.mktemp("source")
    tracked = run("git", "ls-files", "-z", cwd=CHECKOUT).split("\0")
    for name in filter(None, tracked):
        if not name.startswith(("tests/", "bench/", "training/")) and (CHECKOUT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((CHECKOUT / name).read_bytes())
    built = source / "wheels"
    # In this environment, which has setuptools, so that nothing is downloaded for it.
    build = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*build, "--wheel-dir", built, source, source / "clients" / "python", cwd=source)
    (server,) = built.glob("kestrel_grpc-*.whl")
    (client,) = built.glob("kestrel_grpc_client-*.whl")
    return server, client


@pytest.fixture(scope="module")
def commands(wheels: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment that has both packages and what serves models, and nothing else."""
    return installed(wheels, tmp_path_factory.mktemp("environment"), "kestrel-grpc[server]")


@pytest.fixture(scope="module")
def light_commands(wheels: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without extras: no library that loads a model is there."""
    return installed(wheels, tmp_path_factory.mktemp("light"), "kestrel-grpc")


def installed(wheels: tuple[Path, Path], folder: Path, wanted: str) -> Path:
    """Makes an environment with both packages and all that a requirement needs; returns its folder of commands."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    printed = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    packages = Path(printed.strip())
    # `make setup` has had pip find and download what they need; here the same files are linked, in a second.
    for needed in requirements(wanted):
        link_files(needed, packages)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", *wheels, cwd=folder)
    run(*pip, "check", cwd=folder)
    return folder / "bin"


def requirements(name: str) -> list[Distribution]:
    """All that a requirement needs, as installed in this environment; not our own packages."""
    found: dict[tuple[str, str], Distribution] = {}
    pending = [Requirement(name)]
    while pending:
        wanted = pending.pop()
        needed = distribution(wanted.name)
        for extra in ("", *wanted.extras):
            key = (canonicalize_name(wanted.name), extra)
            if key not in found:
                found[key] = needed
                others = map(Requirement, needed.requires or ())
                pending += [one for one in others if one.marker is None or one.marker.evaluate({"extra": extra})]
    return [needed for (name, extra), needed in found.items() if not extra and not name.startswith("kestrel-grpc")]


def link_files(needed: Distribution, packages: Path) -> None:
    """Put links to the modules and the metadata of a distribution, without its commands, into a `site-packages`.

    A folder that has modules of its own is one link: no other distribution adds to it. In others, such as those of
    namespace packages, each file is a link.
    """
    files = [file for file in needed.files or () if ".." not in file.parts]
    whole = {file.parts[0] for file in files if file.parts[1:] == ("__init__.py",)}
    for name in whole:
        (packages / name).symlink_to(Path(str(needed.locate_file(name))))
    for file in files:
        if file.parts[0] not in whole:
            (packages / file).parent.mkdir(parents=True, exist_ok=True)
            (packages / file).symlink_to(Path(str(needed.locate_file(file))))


@pytest.fixture(scope="module")
def address(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the installed package."""
    command: Sequence[str | Path] = (commands / "kestrel-grpc", "serve", "--port", "0")
    folder = tmp_path_factory.mktemp("server")
    with subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r" on (\S+) ", server.stdout.readline())
            assert found is not None
            yield found[1]
        finally:
            server.terminate()


def test_the_installed_server_answers_the_installed_client(commands, address, tmp_path):
    ask = ("query", DEMO_PICTURE, "What color is the star?", "--address", address)
    assert run(commands / "kestrel-grpc", *ask, cwd=tmp_path).strip() == "yellow"
    code = (
        "import sys; from kestrel_client import Client\n"
        "with Client(sys.argv[1]) as client: print(len(client.detect(sys.argv[2], 'shape').objects))"
    )
    assert run(commands / "python", "-c", code, address, DEMO_PICTURE, cwd=tmp_path).strip() == "5"


def test_commands_without_the_server_ask_one(light_commands, address, tmp_path):
    ask = ("query", DEMO_PICTURE, "What color is the star?", "--address", address)
    assert run(light_commands / "kestrel-grpc", *ask, cwd=tmp_path).strip() == "yellow"
    facts = run(light_commands / "kestrel-grpc", "info", "--address", address, cwd=tmp_path)
    assert facts.split()[:2] == ["server_version", __version__]


LOADS_A_MODEL = [
    *(["serve", "--port", "0"], ["config"], ["demo"], ["compile", "--target", "9.0"], ["verify", "."], ["accept"]),
    ["batch", "in.jsonl", "out.jsonl"],
]


def test_what_loads_a_model_names_the_missing_extra(light_commands, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"skill": "query", "question": "What is here?"}\n', encoding="utf-8")
    for words in LOADS_A_MODEL:
        command = (light_commands / "kestrel-grpc", *words)
        done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, ""), words
        (line,) = done.stderr.splitlines()
        assert "torch, tokenizers, safetensors, llguidance, huggingface_hub are not installed" in line
        assert "pip install 'kestrel-grpc[server]'" in line
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_no_file_is_in_both_packages(wheels):
    server, client = (set(zipfile.ZipFile(wheel).namelist()) for wheel in wheels)
    assert server & client == set()
    assert {name.partition("/")[0] for name in client if ".dist-info" not in name} == {"kestrel_client"}


def test_every_module_is_in_its_package(wheels):
    server, client = (set(zipfile.ZipFile(wheel).namelist()) for wheel in wheels)
    roots = {"": server, "runtime": server, "kernels": server, "clients/python": client}
    for root, packed in roots.items():
        for package in ("kestrel_grpc", "kestrel_runtime", "kestrel_ops", "kestrel_client"):
            modules = {path.relative_to(CHECKOUT / root) for path in (CHECKOUT / root / package).rglob("*.py")}
            assert {path.as_posix() for path in modules} <= packed
    assert "kestrel_runtime/nano/adapters/gold/adapter_model.safetensors" in server
    page = CHECKOUT / "kestrel_grpc" / "frontends" / "web_ui" / "static"
    assert {path.relative_to(CHECKOUT).as_posix() for path in page.iterdir()} <= server


def test_the_server_needs_the_client_of_its_own_version():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = (
        requirement
        for requirement in map(Requirement, project["dependencies"])
        if requirement.name == "kestrel-grpc-client"
    )
    assert __version__ == version("kestrel-grpc-client") == version("kestrel-grpc")
    assert f">={__version__}" in str(needed.specifier)
    assert Path(kestrel_client.__file__).is_relative_to(CHECKOUT)
