"""The commands and programs of docs/stubs.md, run one after the other."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reference_fixtures import CHECKOUT
from tests.server.serving import serving

PAGE = (CHECKOUT / "docs" / "stubs.md").read_text(encoding="utf-8")


def run(program: str, *command: str, cwd: Path, path: Path) -> str:
    """What a program prints that is given as standard input, with `path` before others on Python's."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        command, input=program, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the first commands of the page were run, with the contract."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "proto").symlink_to(CHECKOUT / "proto")
    compiling, *_ = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert compiling.startswith("python -m pip install grpcio-tools\n")
    run(compiling.partition("\n")[2], "sh", "-e", cwd=folder, path=folder)
    return folder


async def test_the_program_asks_a_server_with_stubs_that_were_made_as_the_page_says(folder: Path):
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    async with serving() as rig:
        here = program.replace("localhost:50051", rig.address)
        assert here != program
        # In a thread: the server runs on this event loop.
        printed = await asyncio.to_thread(run, here, sys.executable, "-", cwd=folder, path=folder / "stubs")
    assert printed == "fake\n"


def test_stubs_with_another_name_live_beside_a_package_named_kestrel_and_the_client(folder: Path):
    engine = folder / "engine"
    (engine / "kestrel").mkdir(parents=True)
    (engine / "kestrel" / "__init__.py").write_text("IS_ENGINE = True\n")
    path = Path(f"{engine}:{folder / 'stubs'}:{CHECKOUT / 'clients' / 'python'}")
    failing = "try:\n import kestrel.v1\nexcept ModuleNotFoundError as error:\n print(error)\n"
    said = run(failing, sys.executable, "-", cwd=folder, path=path).strip()
    assert said == "No module named 'kestrel.v1'"
    assert said in PAGE
    _, renaming, *_ = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    run(renaming, "sh", "-e", cwd=folder, path=folder)
    both = (
        "import kestrel\n"
        "from my_stubs.v1 import vision_service_pb2, vision_service_pb2_grpc\n"
        "from kestrel_client.v1 import vision_service_pb2 as theirs\n"
        "assert kestrel.IS_ENGINE\n"
        "assert vision_service_pb2.QueryRequest.DESCRIPTOR.full_name == theirs.QueryRequest.DESCRIPTOR.full_name\n"
        "print(vision_service_pb2.QueryRequest.DESCRIPTOR.full_name)\n"
    )
    assert run(both, sys.executable, "-", cwd=folder, path=path) == "kestrel.v1.QueryRequest\n"
