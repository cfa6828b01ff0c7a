"""The README says what is so: its examples run as written, and its lists name what there is."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kestrel_grpc.config.flags import markdown_table
from tests.reference_fixtures import CHECKOUT

README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
COMMAND = [sys.executable, "-m", "kestrel_grpc"]

pytestmark = pytest.mark.usefixtures("warm_starts")

MAX_WAIT_S = 300.0
"""Longer than any machine needs: a longer wait is a failure."""
needs_tools = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("openssl", "curl")),
    reason="needs openssl and curl, as the examples do",
)


@pytest.fixture(scope="module")
def activated() -> dict[str, str]:
    """The variables of a shell that has activated the environment of this Python."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


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


def run(command: list[str], address: str, variables: dict[str, str]) -> str:
    """What a command prints, in the checkout, with the README's server standing at another address."""
    parts = [part.replace("localhost:50051", address) for part in command]
    done = subprocess.run(parts, cwd=CHECKOUT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_of_stored_images_run_as_written(address, activated, tmp_path):
    text = (CHECKOUT / "docs" / "images.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert "yellow star" in run([sys.executable, "-c", block], address, activated)
    (block,) = (
        found for found in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if " image " in found
    )
    upload, *others = block.splitlines()
    name = run(["bash", "-euc", f"{upload} --address {address}"], address, activated).strip()
    for line in others:
        command = line.replace("sha256:9f86…", name).replace("picture.png", str(tmp_path / "picture.png"))
        run(["bash", "-euc", f"{command} --address {address}"], address, activated)
    assert (tmp_path / "picture.png").read_bytes() == (CHECKOUT / "kestrel_grpc" / "demo_picture.png").read_bytes()


def test_the_example_of_a_schema_runs_as_written(address, activated):
    text = (CHECKOUT / "docs" / "constraints.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(import json\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert "kinds of shapes: [" in run([sys.executable, "-c", block], address, activated)


@pytest.mark.parametrize(
    ("number", "printed"),
    [
        (0, ['the word "KITE"', "(Box(x_min=0.1"]),
        (1, ["['yellow', 'blue', 'green']", "A red circle, ", "\nTrue\n"]),
    ],
)
def test_the_examples_of_the_engine_in_a_process_of_its_own_run_as_written(number: int, printed: list[str]):
    text = (CHECKOUT / "docs" / "engine.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    command = [sys.executable, "-c", blocks[number]]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=MAX_WAIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [part for part in printed if part not in done.stdout] == []


def test_the_example_of_an_adapter_runs_as_written(activated):
    text = (CHECKOUT / "docs" / "adapters.md").read_text(encoding="utf-8")
    (block,) = (
        found for found in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if "50054" in found
    )
    script = block.replace("50054", str(free_ports(1)[0])).replace("kill %1", "kill %1; wait")
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=CHECKOUT,
        env=activated,
        capture_output=True,
        text=True,
        check=False,
        timeout=MAX_WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["yellow", "gold"]


# Blocks that are not run here, by a text in them, and why.
NOT_RUN = {
    "make demo": "tests/journey runs the demo; `make test` would run this test",
    "pip install ./clients/python": "tests/test_packages.py installs the packages into an environment of their own",
    "--model moondream2 ": "downloads weights, or needs a GPU",
}
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(page: str) -> list[tuple[str, str]]:
    """The language and the text of each block that a reader can run here, in order."""
    return [(kind, text) for kind, text in _BLOCK.findall(page) if not any(part in text for part in NOT_RUN)]


def test_git_ignores_the_files_that_the_examples_write():
    written = re.findall(r"(?: 2?>|--file |--draw |-keyout |-out |venv )([\w.]+)", README)
    assert {"demo.png", "alice.token", "tokens.toml", "server.key", "server.pem", "kestrel"} <= set(written)
    command = ("git", "check-ignore", "--stdin")
    # A folder is ignored as one, also where it is not there.
    names = "\n".join(f"{name}/" if name == "kestrel" else name for name in set(written) - {"stderr", "dev"})
    done = subprocess.run(command, cwd=CHECKOUT, input=names, capture_output=True, text=True, check=False)
    assert set(done.stdout.splitlines()) == set(names.splitlines())


def free_ports(count: int) -> list[int]:
    """Ports that no one listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.fixture(scope="module")
def session(activated: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each block of the README prints to a reader who runs all of them in order, in one shell.

    The reader has activated the environment and stands in a checkout. Only the ports are others.
    """
    folder = tmp_path_factory.mktemp("reader")
    for path in CHECKOUT.iterdir():
        if not path.name.startswith(".") and path.name != "demo.png":
            (folder / path.name).symlink_to(path)
    ports = dict(zip(("50051", "50052", "50053", "8000", "9464"), free_ports(5), strict=True))
    script = ["trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT", f"export KESTREL_GRPC_PORT={ports['50051']}"]
    script.append(f"export KESTREL_GRPC_ADDRESS=localhost:{ports['50051']}")
    blocks = examples(README)
    for number, (kind, text) in enumerate(blocks):
        for written, used in ports.items():
            text = re.sub(rf"\b{written}\b", str(used), text)
        script.append(rf"printf '\n>>> {number}\n'")
        script.append(text if kind == "sh" else f"python - <<'PYTHON'\n{text}PYTHON")
    script.append("kill %1 %2 %3")
    done = subprocess.run(
        ["bash", "-euc", "\n".join(script)],
        cwd=folder,
        env=activated,
        capture_output=True,
        text=True,
        check=False,
        timeout=MAX_WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    _, *printed = re.split(r"^>>> \d+$", done.stdout, flags=re.MULTILINE)
    assert (folder / "demo.png").stat().st_size > 0
    return {text: shown for (_, text), shown in zip(blocks, printed, strict=True)}


def shown(session: dict[str, str], part: str) -> str:
    """What the block that has this text printed."""
    (found,) = (printed for text, printed in session.items() if part in text)
    return found


@needs_tools
def test_grpcurl_examples_run_as_written(session):
    printed = shown(session, "grpcurl -plaintext")
    assert "kestrel.v1.VisionService" in printed
    assert "// What the question is about." in printed
    assert '"completed"' in printed
    assert "yellow star" in printed


@needs_tools
def test_python_example_runs_as_written(session):
    printed = shown(session, "from kestrel_client import Client")
    assert "yellow star" in printed
    assert printed.count("Box(") == 5


@needs_tools
def test_command_line_examples_run_as_written(session):
    printed = shown(session, "kestrel-grpc caption")
    assert "yellow star" in printed
    assert '"points"' in printed


@needs_tools
def test_examples_over_http_run_as_written(session):
    printed = shown(session, "/v1/chat/completions")
    assert printed.count("yellow star") == 2
    assert '"choices"' in printed


@needs_tools
def test_the_example_with_a_token_and_a_certificate_runs_as_written(session):
    assert shown(session, "openssl req").rstrip().endswith("\nyellow")


@needs_tools
def test_the_remaining_examples_run_as_written(session):
    assert "0 failed" in shown(session, "kestrel-grpc verify")
    assert "kestrel_scheduler_waiting" in shown(session, "9464/metrics")
    assert "moondream-nano" in shown(session, "kestrel-grpc models")


def test_the_first_screen_shows_what_the_built_in_model_answers(address, activated):
    (block,) = re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    asked = re.findall(r"^\$ (.*)\n((?:[^$].*\n)+)", block, re.MULTILINE)
    assert len(asked) == block.count("$ ") > 1
    for command, answer in asked:
        assert run(["bash", "-euc", f"{command} --address {address}"], address, activated) == answer


def test_every_block_is_run_or_has_a_reason():
    assert [part for part in NOT_RUN if not any(part in text for _, text in _BLOCK.findall(README))] == []
    assert len(examples(README)) >= 8


def test_table_of_options_is_that_of_the_server():
    page = (CHECKOUT / "docs" / "configuration.md").read_text(encoding="utf-8")
    table = re.search(r"<!-- options -->\n(.*?)\n<!-- /options -->", page, re.DOTALL)
    assert table is not None
    assert table[1] == markdown_table(), "write what `python -m kestrel_grpc.config.flags` prints there"


def test_every_file_that_is_named_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    examples = re.findall(r"[a-z_/]+/\w+\.png", README)
    assert examples
    assert [path for path in {*links, *examples} if not (CHECKOUT / path).exists()] == []


def test_every_benchmark_is_listed():
    rows = re.findall(r"^\|.*\| (`.*) \|$", (CHECKOUT / "bench" / "README.md").read_text("utf-8"), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    modules = {path.stem for path in (CHECKOUT / "bench").glob("*.py") if path.stem != "__init__"}
    assert modules <= listed
    assert [name for name in listed - modules if not (CHECKOUT / "bench" / name).is_dir()] == []
