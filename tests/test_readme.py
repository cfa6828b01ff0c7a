"""The README says what is so: its examples run as written, and its lists name what there is."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kestrel_grpc.config.flags import markdown_table
from tests.reference_fixtures import CHECKOUT

README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
COMMAND = [sys.executable, "-m", "kestrel_grpc"]


def blocks(language: str, containing: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [block for block in found if containing in block]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server started as a reader would start it, but for its port."""
    command = [*COMMAND, "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            found = re.search(r" on (\S+) ", line)
            assert found is not None, line
            yield found[1]
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0


def run(command: list[str], address: str) -> str:
    """What a command prints, in the checkout, with the README's server standing at another address."""
    parts = [part.replace("localhost:50051", address) for part in command]
    done = subprocess.run(parts, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_grpcurl_examples_run_as_written(address):
    (block,) = blocks("sh", "grpcurl -plaintext")
    printed = run(["bash", "-euc", block], address)
    assert "kestrel.v1.VisionService" in printed
    assert "rpc CompleteQuery" in printed
    assert '"completed"' in printed
    assert "yellow star" in printed


def test_python_example_runs_as_written(address):
    (block,) = blocks("python", "from kestrel_client import Client")
    printed = run([sys.executable, "-c", block], address)
    assert "yellow star" in printed
    assert printed.count("Box(") == 5


def test_examples_of_stored_images_run_as_written(address, tmp_path):
    text = (CHECKOUT / "docs" / "images.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert "yellow star" in run([sys.executable, "-c", block], address)
    (block,) = (
        found for found in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if " image " in found
    )
    upload, *others = block.splitlines()
    name = run(["bash", "-euc", f"{upload} --address {address}"], address).strip()
    for line in others:
        command = line.replace("sha256:9f86…", name).replace("picture.png", str(tmp_path / "picture.png"))
        run(["bash", "-euc", f"{command} --address {address}"], address)
    assert (tmp_path / "picture.png").read_bytes() == (CHECKOUT / "kestrel_grpc" / "demo_picture.png").read_bytes()


def test_command_line_examples_run_as_written(address, tmp_path):
    (block,) = blocks("sh", "kestrel-grpc caption")
    drawing = tmp_path / "demo.png"
    for line in block.splitlines():
        command = line.replace("demo.png", str(drawing)) + f" --address {address}"
        assert run(["bash", "-euc", command], address)
    assert drawing.stat().st_size > 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, which makes the certificate")
def test_the_example_with_a_token_and_a_certificate_runs_as_written(tmp_path):
    (serve,), (ask,) = blocks("sh", "openssl req"), blocks("sh", "export KESTREL_GRPC_TOKEN")
    for name in (".venv", "kestrel_grpc"):
        (tmp_path / name).mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (tmp_path / "kestrel_grpc" / "demo_picture.png").write_bytes(
        (CHECKOUT / "kestrel_grpc" / "demo_picture.png").read_bytes()
    )
    # A shell ends with its last command, so that the signal reaches the server itself.
    script = re.sub(r"(?m)^(\S+kestrel-grpc serve)", r"exec \1 --port 0", serve)
    with subprocess.Popen(
        ["bash", "-euc", script], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            found = re.search(r" on \S+:(\d+) ", server.stdout.readline())
            assert found is not None
            command = f"{ask.rstrip()} --address localhost:{found[1]}"
            asked = subprocess.run(
                ["bash", "-euc", command], cwd=tmp_path, capture_output=True, text=True, check=False
            )
        finally:
            server.terminate()
    assert (asked.stdout, asked.stderr) == ("yellow\n", "")


def test_table_of_options_is_that_of_the_server():
    table = re.search(r"<!-- options -->\n(.*?)\n<!-- /options -->", README, re.DOTALL)
    assert table is not None
    assert table[1] == markdown_table(), "write what `python -m kestrel_grpc.config.flags` prints there"


def test_every_file_that_is_named_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    examples = re.findall(r"[a-z_/]+/\w+\.png", README)
    assert examples
    assert [path for path in {*links, *examples} if not (CHECKOUT / path).exists()] == []


def test_every_benchmark_is_listed():
    listed = re.findall(r"^\| `(\w+\.py)` \|", (CHECKOUT / "bench" / "README.md").read_text(), re.MULTILINE)
    assert listed == sorted(path.name for path in (CHECKOUT / "bench").glob("*.py"))
